"""Configuration: what the environment says (read only here) and what an exchange is made of."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nvep.errors import ArgumentError

INVALID_EXPERT = -1
PARTIAL_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PROTOCOLS = ("fence", "sentinel")
NETWORK_TRANSPORTS = ("gdaki", "gpi", "gpi-mc", "free-flow")
TRANSPORTS = ("nvlink", *NETWORK_TRANSPORTS)
ROW_ALIGNMENT = 16
MAX_TOKENS_LIMIT = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes
    ----------
    device : str
        ``NVEP_DEVICE``: ``auto``, ``cuda`` or ``emulated``.
    deadline : float
        ``NVEP_DEADLINE``: seconds a wait on a peer may last (default 30).
    cache_dir : Path
        ``NVEP_CACHE_DIR``: compiled kernels (default ``$XDG_CACHE_HOME/nvep`` or ``~/.cache/nvep``).
    cxx : str or None
        ``CXX``: the host compiler to prefer for the emulated device.
    cuda_arch : str or None
        ``NVEP_CUDA_ARCH``: architecture to compile for instead of the device's own, e.g. ``sm_90a``.
    """

    device: str
    deadline: float
    cache_dir: Path
    cxx: str | None
    cuda_arch: str | None

    @staticmethod
    def from_environment() -> Settings:
        """Read the environment now.

        Raises
        ------
        ArgumentError
            A variable holds something that is not allowed.
        """
        device = os.environ.get("NVEP_DEVICE", "auto")
        if device not in ("auto", "cuda", "emulated"):
            raise ArgumentError("NVEP_DEVICE", device, "auto, cuda or emulated")
        text = os.environ.get("NVEP_DEADLINE", "30")
        try:
            deadline = float(text)
        except ValueError:
            deadline = -1.0
        if not 0.0 < deadline < 1e6:
            raise ArgumentError("NVEP_DEADLINE", text, "seconds, above 0 and below 1e6")
        xdg = os.environ.get("XDG_CACHE_HOME")
        default_cache = Path(xdg) if xdg else _home() / ".cache"
        cache = os.environ.get("NVEP_CACHE_DIR")
        return Settings(
            device=device,
            deadline=deadline,
            cache_dir=Path(cache) if cache else default_cache / "nvep",
            cxx=os.environ.get("CXX"),
            cuda_arch=os.environ.get("NVEP_CUDA_ARCH"),
        )


def _home() -> Path:
    """Home of this user, never a folder that others write too: libraries are loaded from there."""
    stated = os.environ.get("HOME")
    if stated:
        return Path(stated)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user without an entry; where "/" cannot be written, nothing is kept
        return Path("/")


