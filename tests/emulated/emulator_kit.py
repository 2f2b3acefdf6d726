"""What the emulator's tests share: the test kernels' argument structs, and one call that runs a kernel on arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape, Stream
from nvep.runtime.emulated import EmulatedDevice
from nvep.runtime.source import KernelSource

KERNELS = Path(__file__).parent / "kernels"

_ATOMIC_TOTALS = """
struct AtomicTotals {
  int signed_sum; unsigned unsigned_sum; float float_sum; unsigned bits; int highest;
  unsigned relaxed; unsigned ordered; unsigned last; unsigned long long swapped; unsigned long long handed_out;
};
"""
_FIELDS: dict[str, tuple[str, list[Field]]] = {
    "warp_collectives": (
        "WarpArguments",
        [
            Field("values", "const unsigned*"),
            Field("results", "unsigned long long*"),
            Field("active", "u32"),
            Field("split", "u32"),
            Field("width", "u32"),
            Field("delta", "u32"),
        ],
    ),
    "block_reduce": (
        "ReduceArguments",
        [Field("values", "const int*"), Field("results", "int*"), Field("rows", "u32"), Field("columns", "u32")],
    ),
    "early_return": (
        "ReturnArguments",
        [Field("counts", "int*"), Field("ballots", "unsigned*"), Field("reversed", "u32")],
    ),
    "atomics": ("AtomicArguments", [Field("totals", "struct AtomicTotals*"), Field("repeats", "u32")]),
    "grid_barrier": (
        "BarrierArguments",
        [
            Field("arrived", "unsigned*"),
            Field("most", "unsigned*"),
            Field("seen", "unsigned*"),
            Field("deadline_ns", "u64"),
            Field("expected", "u32"),
        ],
    ),
    "faults": ("FaultArguments", [Field("out", "unsigned*"), Field("mode", "u32")]),
    "deep_stack": ("StackArguments", [Field("out", "unsigned*"), Field("spare", "u32")]),
    "conversions": (
        "ConversionArguments",
        [
            Field("from_bf16", "float*"),
            Field("from_half", "float*"),
            Field("from_e4m3", "float*"),
            Field("values", "const float*"),
            Field("to_bf16", "unsigned short*"),
            Field("to_half", "unsigned short*"),
            Field("to_e4m3", "unsigned char*"),
            Field("count", "u32"),
        ],
    ),
    "arithmetic": (
        "ArithmeticArguments",
        [
            Field("a", "const float*"),
            Field("b", "const float*"),
            Field("c", "const float*"),
            Field("floats", "float*"),
            Field("integers", "int*"),
            Field("count", "u32"),
        ],
    ),
    "append": (
        "AppendArguments",
        [
            Field("log", "unsigned*"),
            Field("length", "unsigned*"),
            Field("input", "const unsigned*"),
            Field("value", "u32"),
        ],
    ),
    "primitives": ("PrimitiveArguments", [Field("words", "unsigned*"), Field("doubles", "unsigned long long*")]),
}
_WORD_FIELDS = [
    Field("flag", "unsigned long long*"),
    Field("from", "const unsigned*"),
    Field("to", "unsigned*"),
    Field("value", "u64"),
    Field("deadline_ns", "u64"),
    Field("words", "u32"),
]
_FIELDS["wait_word"] = _FIELDS["post_word"] = ("WordArguments", _WORD_FIELDS)
NAMES = tuple(sorted(_FIELDS))


def source(name: str) -> KernelSource:
    """The test kernel ``kernels/<name>.cu``."""
    struct, fields = _FIELDS[name]
    arguments = ArgumentStruct(struct, fields)
    if name == "atomics":
        return KernelSource(name, _WithTotals(struct, fields), file=KERNELS / f"{name}.cu")
    return KernelSource(name, arguments, file=KERNELS / f"{name}.cu")


class _WithTotals(ArgumentStruct):
    """The pointee's declaration has to come first."""

    def cpp(self) -> str:
        return _ATOMIC_TOTALS + super().cpp()


def enqueue(
    device: EmulatedDevice, name: str, shape: tuple[int, int], stream: Stream | None = None, **values: Any
) -> None:
    """Launch a test kernel on ``shape`` = (blocks, threads); arrays go by address and must outlive the launch."""
    kernel = device.load(source(name))
    raw = {k: v.ctypes.data if isinstance(v, np.ndarray) else v for k, v in values.items()}
    arguments = kernel.source.arguments.new(**raw)
    device.launch(kernel, LaunchShape(*shape), arguments, stream or device.default_stream)


def run(device: EmulatedDevice, name: str, shape: tuple[int, int], **values: Any) -> None:
    """Launch and wait."""
    enqueue(device, name, shape, None, **values)
    device.default_stream.synchronize()
