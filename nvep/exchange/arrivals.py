"""What one step brought to this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nvep.arrays import DeviceArray


@dataclass(frozen=True)
class Arrivals:
    """Views of a lane's receive buffers; addresses never change, contents belong to the step that returned this.

    Valid from the stream position of ``dispatch`` (or ``dispatch_recv``) until ``combine`` (or ``combine_send``) or
    ``release`` of the same step: after that, peers write the next step here.

    Attributes
    ----------
    payloads : tuple of DeviceArray
        uint8 ``[ranks, max_tokens, bytes]`` for each payload; row ``[s, i]`` is a token of source rank ``s``.
    expert_ids : DeviceArray
        int32 ``[ranks, max_tokens, top_k]``: global ids of each token, ``invalid_expert`` at and beyond the count,
        and for ids that were invalid.
    expert_weights : DeviceArray
        float32 ``[ranks, max_tokens, top_k]``; undefined at and beyond the count.
    counts : DeviceArray
        int32 ``[ranks]``: tokens received from each source.
    partial_rows : DeviceArray
        ``[ranks, max_tokens, partial_elements]`` in the partial format: write here and give this very array to
        ``combine`` to save a copy.
    protocol : str
        ``"fence"``: rows are compact, those below the count hold tokens. ``"sentinel"``: row ``[s, i]`` is token ``i``
        of rank ``s``, the count is the number of its tokens, and a row that did not come here has only invalid ids.
    lane, step : int
        The lane, and the step of that lane counted on the host.
    """

    payloads: tuple[DeviceArray, ...]
    expert_ids: DeviceArray
    expert_weights: DeviceArray
    counts: DeviceArray
    partial_rows: DeviceArray
    protocol: str
    lane: int
    step: int = field(compare=False)

    @property
    def rows(self) -> DeviceArray:
        """The first payload."""
        return self.payloads[0]

    def occupied(self) -> np.ndarray:
        """Which rows hold a token, read from the headers after waiting for the stream.

        Returns
        -------
        numpy.ndarray
            bool ``[ranks, max_tokens]`` on the host.
        """
        return np.asarray((self.expert_ids.numpy() >= 0).any(axis=-1))


def of_step(arrivals: Arrivals, step: int) -> Arrivals:
    """The same views for another step (`dataclasses.replace` takes ten times as long)."""
    other = object.__new__(Arrivals)
    other.__dict__.update(arrivals.__dict__)
    other.__dict__["step"] = step
    return other
