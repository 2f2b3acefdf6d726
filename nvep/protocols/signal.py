"""Host half of the signal protocol: messages land in inboxes, and words written behind them say that all are there."""

from __future__ import annotations

import ctypes

import numpy as np

from nvep.config import ROW_ALIGNMENT, ExchangeConfig
from nvep.nic.layouts import NETWORK_STATE
from nvep.protocols.base import WORD_BYTES, ArrivalProtocol, ArrivalRegions
from nvep.symmetric.layout import Region

_DIRECTIONS = 2  # out and back
SEND_PHASES, SEND_STAGES = 3, 15  # of SendClock: nvep_kernels/transports/send_clock.cuh


def header_bytes(config: ExchangeConfig) -> int:
    """Ids and weights of a token, padded."""
    return -(-8 * config.top_k // ROW_ALIGNMENT) * ROW_ALIGNMENT


def slot_bytes(config: ExchangeConfig) -> int:
    """A message: header, then every payload."""
    return header_bytes(config) + sum(config.payload_bytes)


def signal_words(config: ExchangeConfig, num_ranks: int) -> int:
    """Signals of all lanes, which sit in lane 0; the last word takes what atomics fetched."""
    return config.lanes * _DIRECTIONS * num_ranks * config.queues + 1


class SignalProtocol(ArrivalProtocol):
    """One message per row, one monotone word per (source, queue, lane, direction)."""

    name = "signal"
    arrivals = ArrivalRegions(False, "LandedPayload", "LandedExpertIds", "LandedExpertWeights", "LandedPartialRows")
    exposes_partial_rows = False

    def heap_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        rows = num_ranks * config.max_tokens
        return [
            Region("Signals", signal_words(config, num_ranks) * WORD_BYTES),
            Region("Inbox", rows * slot_bytes(config)),
            Region("CombineInbox", rows * config.partial_row_bytes),
        ]

    def local_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        return [
            Region("Network", ctypes.sizeof(NETWORK_STATE.ctype)),
            Region("Staging", config.max_tokens * slot_bytes(config)),
            *self.arrivals.regions(config, num_ranks),
            Region("SendAccount", SEND_PHASES * SEND_STAGES * WORD_BYTES),
        ]

    def initial_words(self, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        return {}

    def initial_signals(self, config: ExchangeConfig, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        words = np.full(signal_words(config, num_ranks), (first_epoch - 1) % (1 << 32), dtype=np.uint64)
        return {"Signals": words}

    def filled_regions(self) -> dict[str, int]:
        return {}

    def constants(self, config: ExchangeConfig) -> dict[str, int]:
        return {
            "kQueues": config.queues,
            "kDomain": config.domain_size,
            "kAccountSends": int(config.account_sends),
            "kHeaderBytes": header_bytes(config),
            "kSlotBytes": slot_bytes(config),
        }


SIGNAL = SignalProtocol()
