"""Random streams of messages through every send scheme, each message and the order of its signal checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nvep.group import RankGroup, run_local
from nvep.nic import Nic, NicStatistics, RingSpec
from nvep.nic.layouts import ring_prelude
from nvep.nic.soft import SoftNic, SoftNicModel
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Kernel, LaunchShape
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.symmetric import Layout, Region, SymmetricHeap

SCHEMES = {
    "gdaki": ("transports/ring_queue.cuh", "QueuePoster<DoorbellPublisher>"),
    "free-flow": ("transports/ready_words.cuh", "QueuePoster<ReadyPublisher>"),
    "gpi": ("transports/ring_gfd.cuh", "GfdPoster"),
    "gpi-mc": ("transports/fanout.cuh", "FanoutPoster"),
}
STREAM_ARGUMENTS = ArgumentStruct(
    "NicStreamArguments",
    [
        *(Field(name, "u64") for name in ("rings", "staging", "data", "signals", "errors", "deadline")),
        Field("rank", "u32"),
    ],
)
Start = Callable[[SoftNic], Callable[[], None] | None]
HANDLES = {"Data": 0, "Staging": 1, "Signals": 2}


@dataclass(frozen=True)
class StreamCase:
    """Streams of every warp of every rank.

    Attributes
    ----------
    scheme : str
        ``"gdaki"``, ``"gpi"``, ``"gpi-mc"`` or ``"free-flow"``.
    ranks, warps, messages : int
        Ranks, senders on each, and messages of each.
    slot_bytes, unit : int
        Largest message, and what sizes are multiples of.
    staged : int
        Staging slots of a sender, fewer than its messages: they are reused.
    depth, queues : int
        Of a ring; rings to each peer (send queues) or in all (descriptor rings).
    targets : int
        Ranks that a message goes to, not necessarily distinct ones.
    add, inline, by_warp : bool
        Signals count instead of being set; a quarter of the messages travels inline; lanes post side by side.
    """

    scheme: str
    ranks: int = 3
    warps: int = 4
    messages: int = 48
    slot_bytes: int = 256
    unit: int = 16
    staged: int = 16
    depth: int = 64
    queues: int = 1
    targets: int = 1
    add: bool = False
    inline: bool = False
    by_warp: bool = False
    seed: int = 1
    deadline_s: float = 20.0
    model: SoftNicModel = field(default_factory=SoftNicModel)

    def specs(self) -> list[RingSpec]:
        """Rings of one rank."""
        if self.scheme in ("gdaki", "free-flow"):
            ready = self.scheme == "free-flow"
            peers = [peer for peer in range(self.ranks) for _ in range(self.queues)]
            return [RingSpec("send_queue", self.depth, peer, ready) for peer in peers]
        return [RingSpec("gfd", self.depth) for _ in range(self.queues)]

    def layout(self) -> Layout:
        """Symmetric memory of one rank."""
        sent = self.ranks * self.warps * self.messages * self.targets * self.slot_bytes
        return Layout(
            [
                Region("Data", sent),
                Region("Staging", self.warps * self.staged * self.slot_bytes),
                Region("Signals", 8 * (self.ranks * self.warps + 1)),
            ]
        )

    def prelude(self) -> str:
        """Of both kernels."""
        header, poster = SCHEMES[self.scheme]
        integers = {
            "kRanks": self.ranks, "kWarps": self.warps, "kMessages": self.messages, "kSlotBytes": self.slot_bytes,
            "kUnit": self.unit, "kStaged": self.staged, "kQueues": self.queues, "kTargets": self.targets,
            "kSeed": self.seed, **{f"k{name}Handle": handle for name, handle in HANDLES.items()},
        }  # fmt: skip
        lines = [f"constexpr u32 {name} = {value};" for name, value in integers.items()]
        switches = {"kAdd": self.add, "kInline": self.inline, "kByWarp": self.by_warp}
        lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in switches.items()]
        fanout = "#define NVEP_STREAM_FANOUT\n" if self.scheme == "gpi-mc" else ""
        return (
            f'{ring_prelude()}{fanout}#include "{header}"\nnamespace nvep {{\nnamespace stream {{\n'
            f"using Poster = {poster};\n" + "\n".join(lines) + "\n}\n}\n"
        )

    def kernels(self) -> dict[str, KernelSource]:
        """Sender and receiver."""
        return {
            name: KernelSource(name, STREAM_ARGUMENTS, self.prelude(), KERNEL_ROOT / "testing" / f"{name}.cu")
            for name in ("nic_send", "nic_receive")
        }


@dataclass(frozen=True)
class StreamResult:
    """What came of one rank's streams: wrong words, warps that gave up, and what the adapter counted."""

    wrong: int
    senders_gave_up: int
    receivers_gave_up: int
    statistics: NicStatistics
    error: Exception | None


