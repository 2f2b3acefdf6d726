"""Planted bugs: each breaks one rule of a protocol, and the simulation must notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nvep.errors import ArgumentError
from nvep.exchange.memory import ExchangeMemory
from nvep.exchange.plan import KERNEL_NAMES
from nvep.protocols.fence import FENCE
from nvep.protocols.sentinel import SENTINEL
from nvep.runtime.simulated_library import Overlay
from nvep.runtime.source import KERNEL_ROOT
from nvep.symmetric import SymmetricHeap

_FENCE, _LANE = "protocols/fence.cuh", "protocols/lane.cuh"
_SENTINEL = "protocols/sentinel.cuh"
_STEP = "transports/nvlink.cuh"
_NVLINK_FENCE, _RING, _PULL = "transports/nvlink_fence.cuh", "transports/fence_ring.cuh", "transports/fence_pull.cuh"
_DISPATCH, _COMBINE = "transports/nvlink_sentinel_dispatch.cuh", "transports/nvlink_sentinel.cuh"
_LANDING = "transports/nvlink_sentinel_landing.cuh"


@dataclass(frozen=True)
class Patch:
    """``old`` occurs exactly once in ``file`` of ``nvep_kernels``."""

    file: str
    old: str
    new: str


def patched(name: str, patches: tuple[Patch, ...]) -> Overlay:
    """The files of ``nvep_kernels`` as mutation ``name`` changes them.

    Raises
    ------
    ArgumentError
        The true sources have changed so that a patch no longer fits.
    """
    files: dict[str, str] = {}
    for patch in patches:
        text = files.get(patch.file) or (KERNEL_ROOT / patch.file).read_text()
        found = text.count(patch.old)
        if found != 1:
            allowed = f"text that {patch.file} holds exactly once, not {found} times"
            raise ArgumentError(f"mutation {name}", patch.old, allowed)
        files[patch.file] = text.replace(patch.old, patch.new)
    return Overlay(files)


@dataclass(frozen=True)
class Mutation:
    """A planted bug.

    Attributes
    ----------
    name : str
        As in ``nvep simulate --mutate``.
    broken : str
        What it breaks, in a few words.
    protocol : str
        Kind of scenario that it is looked for in.
    patches : tuple of Patch
        What is changed.
    shared_landing : bool
        Sentinel's arrivals are shown in Fence's receive buffers.
    no_refill : bool
        A recovery leaves wires and records as they are.
    """

    name: str
    broken: str
    protocol: str
    patches: tuple[Patch, ...] = ()
    shared_landing: bool = False
    no_refill: bool = False

    def overlay(self) -> Overlay | None:
        """The mutated files, if there are any; raises as `patched` does."""
        return patched(self.name, self.patches) if self.patches else None

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The host's part of the mutation, while the context lasts."""
        arrivals, write_heap = SENTINEL.arrivals, ExchangeMemory._write_heap

        def write_new_heap(memory: ExchangeMemory, heap: SymmetricHeap, first_epoch: int) -> None:
            if not hasattr(memory, "heap"):  # under construction
                write_heap(memory, heap, first_epoch)

        if self.shared_landing:
            SENTINEL.arrivals = FENCE.arrivals
        if self.no_refill:
            ExchangeMemory._write_heap = write_new_heap  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            SENTINEL.arrivals = arrivals
            ExchangeMemory._write_heap = write_heap  # type: ignore[method-assign]


_INCREMENT = "if (fetch_add_acq_rel_device(arrivals, 1u) != gridDim.x - 1) return false;"
_RELEASING = """constexpr simulated::Access release = {
        simulated::Order::kRelease, simulated::Scope::kDevice, {__builtin_FILE(), __builtin_LINE()}};
    if (simulated::update(simulated::Update::kAdd, arrivals, 1u, 0u, release) != gridDim.x - 1) return false;"""

