"""What a demo run gave: records of the ranks, checks against the reference, and the figures that are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvep.cli.demo_exchange import Traffic
from nvep.cli.demo_model import Generated
from nvep.config import ExchangeConfig

HEADER_ENTRY_BYTES = 8  # expert id and weight


@dataclass(frozen=True)
class RankRecord:
    """What one rank brings to the report.

    Attributes
    ----------
    device : str
        Label of its device.
    generated : Generated
        Its texts.
    traffic : Traffic
        What it counted.
    seconds : float
        From the first prompt byte to the last new byte.
    config : ExchangeConfig
        Of each layer's exchange.
    """

    device: str
    generated: Generated
    traffic: Traffic
    seconds: float
    config: ExchangeConfig


@dataclass(frozen=True)
class DemoResult:
    """A whole run; equal on all ranks.

    Attributes
    ----------
    records : tuple of RankRecord
        By rank.
    prompts_by_rank : tuple of tuple of bytes
        What each rank continued.
    group : str
        ``"MPI"`` or ``"local group"``.
    reference : Generated
        All texts, by one process, in the order of the prompts.
    """

    records: tuple[RankRecord, ...]
    prompts_by_rank: tuple[tuple[bytes, ...], ...]
    group: str
    reference: Generated

    @property
    def ranks(self) -> int:
        return len(self.records)

    @property
    def config(self) -> ExchangeConfig:
        return self.records[0].config

    @property
    def texts(self) -> list[bytes]:
        """New bytes of every prompt, in the order of the prompts."""
        return [text for record in self.records for text in record.generated.texts]

    @property
    def new_tokens(self) -> int:
        """New bytes of all texts."""
        return sum(map(len, self.texts))

    @property
    def seconds(self) -> float:
        return max(record.seconds for record in self.records)

    @property
    def device(self) -> str:
        """Labels of all ranks' devices, each once."""
        return ", ".join(dict.fromkeys(record.device for record in self.records))

    @property
    def sabotage(self) -> str:
        return "".join(record.traffic.sabotage for record in self.records)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 ``[source, target]``: rows read from the receive buffers, over all layers and steps."""
        return np.array([np.sum(record.traffic.received, axis=0) for record in self.records]).T

    @property
    def load(self) -> npt.NDArray[np.int64]:
        """int64 ``[layers, experts]``: pairs that experts worked on, by the headers that arrived."""
        total: npt.NDArray[np.int64] = np.sum([record.traffic.load for record in self.records], axis=0)
        return total

    @property
    def load_by_rank(self) -> list[int]:
        return [int(record.traffic.load.sum()) for record in self.records]

    @property
    def row_calls(self) -> int:
        """Rows of the model times layers: what the routers decided on."""
        return int(sum(record.traffic.routed.sum() for record in self.records)) // self.config.top_k

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of all rows with their headers, those that stay on their rank included."""
        return int(self.rows.sum()) * (self.config.row_bytes + self.config.top_k * HEADER_ENTRY_BYTES)

    @property
    def combine_bytes(self) -> int:
        return int(self.rows.sum()) * self.config.partial_row_bytes

    @property
    def call_ms(self) -> npt.NDArray[np.float64]:
        """By call, of the rank that waited least for the others: dispatch, experts and combine of one layer."""
        result: npt.NDArray[np.float64] = np.min([record.traffic.call_ms for record in self.records], axis=0)
        return result

    @property
    def logit_margin(self) -> float:
        return min(record.generated.logit_margin for record in self.records)

    @property
    def router_margin(self) -> float:
        return min(record.generated.router_margin for record in self.records)

    def differences(self) -> list[str]:
        """Where texts, row counts or expert loads are not what they should be; empty if all is well."""
        return [*_text_differences(self), *self.count_differences()]

    def count_differences(self) -> list[str]:
        """Where receive buffers held other rows than routing asks for."""
        return [*_row_differences(self), *_load_differences(self)]


def percentile(values: npt.NDArray[np.float64], fraction: float) -> float:
    """Nearest-rank percentile: the smallest value that at least ``fraction`` of all do not exceed."""
    return float(np.sort(values)[math.ceil(fraction * len(values)) - 1])


def printable(text: bytes) -> str:
    """One line of characters that are safe to show: line ends become ``/``, everything unusual a dot."""
    return "".join(chr(b) if 32 <= b < 127 else "/ " if b == 10 else "\u00b7" for b in text)


def _text_differences(result: DemoResult) -> Sequence[str]:
    found = []
    owners = [rank for rank, prompts in enumerate(result.prompts_by_rank) for _ in prompts]
    for index, (text, expected) in enumerate(zip(result.texts, result.reference.texts, strict=True)):
        if text != expected:
            pairs = enumerate(zip(text, expected))
            byte = next((i for i, (a, b) in pairs if a != b), min(len(text), len(expected)))
            shown = [repr(printable(t[byte : byte + 20])) for t in (text, expected)]
            found.append(f"text {index} of rank {owners[index]}, byte {byte}: {shown[0]}, reference {shown[1]}")
    return found


def _row_differences(result: DemoResult) -> Sequence[str]:
    """Rows in the receive buffers against routing, for every call, source and target; the first difference."""
    sent = np.array([record.traffic.sent for record in result.records]).transpose(1, 0, 2)
    received = np.array([record.traffic.received for record in result.records]).transpose(1, 2, 0)
    for call, source, target in np.argwhere(sent != received).tolist():
        layers = len(result.load)
        return [
            f"rows from rank {source} to rank {target}, step {call // layers}, layer {call % layers}: "
            f"{received[call, source, target]} received, {sent[call, source, target]} routed"
        ]
    return []


def _load_differences(result: DemoResult) -> Sequence[str]:
    routed = np.sum([record.traffic.routed for record in result.records], axis=0)
    for layer, expert in np.argwhere(routed != result.load).tolist():
        return [f"expert {expert} of layer {layer}: {result.load[layer, expert]} rows, {routed[layer, expert]} routed"]
    return []
