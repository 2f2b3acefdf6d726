"""The kernel ``planted``: an error for each tool that looks for errors, and correct twins of those about order."""

from __future__ import annotations

from pathlib import Path

from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape
from nvep.runtime.source import KernelSource

FIELDS = [Field("words", "unsigned int*"), Field("flag", "unsigned int*"), Field("count", "u32"), Field("mode", "u32")]
MODES = {
    name: number
    for number, name in enumerate(("outside", "undefined", "acquire", "no-acquire", "barrier", "no-barrier"), start=1)
}
THREADS = 64


def run(device: Device, mode: str, *, words: int, count: int = THREADS, flag: int = 0) -> None:
    """Launch it in a mode on addresses of device memory, and wait; ``outside`` stores to ``words[count]``."""
    file = Path(__file__).parent / "kernels" / "planted.cu"
    kernel = device.load(KernelSource("planted", ArgumentStruct("PlantedArguments", FIELDS), file=file))
    arguments = kernel.source.arguments.new(words=words, flag=flag, count=count, mode=MODES[mode])
    device.launch(kernel, LaunchShape(2, THREADS), arguments, device.default_stream)
    device.default_stream.synchronize()