_LIST = [
    # Fence.
    Mutation(
        "increment-release-only",
        "blocks release, the announcing thread acquires nothing, records are released one by one",
        "fence",
        (
            Patch(_FENCE, _INCREMENT, _RELEASING),
            Patch(_FENCE, "    fence_acq_rel_system();\n", ""),
            Patch(_FENCE, "store_relaxed_system(where(r), words[r])", "store_release_system(where(r), words[r])"),
        ),
    ),
    Mutation(
        "release-last-block-only",
        "blocks increment relaxed; only the last fences",
        "fence",
        (Patch(_FENCE, "fetch_add_acq_rel_device(arrivals, 1u)", "fetch_add_relaxed_device(arrivals, 1u)"),),
    ),
    Mutation(
        "drop-acquire",
        "the record is awaited, not acquired",
        "fence",
        (Patch(_LANE, "if constexpr (kAcquire) value = load_acquire_system(word);", ""),),
    ),
    Mutation(
        "relaxed-flag", "no fence before the records", "fence", (Patch(_FENCE, "    fence_acq_rel_system();\n", ""),)
    ),
    Mutation(
        "flag-before-blocks",
        "the first block to arrive announces",
        "fence",
        (
            Patch(
                _FENCE,
                f"{_INCREMENT}\n    store_relaxed_device(arrivals, 0u);",
                "u32 before = fetch_add_acq_rel_device(arrivals, 1u);\n"
                "    if (before == gridDim.x - 1) store_relaxed_device(arrivals, 0u);\n"
                "    if (before != 0) return false;",
            ),
        ),
    ),
    Mutation(
        "no-barrier-before-increment",
        "thread 0 increments before its block has stored",
        "fence",
        (
            Patch(
                _FENCE,
                "    __syncthreads();\n    if (threadIdx.x != 0) return false;",
                "    if (threadIdx.x != 0) return false;",
            ),
        ),
    ),
    Mutation(
        "combine-record-only-with-rows",
        "a rank that received nothing sends no C record",
        "fence",
        (
            Patch(
                _NVLINK_FENCE,
                "    announce_combine(step, copies);\n",
                "    i32 rows = 0;\n"
                "    const i32* counts = step.local_region<i32>(local::kCountsOffset);\n"
                "    for (u32 r = 0; r < config::kRanks; ++r) rows += counts[r];\n"
                "    if (rows != 0) announce_combine(step, copies);\n",
            ),
        ),
    ),
    Mutation(
        "moving-combine-offset",
        "partial rows lie among receive buffers in every other step",
        "fence",
        (
            Patch(
                _NVLINK_FENCE,
                "const u64 exposed = step.lane_of(step.rank) + heap::kPartialRowsOffset;",
                "const u64 exposed = step.lane_of(step.rank) + "
                "(step.epoch & 1u ? heap::kPartialRowsOffset : config::payload_offset(0) + config::kMaxTokens * "
                "config::kPartialBytes);",
            ),
            Patch(
                _PULL,
                "+ heap::kPartialRowsOffset +",
                "+ (reinterpret_cast<const Counters*>(a.local + local::kCountersOffset)->dispatched & 1u "
                "? heap::kPartialRowsOffset "
                ": config::payload_offset(0) + config::kMaxTokens * config::kPartialBytes) +",
            ),
        ),
    ),
    Mutation(
        "shared-epoch",
        "two lanes, one set of counters",
        "fence",
        (
            Patch(
                _LANE,
                "return reinterpret_cast<Counters*>(local + local::kCountersOffset);",
                "return reinterpret_cast<Counters*>(local - lane_offset / heap::kLaneBytes * local::kLaneBytes + "
                "local::kCountersOffset);",
            ),
        ),
    ),
    Mutation(
        "mask-resnapshot",
        "D.recv reads the live mask",
        "fence",
        (
            Patch(
                "kernels/dispatch_recv.cu",
                "open_phase(arguments, kPhaseDispatch);",
                "open_step(arguments, kPhaseDispatch, false, arguments.masked);",
            ),
        ),
    ),
    Mutation(
        "no-bulk-wait",
        "rows are announced while bulk copies store them",
        "fence",
        (Patch(_RING, "bulk_wait<0>();", ""),),
    ),
    Mutation(
        "bulk-wait-read-only",
        "rows are announced once bulk copies have read them",
        "fence",
        (Patch(_RING, "bulk_wait<0>();", "bulk_wait_read<0>();"),),
    ),
    Mutation(
        "no-stage-wait",
        "a stage is loaded again while bulk copies still read it",
        "fence",
        (Patch(_RING, "        bulk_wait_read<kLag>();\n", ""),),
    ),
    Mutation(
        "no-entry-wait",
        "pieces of partial rows are added before they have come",
        "fence",
        (Patch(_PULL, "      bulk_await(loaded + entry, parity);\n", ""),),
    ),
    Mutation(
        "no-proxy-fence",
        "bulk copies pull what the thread acquired, with no fence between the proxies",
        "fence",
        (Patch(_PULL, "    if (lane() == 0) fence_proxy_async_global();  // peers wrote what is copied\n", ""),),
    ),
    # Sentinel.
    Mutation(
        "skip-rearm",
        "payload units are not re-armed",
        "sentinel",
        (
            Patch(
                _SENTINEL,
                "    if (lane + 32 * i < units) store_relaxed_system(body + lane + 32 * i, u64x2{kEmpty, kEmpty});\n",
                "",
            ),
        ),
    ),
    Mutation(
        "early-rearm",
        "the next generation is re-armed too, where fast peers may have written",
        "sentinel",
        (
            Patch(
                _LANDING,
                "    rearm_chunk(wire_of(step, place), ",
                "    u64 next = dispatch_slot(step.lane_of(step.rank), step.epoch + 1, place.source, place.token);\n"
                "    rearm_chunk(DispatchWire::key(next, place.chunk), DispatchWire::units(place.chunk), 0);\n"
                "    rearm_chunk(wire_of(step, place), ",
            ),
        ),
    ),
    Mutation(
        "one-generation-fewer",
        "one dispatch wire",
        "sentinel",
        (Patch(_LANDING, "((epoch & 1u) * config::kRanks + source)", "(0u + source)"),),
    ),
    Mutation(
        "single-record-word",
        "one record word a source",
        "sentinel",
        (Patch(_STEP, "+ source * kDispatchRecordBytes) + (epoch & 1u);", "+ source * kDispatchRecordBytes);"),),
    ),
    Mutation(
        "skip-step-record",
        "no record without tokens",
        "sentinel",
        (Patch(_DISPATCH, "      if (step.active.has(r)) {", "      if (step.active.has(r) && tokens != 0) {"),),
    ),
    Mutation(
        "no-escape",
        "no key: a payload may look like the empty wire",
        "sentinel",
        (Patch(_SENTINEL, "if (!__any_sync(kWarp, hit)) return key;", "return key;"),),
    ),
    Mutation(
        "unrouted-first-chunk-only",
        "later chunks of a slot that is not routed stay silent",
        "sentinel",
        (
            Patch(
                _DISPATCH,
                "if (set.has(r) || r == step.rank || !step.active.has(r)) continue;",
                "if (set.has(r) || r == step.rank || !step.active.has(r) || c != 0) continue;",
            ),
        ),
    ),
    Mutation(
        "unpolled-word",
        "units are taken unseen, but for those of the first lane",
        "sentinel",
        (Patch(_SENTINEL, "missing |= lane + 32 * i < units &&", "missing |= lane == 0 && lane + 32 * i < units &&"),),
    ),
    Mutation("recover-without-refill", "survivors leave wires and records as they were", "sentinel", no_refill=True),
    # Both.
    Mutation(
        "shared-landing",
        "Sentinel lands in Fence's receive buffers",
        "mixed",
        (
            Patch(
                _LANDING,
                "return step.local + local::kLandingIdsOffset;",
                "return step.lane_of(step.rank) + heap::kExpertIdsOffset;",
            ),
            Patch(
                _COMBINE,
                "a.local + local::kLandingIdsOffset",
                "a.peers[a.rank] + a.lane * heap::kLaneBytes + heap::kExpertIdsOffset",
            ),
            Patch(
                _LANDING,
                "step.local_region<float>(local::kLandingWeightsOffset)",
                "reinterpret_cast<float*>(step.lane_of(step.rank) + heap::kExpertWeightsOffset)",
            ),
            Patch(
                _LANDING,
                "return step.local + config::payload_offset(p);",
                "return step.lane_of(step.rank) + config::payload_offset(p);",
            ),
        ),
        shared_landing=True,
    ),
    Mutation(
        "pdl-no-wait",
        "kernels launched as dependents do not wait",
        "mixed",
        tuple(Patch(f"kernels/{name}.cu", "  grid_dependency_wait();\n", "") for name in KERNEL_NAMES),
    ),
]
MUTATIONS = {mutation.name: mutation for mutation in _LIST}
