"""What the driver tells about GPUs and the links between them. Creates no context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from nvep.runtime.cuda_calls import check, count_devices

_ATTRIBUTE = driver.CUdevice_attribute
_P2P = driver.CUdevice_P2PAttribute


@dataclass(frozen=True)
class GpuFacts:
    """One GPU.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    memory_bytes : int
        All of its memory, used or not.
    posix_handles, fabric_handles : bool
        How its memory can be shared: file descriptors on this host, handles across an NVLink domain.
    dma_buf : bool
        Its memory can be registered with a NIC as dma-buf.
    """

    ordinal: int
    name: str
    pci_bus_id: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    posix_handles: bool
    fabric_handles: bool
    dma_buf: bool


@dataclass(frozen=True)
class Link:
    """From one GPU to another: ``performance_rank`` compares links of this machine, 0 is the best."""

    access: bool
    atomics: bool
    performance_rank: int


def driver_version() -> str:
    """Newest CUDA version the driver supports, e.g. ``13.0``."""
    number = int(check("cuDriverGetVersion", driver.cuDriverGetVersion()))
    return f"{number // 1000}.{number % 1000 // 10}"


def gpu_facts() -> list[GpuFacts]:
    """Every GPU the process sees; empty where there is none."""
    return [_facts(ordinal) for ordinal in range(count_devices()[0])]


def _facts(ordinal: int) -> GpuFacts:
    device = check("cuDeviceGet", driver.cuDeviceGet(ordinal))

    def attribute(which: Any) -> int:
        return int(check(f"cuDeviceGetAttribute {which.name}", driver.cuDeviceGetAttribute(which, device)))

    def text(call: str, result: tuple[Any, ...]) -> str:
        return bytes(check(call, result)).split(b"\0")[0].decode()

    return GpuFacts(
        ordinal=ordinal,
        name=text("cuDeviceGetName", driver.cuDeviceGetName(128, device)),
        pci_bus_id=text("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(32, device)),
        capability=(
            attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        multiprocessors=attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        memory_bytes=int(check("cuDeviceTotalMem", driver.cuDeviceTotalMem(device))),
        posix_handles=bool(attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)),
        fabric_handles=bool(attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)),
        dma_buf=bool(attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)),
    )


def link(source: int, target: int) -> Link:
    """How kernels of GPU ``source`` reach memory of another GPU ``target``."""

    def attribute(which: Any) -> int:
        result = driver.cuDeviceGetP2PAttribute(which, source, target)
        return int(check(f"cuDeviceGetP2PAttribute {which.name}", result))

    return Link(
        access=bool(check("cuDeviceCanAccessPeer", driver.cuDeviceCanAccessPeer(source, target))),
        atomics=bool(attribute(_P2P.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)),
        performance_rank=attribute(_P2P.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK),
    )