def widen_hardware_queues() -> None:
    """Ask the CUDA driver for its most hardware queues; takes effect if the process has not initialised CUDA yet.

    Streams that share a queue wait for one another's work. Ranks of one process whose kernels wait for each other must
    not, and the default of 8 is soon used up. A value set by the user stays.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def partial_dtype(partial_format: str) -> np.dtype[Any]:
    """NumPy element type of a partial format (ml_dtypes for ``bf16``)."""
    if partial_format == "bf16":
        import ml_dtypes

        bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bf16
    return np.dtype({"fp16": np.float16, "fp32": np.float32}[partial_format])


def mpi_launch() -> tuple[int, int] | None:
    """Rank and size that the MPI launcher of this process states, without starting MPI; None without a launcher."""
    pairs = (
        ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("PMIX_RANK", "SLURM_NTASKS"),  # srun --mpi=pmix
    )
    for rank, size in pairs:
        stated = os.environ.get(rank, ""), os.environ.get(size, "")
        if stated[0].isdecimal() and stated[1].isdecimal():
            return int(stated[0]), int(stated[1])
    return None


def _require_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= int(value) <= high:
        raise ArgumentError(name, value, f"an integer from {low} to {high}")
    return int(value)


def _require_sequence(name: str, value: object) -> None:
    if not isinstance(value, (tuple, list, np.ndarray)):
        raise ArgumentError(name, value, "a tuple")


@dataclass(frozen=True)
class ExchangeConfig:
    """Everything that fixes an exchange's memory and kernels; equal on all ranks.

    Parameters
    ----------
    num_experts : int
        Global number of experts; need not be divisible by the number of ranks.
    top_k : int
        Experts per token, at least 1.
    max_tokens : int
        Most tokens one rank sends in one step.
    row_bytes : int
        Bytes of a token's first payload (its row), a multiple of 16.
    extra_payload_bytes : tuple of int
        Bytes of further payloads of a token (scales, for example), each a multiple of 16.
    partial_format : str
        Element type of partial rows and of combine's output: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    partial_elements : int or None
        Elements of a partial row; default ``row_bytes`` read as ``bf16``.
    placement : tuple of int or None
        ``placement[expert]`` is the rank that owns it; default: contiguous blocks as equal as possible.
    lanes : int
        Steps that may be in flight at once.
    protocol : str
        How a receiver knows: ``"fence"`` (throughput), ``"sentinel"`` (latency), or ``"auto"``, which plans memory for
        both, starts with the better one for ``max_tokens`` and lets `Exchange.protocol` change it from step to step.
        Transports over a network adapter have one of their own, ``"signal"``.
    transport : str
        How bytes move: ``"nvlink"``, or over a network adapter ``"gdaki"``, ``"gpi"``, ``"gpi-mc"`` or ``"free-flow"``.
    max_blocks : int or None
        Blocks that an exchange kernel may use; default chosen by the device.
    deadline : float or None
        Seconds a wait on a peer may last; default ``NVEP_DEADLINE``.
    invalid_expert : int
        Id shown where there is no token, negative.
    first_epoch : int
        Step counter of the first step (tests start it near its 32-bit limit).
    chunk_bytes : int
        Bytes of a row that one warp sends at a time under Sentinel, a multiple of 16.
    strict_ptx : bool
        Order Sentinel's wires by release and acquire of step records alone, without the axiom on completed grids.
    dependent_launch : bool
        A phase that follows another of its lane on a stream is launched before that ends (programmatic dependent
        launch). The caller asserts that whatever else is enqueued between phases, expert kernels for example, does not
        overtake what precedes it: it is launched in the ordinary way, or waits for its predecessor itself.
    domain_size : int
        Over a network adapter: ranks in groups of this many reach one another directly.
    queues, queue_depth : int
        Over a network adapter: rings to each peer (``"gdaki"``, ``"free-flow"``) or of a rank, and entries of each.
    account_sends : bool
        Over a network adapter: kernels add up where the time of a send goes, which costs time itself (`nvep bench`).

    Raises
    ------
    ArgumentError
        A value is not allowed.
    """

    num_experts: int
    top_k: int
    max_tokens: int
    row_bytes: int
    extra_payload_bytes: tuple[int, ...] = ()
    partial_format: str = "bf16"
    partial_elements: int | None = None
    placement: tuple[int, ...] | None = field(default=None, repr=False)
    lanes: int = 1
    protocol: str = "fence"
    transport: str = "nvlink"
    max_blocks: int | None = None
    deadline: float | None = None
    invalid_expert: int = INVALID_EXPERT
    first_epoch: int = 1
    chunk_bytes: int = 1024
    strict_ptx: bool = False
    dependent_launch: bool = False
    domain_size: int = 1
    queues: int = 1
    queue_depth: int = 128
    account_sends: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "num_experts", _require_int("num_experts", self.num_experts, 1, 1 << 20))
        put(self, "top_k", _require_int("top_k", self.top_k, 1, min(self.num_experts, 64)))
        put(self, "max_tokens", _require_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT))
        put(self, "row_bytes", self._payload_bytes("row_bytes", self.row_bytes))
        _require_sequence("extra_payload_bytes", self.extra_payload_bytes)
        put(
            self,
            "extra_payload_bytes",
            tuple(self._payload_bytes("extra_payload_bytes", b) for b in self.extra_payload_bytes),
        )
        if len(self.extra_payload_bytes) > 7:
            raise ArgumentError("extra_payload_bytes", self.extra_payload_bytes, "at most 7 further payloads")
        self._check_partial()
        self._check_choices()
        put(self, "lanes", _require_int("lanes", self.lanes, 1, 16))
        put(self, "chunk_bytes", self._payload_bytes("chunk_bytes", self.chunk_bytes))
        if self.chunk_bytes > 4096:
            raise ArgumentError("chunk_bytes", self.chunk_bytes, "at most 4096, what a warp holds in registers")
        put(self, "first_epoch", _require_int("first_epoch", self.first_epoch, 0, (1 << 32) - 1))
        if self.max_blocks is not None:
            put(self, "max_blocks", _require_int("max_blocks", self.max_blocks, 1, 1024))
        if self.placement is not None:
            _require_sequence("placement", self.placement)
            put(self, "placement", tuple(_require_int("placement", r, 0, (1 << 20) - 1) for r in self.placement))
            if len(self.placement or ()) != self.num_experts:
                raise ArgumentError(
                    "placement", len(self.placement or ()), f"one rank per expert: {self.num_experts} entries"
                )

    def _payload_bytes(self, name: str, value: object) -> int:
        nbytes = _require_int(name, value, ROW_ALIGNMENT, 1 << 24)
        if nbytes % ROW_ALIGNMENT:
            raise ArgumentError(name, value, f"a multiple of {ROW_ALIGNMENT} bytes")
        return nbytes

    def _check_partial(self) -> None:
        if not isinstance(self.partial_format, str) or self.partial_format not in PARTIAL_ELEMENT_BYTES:
            raise ArgumentError("partial_format", self.partial_format, ", ".join(PARTIAL_ELEMENT_BYTES))
        elements = self.row_bytes // 2 if self.partial_elements is None else self.partial_elements
        object.__setattr__(self, "partial_elements", _require_int("partial_elements", elements, 1, 1 << 23))
        if self.partial_row_bytes % ROW_ALIGNMENT:
            raise ArgumentError(
                "partial_elements", elements, f"a partial row that is a multiple of {ROW_ALIGNMENT} bytes"
            )

    def _check_choices(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ArgumentError("transport", self.transport, ", ".join(TRANSPORTS))
        if self.networked:
            object.__setattr__(self, "protocol", "signal")
        elif self.protocol not in (*PROTOCOLS, "auto"):
            raise ArgumentError("protocol", self.protocol, ", ".join((*PROTOCOLS, "auto")))
        for name, most in (("domain_size", 1 << 20), ("queues", 64), ("queue_depth", 1 << 14)):
            object.__setattr__(self, name, _require_int(name, getattr(self, name), 1, most))
        deadline = 1.0 if self.deadline is None else self.deadline
        numeric = isinstance(deadline, (int, float, np.number)) and not isinstance(deadline, bool)
        if not numeric or not 0.0 < deadline < 1e6:
            raise ArgumentError("deadline", self.deadline, "seconds, above 0 and below 1e6")
        invalid = _require_int("invalid_expert", self.invalid_expert, -(1 << 31), -1)
        object.__setattr__(self, "invalid_expert", invalid)

    @property
    def networked(self) -> bool:
        """Do rows travel over a network adapter?"""
        return self.transport in NETWORK_TRANSPORTS

    @property
    def protocols(self) -> tuple[str, ...]:
        """Protocols whose memory and kernels are planned."""
        return PROTOCOLS if self.protocol == "auto" else (self.protocol,)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of each payload of a token, the row first."""
        return (self.row_bytes, *self.extra_payload_bytes)

    @property
    def elements(self) -> int:
        """Elements of a partial row."""
        assert self.partial_elements is not None  # __post_init__ settled it
        return self.partial_elements

    @property
    def partial_row_bytes(self) -> int:
        """Bytes of a partial row."""
        return self.elements * PARTIAL_ELEMENT_BYTES[self.partial_format]

    def max_targets(self, num_ranks: int) -> int:
        """Most ranks that one token can go to."""
        return min(self.top_k, num_ranks)

    def expert_ranks(self, num_ranks: int) -> np.ndarray:
        """Rank that owns each expert.

        Returns
        -------
        numpy.ndarray
            int32, shape ``[num_experts]``. Without a placement, expert blocks are contiguous and differ by at most one.

        Raises
        ------
        ArgumentError
            The placement names a rank outside the group.
        """
        if self.placement is None:
            experts = np.arange(self.num_experts, dtype=np.int64)
            return (experts * num_ranks // max(self.num_experts, num_ranks)).astype(np.int32)
        ranks = np.asarray(self.placement, dtype=np.int32)
        if ranks.max() >= num_ranks:
            raise ArgumentError("placement", int(ranks.max()), f"ranks below {num_ranks}")
        return ranks
