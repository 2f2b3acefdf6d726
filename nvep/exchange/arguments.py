"""Structs that the exchange kernels and the host share."""

from __future__ import annotations

from functools import lru_cache

from nvep.runtime.arguments import ArgumentStruct, Field

MAX_PAYLOADS = 8


def _common(num_ranks: int) -> list[Field]:
    return [
        Field("local", "u64"),
        Field("status", "u64"),
        Field("deadline", "u64"),
        Field("rank", "u32"),
        Field("lane", "u32"),
        Field("expert_ranks", "const int*"),
        Field("masked", "const unsigned int*"),
        Field("peers", "u64", num_ranks),  # by value: a kernel's first store waits for no load of an address
    ]


@lru_cache
def common_arguments(num_ranks: int) -> ArgumentStruct:
    """How the arguments of every exchange kernel begin."""
    return ArgumentStruct("CommonArguments", _common(num_ranks))


@lru_cache
def dispatch_arguments(num_ranks: int) -> ArgumentStruct:
    """Of D.send, D.recv and both in one launch, over ``num_ranks`` ranks."""
    return ArgumentStruct(
        "DispatchArguments",
        [
            *_common(num_ranks),
            Field("expert_ids", "u64"),
            Field("expert_weights", "const float*"),
            Field("num_tokens_device", "const unsigned int*"),
            Field("num_tokens", "u32"),
            Field("ids_are_64_bit", "u32"),
            Field("payloads", "u64", MAX_PAYLOADS),  # last: few are used, and the rest share few cache lines
        ],
    )


@lru_cache
def combine_arguments(num_ranks: int) -> ArgumentStruct:
    """Of C.send, C.recv, both in one launch, and release, over ``num_ranks`` ranks."""
    return ArgumentStruct(
        "CombineArguments", [*_common(num_ranks), Field("partial_rows", "u64"), Field("output", "u64")]
    )


# Device-resident state of a lane; nvep_kernels/protocols/lane.cuh says who writes what.
COUNTERS = ArgumentStruct(
    "Counters",
    [
        Field("dead", "u64"),
        Field("completed", "u32"),
        Field("dispatched", "u32"),
        Field("tokens", "u32"),
        Field("send_arrivals", "u32"),
        Field("combine_arrivals", "u32"),
        Field("invalid_ids", "u32"),
        Field("dropped_tokens", "u32"),
        Field("unused", "u32"),
    ],
)

# What kernels tell the host, in memory the host reads without waiting; `code` is stored last, with release.
STATUS = ArgumentStruct(
    "Status",
    [
        Field("code", "u32"),
        Field("suspect", "u32"),
        Field("reporter", "u32"),
        Field("phase", "u32"),
        Field("epoch", "u32"),
        Field("invalid_ids", "u32"),
        Field("dropped_tokens", "u32"),
        Field("excess_tokens", "u32"),
    ],
)
STATUS_EXPIRED, STATUS_POISONED, STATUS_PROTOCOL = 1, 2, 3
PHASES = {1: "D.recv", 2: "C.recv", 3: "release"}
PHASE_LEFT = 4  # the host of a rank that leaves after an error, in no phase


def poison_word(suspect: int, phase: int) -> int:
    """As ``make_poison`` in nvep_kernels/protocols/lane.cuh, reported by the suspect itself, of no step."""
    return suspect << 32 | suspect << 46 | phase << 60 | 1 << 63
