"""Planted bugs of rings and of the soft NIC: each breaks one rule, and simulated streams must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nvep.runtime.simulated_library import Overlay, SimulatorLibrary
from nvep.testing.simulation.mutations import Patch, patched
from nvep.testing.simulation.nic import NicScenario, nic_scenario, run_nic_scenario
from nvep.testing.simulation.runner import Simulator, run_scenario
from nvep.testing.simulation.scenario import ScenarioKind, random_scenario

_RING, _QUEUE, _READY = "transports/ring.cuh", "transports/ring_queue.cuh", "transports/ready_words.cuh"
_GFD, _FANOUT, _READ_GFD = "transports/gfd.cuh", "transports/fanout.cuh", "nic/read_gfd.cuh"
_BATCH, _ENGINE, _EVENTS = "nic/batch.cuh", "nic/engine.cuh", "nic/events.cuh"
_SEND = "testing/nic_send.cu"
_SIGNAL, _NETWORK = "protocols/signal.cuh", "transports/network.cuh"


@dataclass(frozen=True)
class NicMutation:
    """A planted bug.

    Attributes
    ----------
    name : str
    broken : str
        What it breaks, in a few words.
    scheme : str
        Whose streams, or exchanges, notice.
    patches : tuple of Patch
        What is changed.
    targets, staged : int
        Ranks that a message of these streams goes to, and staging slots of a sender: few are reused, many let rings
        fill up.
    exchange : bool
        Exchanges over the transport notice, not streams.
    """

    name: str
    broken: str
    scheme: str
    patches: tuple[Patch, ...]
    targets: int = 1
    staged: int = 8
    exchange: bool = False

    def overlay(self) -> Overlay:
        """The mutated files; raises as `patched` does."""
        return patched(self.name, self.patches)


def fixed_scenario(scheme: str, seed: int, *, targets: int = 1, staged: int = 8) -> NicScenario:
    """One shape of streams, so that kernels compile once: two senders a rank, and rings that go round."""
    scenario = nic_scenario(
        scheme, seed, ranks=2, queues=1, add=False, inline=False, by_warp=False, messages=12 if targets > 1 else 44,
        slot_bytes=32, targets=targets, staged=staged,
    )  # fmt: skip
    return replace(scenario, case=replace(scenario.case, seed=1))


def find(mutation: NicMutation, seeds: Iterable[int]) -> tuple[int, str] | None:
    """First seed whose streams notice the mutation, and how; None if none does."""
    symptom_of = _in_exchanges(mutation) if mutation.exchange else _in_streams(mutation)
    for seed in seeds:
        symptom = symptom_of(seed)
        if symptom is not None:
            return seed, symptom
    return None


def _in_streams(mutation: NicMutation) -> Callable[[int], str | None]:
    library = SimulatorLibrary(overlay=mutation.overlay())

    def symptom(seed: int) -> str | None:
        scenario = fixed_scenario(mutation.scheme, seed, targets=mutation.targets, staged=mutation.staged)
        return run_nic_scenario(library, scenario).symptom

    return symptom


def _in_exchanges(mutation: NicMutation) -> Callable[[int], str | None]:
    simulator = Simulator(overlay=mutation.overlay())
    kind = ScenarioKind(ranks=3, steps=3, transport=mutation.scheme)

    def symptom(seed: int) -> str | None:
        failure = run_scenario(simulator, random_scenario(kind, seed)).failure
        return None if failure is None else failure.symptom

    return symptom


_COPY_THEN_FINISH = """      make_copies(a, shared.batch);
      __syncthreads();
      if (threadIdx.x == 0) finish_batch(view.ring(r), shared.batch);