def run_streams(case: StreamCase, *, device: str, start: Start = SoftNic.wake) -> list[StreamResult]:
    """Run on a local group; ``start`` is how each rank has its rings executed, and may return what ends that."""
    return list(run_local(lambda group: _Streams(group, case).run(start), case.ranks, device=device))


def assert_streams(case: StreamCase, *, device: str, start: Start = SoftNic.wake) -> list[StreamResult]:
    """Run, and fail unless every byte arrived, behind no signal of its own."""
    results = run_streams(case, device=device, start=start)
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank}: {result.error}"
        assert (result.wrong, result.senders_gave_up, result.receivers_gave_up) == (0, 0, 0), f"rank {rank}: {result}"
    return results


def open_rings(group: RankGroup, heap: SymmetricHeap, nic: Nic, specs: Sequence[RingSpec]) -> int:
    """Register the regions of a `StreamCase.layout` and create rings: what `Nic.create_rings` returns."""
    for name in HANDLES:
        offset = heap.layout.offset(name)
        bases = [base + offset for base in heap.peer_bases]
        nic.register(bases, heap.layout.region(name).nbytes, ordered=name == "Signals")
    sink = heap.layout.region("Signals").nbytes // 8 - 1
    return nic.create_rings(specs, signals=HANDLES["Signals"], sink=sink)


class _Streams:
    """One rank."""

    def __init__(self, group: RankGroup, case: StreamCase) -> None:
        self.group = group
        self.case = case

    def run(self, start: Start) -> StreamResult:
        group, case = self.group, self.case
        with SymmetricHeap(group, case.layout()) as heap, SoftNic(group, case.model) as nic:
            rings = open_rings(group, heap, nic, case.specs())
            kernels = group.device.load_all(case.kernels())
            group.barrier()
            finish = start(nic)
            result = self._stream(heap, nic, kernels, rings)
            if finish is not None:
                finish()
            group.barrier()  # nobody closes while others still send to it
        return result

    def _stream(self, heap: SymmetricHeap, nic: SoftNic, kernels: dict[str, Kernel], rings: int) -> StreamResult:
        case, device = self.case, self.group.device
        errors = device.allocate(16)
        arguments = STREAM_ARGUMENTS.new(
            rings=rings,
            **{name.lower(): heap.address(name) for name in HANDLES},
            errors=errors.address,
            deadline=round(case.deadline_s * 1e9),
            rank=self.group.rank,
        )
        receiving, sending = device.create_stream(), device.create_stream()
        receivers = LaunchShape(case.ranks, 32 * case.warps)
        device.launch(kernels["nic_receive"], receivers, arguments, receiving)
        device.launch(kernels["nic_send"], LaunchShape(1, 32 * case.warps), arguments, sending)
        sending.synchronize()
        receiving.synchronize()
        found = np.zeros(4, np.uint32)
        device.copy_out(found, errors.address, sending)
        errors.free()
        error: Exception | None = None
        try:
            nic.check()
        except Exception as raised:
            error = raised
        return StreamResult(int(found[0]), int(found[1]), int(found[2]), nic.statistics(), error)
