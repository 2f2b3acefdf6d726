"""Every error nvep raises on purpose. Bad arguments and library failures are different branches."""

from __future__ import annotations


class NvepError(Exception):
    """Root of all errors raised by nvep."""


class ArgumentError(NvepError, ValueError):
    """An argument is not acceptable.

    Parameters
    ----------
    argument : str
        Name of the argument as the caller wrote it.
    value : object
        What was given (its ``repr`` is shown, shortened).
    allowed : str
        What would have been accepted.
    """

    def __init__(self, argument: str, value: object, allowed: str) -> None:
        self.argument = argument
        self.value = value
        self.allowed = allowed
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{argument}: got {shown}; allowed: {allowed}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.argument, self.value, self.allowed))


class DTypeError(ArgumentError):
    """An array has the wrong element type."""


class ShapeError(ArgumentError):
    """An array has the wrong shape, strides or alignment."""


class ConfigMismatch(NvepError):
    """Ranks disagree on something that must be equal; raised with the same text on every rank."""


class HeapTooLarge(NvepError, MemoryError):
    """The symmetric heap does not fit; the text shows the sum."""


class ExchangeClosed(NvepError, RuntimeError):
    """The object was used after ``close()``."""


class StepOrderError(NvepError, RuntimeError):
    """A phase was called out of the order D.send, D.recv, C.send, C.recv of its lane."""


class PeerFailure(NvepError):
    """A peer can no longer be exchanged with."""


class PeerLeft(PeerFailure):
    """A peer closed its exchange after an error of its own.

    Parameters
    ----------
    rank : int
        The rank that left.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} left the exchange after an error")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank,))


class PeerTimeout(PeerFailure, TimeoutError):
    """A wait on a peer passed its deadline.

    Parameters
    ----------
    suspect : int
        Rank that was awaited first.
    phase : str
        Phase that waited: ``"D.recv"``, ``"C.recv"`` or ``"release"``.
    epoch : int
        Step counter of the lane.
    reporter : int
        Rank whose wait expired (this rank, or the peer that poisoned it).
    """

    def __init__(self, suspect: int, phase: str, epoch: int, reporter: int) -> None:
        self.suspect = suspect
        self.phase = phase
        self.epoch = epoch
        self.reporter = reporter
        super().__init__(
            f"rank {suspect} did not answer: rank {reporter} waited in {phase} of step {epoch} until the deadline"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.suspect, self.phase, self.epoch, self.reporter))


class ProtocolMismatch(NvepError):
    """A peer ran a step with another protocol."""


class NicError(NvepError):
    """A network adapter could not execute what it was given; its ring executes nothing more.

    Parameters
    ----------
    rank : int
        Rank whose adapter it is.
    ring : int
        Number of the send queue or descriptor ring.
    index : int
        Absolute index of the entry, its low 32 bits.
    cause : str
        What was wrong with it.
    """

    def __init__(self, rank: int, ring: int, index: int, cause: str) -> None:
        self.rank = rank
        self.ring = ring
        self.index = index
        self.cause = cause
        super().__init__(f"the network adapter of rank {rank} failed at entry {index} of ring {ring}: {cause}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.ring, self.index, self.cause))


class NicTimeout(NvepError, TimeoutError):
    """A ring stayed full, or an adapter answered nothing, until the deadline.

    Parameters
    ----------
    rank : int
        Rank whose adapter was awaited.
    ring : int
        Number of the send queue or descriptor ring.
    waits : int
        Waits on it that were given up.
    """

    def __init__(self, rank: int, ring: int, waits: int) -> None:
        self.rank = rank
        self.ring = ring
        self.waits = waits
        super().__init__(
            f"the network adapter of rank {rank} did not answer: {waits} wait(s) on ring {ring} passed the deadline"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.ring, self.waits))


class GroupError(NvepError, RuntimeError):
    """A bootstrap collective failed or another rank of the group stopped."""


class DeviceError(NvepError, RuntimeError):
    """The CUDA driver, or the emulated device, refused an operation."""


class CompilationError(NvepError, RuntimeError):
    """A kernel did not compile; the text holds the compiler's output."""


class TraceError(NvepError, ValueError):
    """A router log cannot be read.

    Parameters
    ----------
    path : str
        The file.
    line : int or None
        One-based line, where the format has lines.
    cause : str
        What is wrong.
    """

    def __init__(self, path: str, line: int | None, cause: str) -> None:
        self.path = path
        self.line = line
        self.cause = cause
        super().__init__(f"{path}:{line}: {cause}" if line is not None else f"{path}: {cause}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.path, self.line, self.cause))
