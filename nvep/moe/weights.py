"""Expert weights: global arrays in, this rank's share on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.config import partial_dtype
from nvep.errors import ArgumentError, ShapeError
from nvep.inputs import InputSpec, as_input
from nvep.runtime.device import Device, Memory

_ALIGNED_ELEMENTS = 8  # 16 bytes of bf16


@dataclass(frozen=True)
class MoEWeights:
    """Weights of all experts of a layer, in host memory; each rank copies its own to its device.

    Attributes
    ----------
    gate, up : array
        bf16 ``[num_experts, intermediate, hidden]``: NumPy with ml_dtypes, or any DLPack producer on the host.
    down : array
        bf16 ``[num_experts, hidden, intermediate]``.
    """

    gate: Any
    up: Any
    down: Any

    def checked(self, device: Device) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three arrays as NumPy views, for a rank whose device is ``device``.

        Raises
        ------
        DTypeError, ShapeError
            Naming the array.
        """
        gate = _host_array(device, "gate", self.gate, ("experts", "intermediate", "hidden"))
        experts, intermediate, hidden = gate.shape
        if hidden % _ALIGNED_ELEMENTS or intermediate % _ALIGNED_ELEMENTS:
            allowed = f"hidden and intermediate sizes that are multiples of {_ALIGNED_ELEMENTS}"
            raise ShapeError("weights.gate", gate.shape, allowed)
        up = _host_array(device, "up", self.up, (experts, intermediate, hidden))
        down = _host_array(device, "down", self.down, (experts, hidden, intermediate))
        return gate, up, down


def _host_array(device: Device, name: str, array: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    spec = InputSpec(f"weights.{name}", (partial_dtype("bf16"),), shape)
    view = as_input(array, spec, device=device)
    if not view.settled:
        raise ArgumentError(spec.name, "a device array", "a host array")
    return view.to_numpy()


class LocalExperts:
    """One rank's experts on its device, in ascending order of their global ids.

    Attributes
    ----------
    index : Memory
        int32 ``[num_experts]``: local position of each global id, or -1.
    gate, up, down : Memory
        bf16, as in `MoEWeights` with the local experts only.
    """

    def __init__(self, device: Device, weights: tuple[np.ndarray, np.ndarray, np.ndarray], index: np.ndarray) -> None:
        self._memories: list[Memory] = []
        mine = np.flatnonzero(index >= 0)
        try:
            self.index = self._put(device, index)
            self.gate, self.up, self.down = (self._put(device, w[mine]) for w in weights)
            device.default_stream.synchronize()
        except BaseException:
            self.close()
            raise

    def _put(self, device: Device, array: np.ndarray) -> Memory:
        memory = device.allocate(max(array.nbytes, 16))
        self._memories.append(memory)
        if array.nbytes:
            device.copy_in(memory.address, np.ascontiguousarray(array), device.default_stream)
        return memory

    def close(self) -> None:
        """Free the device copies. Idempotent."""
        while self._memories:
            self._memories.pop().free()
