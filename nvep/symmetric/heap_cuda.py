"""Slices in GPU memory: virtual memory management allocations, shared by file descriptor or fabric handle.

cuda.core allocates such memory but neither exports nor imports it, hence the driver calls. Multicast objects are never
created.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver

from nvep.errors import DeviceError, GroupError
from nvep.group.base import RankGroup
from nvep.runtime.cuda_calls import check
from nvep.symmetric.slices import Handle, Slice, SliceBackend

_PRIVATE, _FD, _FABRIC = "none", "file descriptor", "fabric handle"
_HANDLE_TYPES = {
    _PRIVATE: driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE,
    _FD: driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    _FABRIC: driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
}


class CudaBackend(SliceBackend):
    """GPU memory (collective construction).

    Within a process the owner maps its slice once and opens it to the GPUs of all ranks. Between processes each rank
    maps each slice once, for its own GPU: by POSIX file descriptor on one host, by fabric handle across hosts, where
    every rank's driver permits it.

    Parameters
    ----------
    group : RankGroup
        Its devices are GPUs that can reach one another's memory.

    Raises
    ------
    DeviceError
        A GPU cannot reach another's memory, or drivers permit no common way of sharing.
    GroupError
        Ranks are on several hosts and fabric handles are not permitted.
    """

    def __init__(self, group: RankGroup) -> None:
        self._device = group.device
        self._sharers = group.ranks_on_device
        self._kind = _PRIVATE
        self._users = [group.device.ordinal]
        group.together(group.device.make_current)
        if group.in_process:
            self._users = sorted(set(group.allgather(group.device.ordinal)))
        group.together(self._require_peer_access)
        if not group.in_process:
            self._kind = self._agree_handle_type(group)

    def free_bytes(self) -> int:
        self._device.make_current()
        free, _ = _call(driver.cuMemGetInfo)
        return int(free)

    def sharers(self) -> int:
        return self._sharers

    def round_up(self, nbytes: int) -> int:
        option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(_call(driver.cuMemGetAllocationGranularity, self._properties(self._kind), option))
        return -(-max(nbytes, 1) // unit) * unit

    def create(self, nbytes: int) -> Slice:
        with ExitStack() as allocation:
            return self._create(nbytes, allocation)[0]

    def create_shared(self, nbytes: int) -> tuple[Slice, Handle]:
        with ExitStack() as allocation:
            own, handle = self._create(nbytes, allocation)
            try:
                return own, _export(handle, self._kind)
            except BaseException:
                own.release()
                raise

    def open_shared(self, handle: Handle, nbytes: int) -> Slice:
        with ExitStack() as allocation:
            imported = _call(driver.cuMemImportFromShareableHandle, handle, _HANDLE_TYPES[self._kind])
            allocation.callback(_call, driver.cuMemRelease, imported)
            return self._map(imported, nbytes)

    def _create(self, nbytes: int, allocation: ExitStack) -> tuple[Slice, Any]:
        """A zero-filled slice and what backs it. ``allocation`` lets go of the latter; the mapping keeps it alive."""
        handle = _call(driver.cuMemCreate, nbytes, self._properties(self._kind), 0)
        allocation.callback(_call, driver.cuMemRelease, handle)
        own = self._map(handle, nbytes)
        try:
            stream = self._device.default_stream
            self._device.fill(own.address, 0, nbytes, stream)
            stream.synchronize()
        except BaseException:
            own.release()
            raise
        return own, handle

    def _map(self, handle: Any, nbytes: int) -> Slice:
        with ExitStack() as undo:
            address = int(_call(driver.cuMemAddressReserve, nbytes, 0, 0, 0))
            undo.callback(_call, driver.cuMemAddressFree, address, nbytes)
            _call(driver.cuMemMap, address, nbytes, 0, handle, 0)
            undo.callback(_call, driver.cuMemUnmap, address, nbytes)
            access = [_access(ordinal) for ordinal in self._users]
            _call(driver.cuMemSetAccess, address, nbytes, access, len(access))
            return Slice(address, undo.pop_all().close)

    def _properties(self, kind: str) -> Any:
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = _location(self._device.ordinal)
        properties.requestedHandleTypes = _HANDLE_TYPES[kind]
        return properties

    def _require_peer_access(self) -> None:
        own = self._device.ordinal
        for other in self._users:
            if other != own and not _call(driver.cuDeviceCanAccessPeer, other, own):
                raise DeviceError(f"GPU {other} cannot access the memory of GPU {own}: no NVLink or PCIe path")

    def _agree_handle_type(self, group: RankGroup) -> str:
        mine = group.together(lambda: [kind for kind in (_FD, _FABRIC) if self._permits(kind)])
        permitted = group.allgather(mine)
        common = [kind for kind in (_FD, _FABRIC) if all(kind in kinds for kinds in permitted)]
        one_host = group.local_size == group.size
        if one_host and _FD in common:
            return _FD
        if _FABRIC in common:
            return _FABRIC
        if one_host:
            raise DeviceError("on some rank the driver exports GPU memory in no form that processes can share")
        raise GroupError("ranks are on several hosts, and on some rank the driver does not permit fabric handles")

    def _permits(self, kind: str) -> bool:
        """Only trying tells: device attributes know nothing of the permissions of this process."""
        option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        try:
            nbytes = int(_call(driver.cuMemGetAllocationGranularity, self._properties(kind), option))
            handle = _call(driver.cuMemCreate, nbytes, self._properties(kind), 0)
        except DeviceError:
            return False
        try:
            exported = _export(handle, kind)
        except DeviceError:
            return False
        finally:
            _call(driver.cuMemRelease, handle)
        if isinstance(exported, int):
            os.close(exported)
        return True


def _export(handle: Any, kind: str) -> Handle:
    exported = _call(driver.cuMemExportToShareableHandle, handle, _HANDLE_TYPES[kind], 0)
    return bytes(exported.data) if kind == _FABRIC else int(exported)


def _location(ordinal: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location


def _access(ordinal: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location = _location(ordinal)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _call(function: Any, *arguments: Any) -> Any:
    return check(function.__name__, function(*arguments))
