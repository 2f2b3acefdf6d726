"""Expert weights: all experts in, one rank's share on its device, one expert at a time."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nvep.config import partial_dtype
from nvep.errors import ArgumentError, DTypeError, ShapeError
from nvep.inputs import InputSpec, as_input
from nvep.moe.checkpoint import Checkpoint
from nvep.moe.naming import ExpertParts, stored_weights
from nvep.moe.placement import Placement
from nvep.moe.stored import FP8_BLOCK, ExpertTensor, LazyExperts, ReplicatedExperts
from nvep.runtime.device import Device, Memory

_ALIGNED_BYTES = 16
_BF16, _FP32, _FP8 = partial_dtype("bf16"), np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)


class CheckedWeights(NamedTuple):
    """What `MoEWeights.checked` found right; ``format`` is ``"bf16"`` or ``"fp8_block"``."""

    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor
    scales: ExpertParts | None
    biases: ExpertParts | None
    format: str


@dataclass(frozen=True)
class MoEWeights:
    """Weights of all experts of a layer; each rank copies its own to its device.

    Attributes
    ----------
    gate, up : array
        bf16 or e4m3 ``[num_experts, intermediate, hidden]``: NumPy with ml_dtypes, any DLPack producer on the host, or
        what `from_safetensors` gives, which reads an expert when it is asked for.
    down : array
        As ``gate``: ``[num_experts, hidden, intermediate]``.
    biases : ExpertParts or None
        bf16 or float32 ``gate`` and ``up`` ``[num_experts, intermediate]``, ``down`` ``[num_experts, hidden]``, where a
        model has them.
    scales : ExpertParts or None
        Of e4m3 matrices: float32 ``[num_experts, rows / 128, columns / 128]``, rounded up, one for each block.
    """

    gate: Any
    up: Any
    down: Any
    biases: ExpertParts | None = None
    scales: ExpertParts | None = None

    @staticmethod
    def from_safetensors(path: str | PathLike[str], *, layer: int, naming: str, dequantise: bool = True) -> MoEWeights:
        """The experts of one layer of a checkpoint. Headers are read and checked now, an expert when it is needed.

        A `MoELayer` thus reads the experts of its rank only, one matrix at a time, and keeps none in host memory. The
        files must stay as they are until then.

        Parameters
        ----------
        path : path-like
            A ``.safetensors`` file, a folder with such files or with ``model.safetensors.index.json``, or the index.
        layer : int
            Number of the layer in the model.
        naming : str
            How the model family calls its tensors: ``"mixtral"``, ``"qwen-moe"``, ``"deepseek"``, ``"olmoe"``
            (a tensor for each expert: bf16, or e4m3 with scales of 128 x 128 blocks), ``"gpt-oss"`` (gate and up
            interleaved, with biases: bf16 or mxfp4), or ``"stacked"`` (``layers.<layer>.experts.gate``, ``up`` and
            ``down``, as the attributes). Any other storage is refused.
        dequantise : bool
            Quantised matrices read as bf16, rounded once (exact for mxfp4). Otherwise they stay as stored, with
            ``scales``: e4m3 with float32 ``[num_experts, rows / 128, columns / 128]``, or mxfp4 as uint8
            ``[num_experts, rows, columns / 32, 16]`` with ue8m0 ``[num_experts, rows, columns / 32]``.

        Raises
        ------
        ArgumentError
            A file or tensor is missing, or a file is not intact.
        DTypeError, ShapeError
            Naming the tensor that is not as it should be.
        """
        found = stored_weights(Checkpoint(path), layer, naming, dequantise=dequantise)
        return MoEWeights(*found.matrices, biases=found.biases, scales=found.scales)

    def replicated(self, placement: Placement) -> MoEWeights:
        """Weights of physical experts, for a layer over ``placement.num_physical`` experts on ``placement.ranks``.

        Nothing is copied: copies of an expert read the same memory or file.

        Raises
        ------
        ArgumentError
            The placement is of another number of experts.
        """
        if not isinstance(placement, Placement) or placement.num_logical != len(self.gate):
            raise ArgumentError("placement", placement, f"a Placement of {len(self.gate)} experts")
        gate, up, down = _copied(ExpertParts(self.gate, self.up, self.down), placement)
        biases, scales = (None if parts is None else _copied(parts, placement) for parts in (self.biases, self.scales))
        return MoEWeights(gate, up, down, biases, scales)

    def checked(self, device: Device) -> CheckedWeights:
        """The parts of every expert, for a rank whose device is ``device``.

        Raises
        ------
        DTypeError, ShapeError
            Naming the array.
        ArgumentError
            Scales of matrices that need none.
        """
        kind = _FP8 if getattr(self.gate, "dtype", None) == _FP8 else _BF16
        gate = _host_array(device, "gate", self.gate, ("experts", "intermediate", "hidden"), kind)
        experts, intermediate, hidden = gate.shape
        aligned = _ALIGNED_BYTES // kind.itemsize
        if hidden % aligned or intermediate % aligned:
            allowed = f"hidden and intermediate sizes that are multiples of {aligned}"
            raise ShapeError("weights.gate", gate.shape, allowed)
        up = _host_array(device, "up", self.up, (experts, intermediate, hidden), kind)
        down = _host_array(device, "down", self.down, (experts, hidden, intermediate), kind)
        scales = self._checked_scales(device, gate.shape, quantised=kind == _FP8)
        biases = None
        if self.biases is not None:
            sizes = (intermediate, intermediate, hidden)
            named = zip(ExpertParts._fields, self.biases, sizes)
            biases = ExpertParts(
                *(_host_array(device, f"biases.{n}", a, (experts, s), _BF16, _FP32) for n, a, s in named)
            )
        return CheckedWeights(gate, up, down, scales, biases, "fp8_block" if kind == _FP8 else "bf16")

    def _checked_scales(self, device: Device, shape: tuple[int, ...], *, quantised: bool) -> ExpertParts | None:
        if not quantised:
            if self.scales is not None:
                raise ArgumentError("weights.scales", "scales", "None: bf16 matrices have none")
            return None
        if self.scales is None:
            raise ArgumentError("weights.scales", None, "scales of 128 x 128 blocks: the matrices are e4m3")
        experts, rows, columns = shape[0], -(-shape[1] // FP8_BLOCK), -(-shape[2] // FP8_BLOCK)
        sizes = ((experts, rows, columns), (experts, rows, columns), (experts, columns, rows))
        named = zip(ExpertParts._fields, self.scales, sizes)
        return ExpertParts(*(_host_array(device, f"scales.{n}", a, s, _FP32) for n, a, s in named))


def _copied(parts: ExpertParts, placement: Placement) -> ExpertParts:
    return ExpertParts(*(ReplicatedExperts(part, placement.logical) for part in parts))


def _host_array(
    device: Device, name: str, array: Any, shape: tuple[int | str, ...], *dtypes: np.dtype[Any]
) -> ExpertTensor:
    spec = InputSpec(f"weights.{name}", dtypes, shape)
    if isinstance(array, ReplicatedExperts):
        source = _host_array(device, name, array.source, ("experts", *shape[1:]), *dtypes)
        return _checked_lazy(spec, ReplicatedExperts(source, array.logical))
    if isinstance(array, LazyExperts):
        return _checked_lazy(spec, array)
    view = as_input(array, spec, device=device)
    if not view.settled:
        raise ArgumentError(spec.name, "a device array", "a host array")
    return view.to_numpy()


def _checked_lazy(spec: InputSpec, array: LazyExperts) -> LazyExperts:
    if array.dtype not in spec.dtypes:
        raise DTypeError(spec.name, str(array.dtype), spec.dtypes[0].name)
    extents = zip(spec.shape, array.shape)
    if len(spec.shape) != len(array.shape) or any(isinstance(w, int) and w != have for w, have in extents):
        raise ShapeError(spec.name, array.shape, spec.describe_shape())
    return array


def _expert(tensor: ExpertTensor, expert: int, element: np.dtype[Any]) -> np.ndarray:
    array: np.ndarray = np.ascontiguousarray(tensor[expert], dtype=element)
    # Kernels take e4m3 apart as if every code were a number.
    if element == _FP8 and ((array.view(np.uint8) & 0x7F) == 0x7F).any():
        raise ArgumentError("weights", f"NaN in expert {expert}", "finite e4m3 matrices")
    return array


class LocalExperts:
    """One rank's experts on its device, in ascending order of their global ids.

    Attributes
    ----------
    index : Memory
        int32 ``[num_experts]``: local position of each global id, or -1.
    gate, up, down : Memory
        As in `MoEWeights` with the local experts only.
    scales, biases : ExpertParts of Memory, or None
        float32, likewise.
    count : int
        Local experts.
    nbytes : int
        Of everything.
    """

    def __init__(self, device: Device, weights: CheckedWeights, index: np.ndarray) -> None:
        self._memories: list[Memory] = []
        mine = [int(expert) for expert in np.flatnonzero(index >= 0)]
        self.count = len(mine)
        try:
            self.index = self._allocate(device, index.nbytes)
            device.copy_in(self.index.address, np.ascontiguousarray(index), device.default_stream)
            self.gate, self.up, self.down = (self._put(device, tensor, mine) for tensor in weights[:3])
            self.scales, self.biases = (
                None if parts is None else tuple(self._put(device, t, mine, dtype=_FP32) for t in parts)
                for parts in (weights.scales, weights.biases)
            )
            device.default_stream.synchronize()
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def addresses(self) -> dict[str, int]:
        """By name ``gate``, ``gate_scales``, ``gate_biases`` and so on; 0 for what there is not."""
        found = {}
        for i, name in enumerate(ExpertParts._fields):
            found[name] = (self.gate, self.up, self.down)[i].address
            found[f"{name}_scales"] = self.scales[i].address if self.scales else 0
            found[f"{name}_biases"] = self.biases[i].address if self.biases else 0
        return found

    def _allocate(self, device: Device, nbytes: int) -> Memory:
        memory = device.allocate(max(nbytes, 16))
        self._memories.append(memory)
        return memory

    def _put(self, device: Device, tensor: ExpertTensor, mine: list[int], dtype: Any = None) -> Memory:
        element = np.dtype(dtype or tensor.dtype)
        nbytes = int(np.prod(tensor.shape[1:])) * element.itemsize
        memory = self._allocate(device, len(mine) * nbytes)
        for position, expert in enumerate(mine):
            address = memory.address + position * nbytes
            device.copy_in(address, _expert(tensor, expert, element), device.default_stream)
            device.default_stream.synchronize()  # copies that wait in a stream would hold the experts in memory
        return memory

    def close(self) -> None:
        """Free the device copies. Idempotent."""
        while self._memories:
            self._memories.pop().free()
