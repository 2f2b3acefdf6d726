"""Run a program under mpirun from a test, so that nothing outlives the test and a hang shows where it hangs."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nvep.errors import NvepError

# MPICH's waits yield but stay runnable. Eight ranks on two cores, one working while seven wait: 0.95 s as it is, 0.42 s
# with naps instead, against 0.24 s of the work alone; a barrier takes 0.66 ms instead of 0.09 ms.
_MPICH_VARIABLES = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
_OPEN_MPI_OPTIONS = ("--oversubscribe", "--bind-to", "none")
_DUMP_SECONDS = 1.0
# Even with -disable-auto-cleanup MPICH's mpirun sends SIGUSR1 to the survivors of a rank that ends early, and SIGKILL
# when it sees that a signal ended it. A shell in between hides the latter, and its ignored signals are inherited.
_SURVIVE = ("sh", "-c", "trap '' USR1; \"$@\"; exit $?", "sh")


class MpiMissing(NvepError):
    """There is no mpirun beside the interpreter nor on ``PATH``."""


@dataclass(frozen=True)
class MpiResult:
    """How a job ended. ``returncode`` is mpirun's, or None if the job was killed at its time limit."""

    command: tuple[str, ...]
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def require_success(self) -> MpiResult:
        """Return this, or raise AssertionError with everything the job wrote."""
        if self.returncode != 0:
            ended = "was killed at its time limit" if self.timed_out else f"ended with status {self.returncode}"
            raise AssertionError(f"the job {ended} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}")
        return self


@lru_cache(maxsize=1)
def find_mpirun() -> tuple[str, bool]:
    """Return the path of mpirun and whether it is Open MPI's. That beside the interpreter (mpich's wheel) comes first.

    Raises
    ------
    MpiMissing
        There is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise MpiMissing(f"no mpirun in {beside.parent} nor on PATH: install the mpich wheel")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    return path, "Open MPI" in version or "open-mpi" in version


def run_mpi(
    ranks: int,
    program: str | Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
    survive: bool = False,
) -> MpiResult:
    """Run ``program`` on ``ranks`` processes and wait for the job to end.

    Parameters
    ----------
    ranks : int
        Number of processes.
    program : str or sequence of str
        Python source, or a command line. Ranks import from where this process imports.
    timeout : float
        Seconds, after which every rank is made to dump its Python stacks to stderr, and killed.
    env : mapping, optional
        Variables to set besides the inherited ones.
    extra : sequence of str, optional
        Further options of mpirun.
    survive : bool
        A rank that is killed does not end the job: the other ranks run on.

    Returns
    -------
    MpiResult
        Output and status. No process of the job is left.

    Raises
    ------
    MpiMissing
        There is no mpirun, or ``survive`` is asked of one other than MPICH's.
    """
    argv = [sys.executable, "-c", program] if isinstance(program, str) else list(program)
    if survive:
        if find_mpirun()[1]:
            raise MpiMissing("only MPICH's mpirun can let the other ranks of a job run on")
        argv, extra = [*_SURVIVE, *argv], ["-disable-auto-cleanup", *extra]
    command = _command(ranks, argv, env or {}, extra)
    start = time.monotonic()
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    status: int | None
    try:
        stdout, stderr = job.communicate(timeout=timeout)
        status = job.returncode
    except subprocess.TimeoutExpired:
        stdout, stderr = _kill(job)
        status = None
    except BaseException:
        _kill(job)
        raise
    return MpiResult(tuple(command), status, stdout, stderr, time.monotonic() - start)


def _command(ranks: int, argv: Sequence[str], env: Mapping[str, str], extra: Sequence[str]) -> list[str]:
    mpirun, open_mpi = find_mpirun()
    variables = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in sys.path if p))}
    options: tuple[str, ...] = ()
    if open_mpi:
        options = (*_OPEN_MPI_OPTIONS, *(("--allow-run-as-root",) if os.geteuid() == 0 else ()))
    else:
        variables.update(_MPICH_VARIABLES)
    variables.update(env)
    # env(1) adds to the environment without this process having to read its own.
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, mpirun, *options, "-n", str(ranks), *extra, *argv]


@contextmanager
def _shared_files_removed(pid: int) -> Iterator[None]:
    """Take away, at the end, what MPICH named in /dev/shm for a process that may be killed before it could."""
    mapped: set[str] = set()
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        mapped = {path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith("/dev/shm/mpich_shm_")}
    yield
    for path in mapped:
        Path(path).unlink(missing_ok=True)


def _kill(job: subprocess.Popen[str]) -> tuple[str, str]:
    """End the job; return what it wrote. Ranks are in sessions of their own, so they are found as descendants."""
    with ExitStack() as opened:
        # Held open: a number may pass to another process once its owner is gone.
        ranks: list[int] = []
        launchers: list[int] = []
        for pid in (job.pid, *_descendants(job.pid)):
            opened.enter_context(_shared_files_removed(pid))
            with suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                opened.callback(os.close, process)
                (ranks if _is_python(pid) else launchers).append(process)
        _signal(launchers, signal.SIGSTOP)  # else the first rank to end makes them kill the others
        _signal(ranks, signal.SIGABRT)  # faulthandler writes the stacks
        _wait(ranks, _DUMP_SECONDS)
        _signal(launchers, signal.SIGCONT)  # they forward what the ranks wrote
        with suppress(subprocess.TimeoutExpired):
            job.wait(_DUMP_SECONDS)
        _signal(ranks + launchers, signal.SIGKILL)
        return job.communicate()


def _wait(processes: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    running = list(processes)
    while running and time.monotonic() < end:
        ended, _, _ = select.select(running, [], [], max(0.0, end - time.monotonic()))
        running = [process for process in running if process not in ended]


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The command, in parentheses, may hold anything; state and parent follow it.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _is_python(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.path.realpath(sys.executable)
    except OSError:
        return False