"""
_TAKE = "      if (threadIdx.x < 32) take_batch(a, view.ring(r), shared.batch);\n"
_LIST = [
    NicMutation(
        "owner-one-segment",
        "a descriptor counts once its first segment is there",
        "gpi",
        (
            Patch(
                _READ_GFD,
                "differs |= (unit.a ^ owner) | (unit.b ^ owner);",
                "if (i == 0) differs |= unit.a ^ owner;",
            ),
        ),
    ),
    NicMutation(
        "descriptor-not-acquired",
        "the engine copies a source without a fence behind its descriptor",
        "gpi",
        (Patch(_READ_GFD, "  fence_acq_rel_system();\n", ""),),
    ),
    NicMutation(
        "doorbell-not-acquired",
        "the engine reads entries without a fence behind the doorbell",
        "gdaki",
        (Patch(_ENGINE, "      fence_acq_rel_system();  // entries below", "      // entries below"),),
    ),
    NicMutation(
        "signal-without-fence",
        "signals are not ordered behind the bytes of their batch",
        "gpi",
        (Patch(_EVENTS, "if (!fenced) fence_acq_rel_system();", "if (fenced) fence_acq_rel_system();"),),
    ),
    NicMutation(
        "signal-before-put",
        "a batch's signals are applied before its copies are made",
        "gpi",
        (
            Patch(
                _ENGINE,
                _TAKE,
                "      if (threadIdx.x < 32) {\n"
                "        take_batch(a, view.ring(r), shared.batch);\n"
                "        __syncwarp();\n"
                "        if (threadIdx.x == 0) {\n"
                "          EngineRing& engine = view.ring(r);\n"
                "          engine.tail += shared.batch.events;\n"
                "          while (drain(a, engine, *reinterpret_cast<const Ring*>(engine.ring))) spin_pause();\n"
                "          engine.tail -= shared.batch.events;\n"
                "        }\n"
                "      }\n",
            ),
        ),
    ),
    NicMutation(
        "ci-before-copy",
        "sources are given back before they were read",
        "gpi",
        (
            Patch(
                _ENGINE,
                _COPY_THEN_FINISH,
                "      if (threadIdx.x == 0) finish_batch(view.ring(r), shared.batch);\n"
                "      make_copies(a, shared.batch);\n"
                "      __syncthreads();\n",
            ),
        ),
    ),
    NicMutation(
        "no-barrier-after-copies",
        "sources are given back when one warp has read its share",
        "gpi",
        (
            Patch(
                _ENGINE,
                _COPY_THEN_FINISH,
                "      make_copies(a, shared.batch);\n"
                "      if (threadIdx.x == 0) finish_batch(view.ring(r), shared.batch);\n",
            ),
        ),
    ),
    NicMutation(
        "drop-on-full",
        "producers overwrite what was not consumed",
        "gpi",
        (Patch(_RING, "  if (end > index + ring.depth) {", "  if (false) {"),),
        staged=64,
    ),
    NicMutation(
        "parity-on-wrap",
        "all slots of a descriptor have the parity of its first",
        "gpi-mc",
        (
            Patch(
                _GFD,
                "write_descriptor(const Ring& ring, u64 index, const Descriptor& descriptor) {",
                "write_descriptor(const Ring& ring, u64 index, const Descriptor& descriptor, u64 head = ~0ull) {",
            ),
            Patch(
                _GFD,
                "u64 owner = owner_bit(ring, index);",
                "u64 owner = owner_bit(ring, head == ~0ull ? index : head);",
            ),
            Patch(
                _FANOUT,
                "write_descriptor(ring, index + i, fanout_more(fanout, i - 1, target_of));",
                "write_descriptor(ring, index + i, fanout_more(fanout, i - 1, target_of), index);",
            ),
        ),
        targets=6,
    ),
    NicMutation(
        "publish-out-of-order",
        "a producer publishes without waiting for earlier reservers",
        "gdaki",
        (
            Patch(
                _QUEUE,
                "  while (compare_swap_relaxed_device(&state->ready, first, first + count) != first) {\n",
                "  raise_relaxed_device(&state->ready, first + count);\n  while (false) {\n",
            ),
        ),
    ),
    NicMutation(
        "no-fence-before-publish",
        "entries are not ordered before the increment that publishes them",
        "gdaki",
        (
            Patch(
                _QUEUE,
                "  fence_acq_rel_device();\n  while (compare_swap",
                "  while (compare_swap",
            ),
        ),
    ),
    NicMutation(
        "ring-without-acquire",
        "the doorbell is rung for entries of others that were not acquired",
        "gdaki",
        (Patch(_QUEUE, "  fence_acq_rel_device();  // acquires", "  // acquires"),),
    ),
    NicMutation(
        "ready-before-wqe",
        "ready words are not ordered behind their entries",
        "free-flow",
        (
            Patch(_READY, "    fence_acq_rel_system();\n    for", "    for"),
            Patch(_READY, "      fence_acq_rel_system();\n", ""),
        ),
    ),
    NicMutation(
        "ready-past-a-hole",
        "the host thread rings for entries behind one that is not ready",
        "free-flow",
        (
            Patch(
                "nic/ready_scan.cuh",
                "== queue.next + n + 1)",
                "!= 0 && load_relaxed_system(ready + ((queue.next + n + 1) & (queue.depth - 1))) == "
                "queue.next + n + 2)",
            ),
        ),
    ),
    NicMutation(
        "descriptor-before-payload",
        "a sender posts without a fence behind its source",
        "gpi",
        (Patch(_SEND, "  fence_acq_rel_system();  // the lanes' stores, then the descriptor\n", ""),),
    ),
    NicMutation(
        "staging-reuse",
        "a sender writes its sources again without asking the consumer",
        "gpi",
        (Patch(_SEND, "if (m % kStaged == 0 && m != 0)", "if (false)"),),
    ),
    NicMutation(
        "reset-to-zero",
        "signals are set back to zero once they were seen",
        "gpi",
        (
            Patch(
                _SIGNAL,
                "      if (queue == 0) seen(source, value);\n",
                "      if (step.active.has(source)) {\n"
                "        u64* seen_word = word(step, step.rank, word_index(step, direction, source, queue));\n"
                "        store_relaxed_system(seen_word, 0ull);\n"
                "      }\n"
                "      if (queue == 0) seen(source, value);\n",
            ),
        ),
        exchange=True,
    ),
    NicMutation(
        "one-queue-awaited",
        "receivers await the signal of one queue of several",
        "gdaki",
        (Patch(_SIGNAL, "      if (step.active.has(source)) {", "      if (queue == 0 && step.active.has(source)) {"),),
        exchange=True,
    ),
    NicMutation(
        "signal-not-acquired",
        "receivers see a signal without acquiring it",
        "gpi",
        (Patch(_SIGNAL, "kAcquires = true;", "kAcquires = false;"),),
        exchange=True,
    ),
    NicMutation(
        "signal-of-the-first-block",
        "the first block that is done posts the signals of all",
        "gpi-mc",
        (
            Patch(
                _NETWORK,
                "    bool last = threadIdx.x == 0 && fetch_add_acq_rel_device(arrivals, 1u) == gridDim.x - 1;\n",
                "    u32 before = threadIdx.x == 0 ? fetch_add_acq_rel_device(arrivals, 1u) : 1u;\n"
                "    if (threadIdx.x == 0 && before == gridDim.x - 1) store_relaxed_device(arrivals, 0u);\n"
                "    bool last = threadIdx.x == 0 && before == 0;\n",
            ),
            Patch(_NETWORK, "    if (last) store_relaxed_device(arrivals, 0u);\n", ""),
        ),
        exchange=True,
    ),
    NicMutation(
        "near-without-fence",
        "signals to near ranks are not ordered behind the rows stored to them",
        "gpi",
        (Patch(_NETWORK, "    if (threadIdx.x < config::kRanks) fence_acq_rel_system();\n", ""),),
        exchange=True,
    ),
    NicMutation(
        "staged-without-fence",
        "messages are posted without a fence behind what was staged",
        "gpi",
        (
            Patch(
                _NETWORK,
                "    fence_acq_rel_system();\n    clock.note(kSendFence, threadIdx.x == 0);\n    Sender",
                "    Sender",
            ),
        ),
        exchange=True,
    ),
    NicMutation(
        "epoch-ignored",
        "any signal will do",
        "free-flow",
        (
            Patch(
                _SIGNAL,
                "if (!await_word<kAcquires>(step, at, source, value)) failed = true;",
                "value = load_acquire_system(at);",
            ),
        ),
        exchange=True,
    ),
]
NIC_MUTATIONS = {mutation.name: mutation for mutation in _LIST}
