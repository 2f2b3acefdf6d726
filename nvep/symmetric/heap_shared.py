"""Slices of emulated ranks: anonymous memory within a process, an unnamed memory file between processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path

from nvep.errors import DeviceError, GroupError
from nvep.group.base import RankGroup
from nvep.symmetric.slices import Handle, Slice, SliceBackend

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostBackend(SliceBackend):
    """Host memory. Pages are zero, and cost nothing, until they are touched.

    Parameters
    ----------
    group : RankGroup
        Its ranks must share this host.

    Raises
    ------
    GroupError
        Ranks are on several hosts, or processes are to share memory on a system other than Linux.
    """

    def __init__(self, group: RankGroup) -> None:
        if group.local_size != group.size:
            raise GroupError(
                f"emulated ranks must be on one host: {group.local_size} of {group.size} ranks share that of rank "
                f"{group.rank}"
            )
        if not group.in_process and sys.platform != "linux":
            raise GroupError("emulated ranks in several processes need Linux; use a local group here")
        self._sharers = group.size

    def free_bytes(self) -> int:
        return min(_available_memory(), _cgroup_room())

    def sharers(self) -> int:
        return self._sharers

    def round_up(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE

    def create(self, nbytes: int) -> Slice:
        return _map(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def create_shared(self, nbytes: int) -> tuple[Slice, Handle]:
        fd = _memory_file(nbytes)
        try:
            return _map(nbytes, mmap.MAP_SHARED, fd), fd
        except BaseException:
            os.close(fd)
            raise

    def open_shared(self, handle: Handle, nbytes: int) -> Slice:
        assert isinstance(handle, int)
        size = os.fstat(handle).st_size
        if size != nbytes:  # touching a page beyond the end would kill the process
            raise DeviceError(f"a peer's heap file has {size} bytes instead of {nbytes}")
        return _map(nbytes, mmap.MAP_SHARED, handle)


def _map(nbytes: int, flags: int, fd: int) -> Slice:
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        raise DeviceError(f"cannot map {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")

    def unmap() -> None:
        if _libc.munmap(address, nbytes):
            raise DeviceError(f"cannot unmap {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")

    return Slice(address, unmap)


def _memory_file(nbytes: int) -> int:
    """Descriptor of a file of ``nbytes`` zero bytes in memory that never has a name."""
    try:
        try:
            fd = os.memfd_create("nvep-heap")
        except OSError:  # refused by a sandbox
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise DeviceError(f"cannot create a memory file of {nbytes:,} bytes: {error}") from error
    return fd


def _available_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def _cgroup_room(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under a container's memory limit; file pages that the kernel can drop do not count as used."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize
