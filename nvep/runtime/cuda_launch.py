"""Kernel launches of a GPU: their configurations, and launches that are prepared once and repeated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from cuda.bindings import driver

from nvep.errors import ArgumentError
from nvep.runtime.cuda_calls import check
from nvep.runtime.cuda_stream import CudaStream
from nvep.runtime.device import Kernel, LaunchShape, Stream
from nvep.runtime.jit import Cubin
from nvep.runtime.source import KernelSource

_MAX_CONFIGS = 64
_CUDA_VERSION = 12000  # of the driver's functions that are called directly


class CudaKernel(Kernel):
    """A kernel loaded into the device's context."""

    def __init__(self, source: KernelSource, cubin: Cubin, module: Any, function: Any) -> None:
        self.source = source
        self.cubin = cubin
        self.module = module
        self.function = function
        self.argument_bytes = ctypes.sizeof(source.arguments.ctype)
        self._configs: dict[tuple[LaunchShape, int], Any] = {}

    def config(self, shape: LaunchShape, stream: CudaStream) -> Any:
        """``CUlaunchConfig`` of a launch; kept, because a layer repeats the same few."""
        key = (shape, stream.handle)
        found = self._configs.get(key)
        if found is None:
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            found = self._configs[key] = _launch_config(shape, stream)
        return found

    def check_arguments(self, arguments: ctypes.Structure) -> None:
        """Raise ArgumentError if they are another kernel's."""
        if ctypes.sizeof(arguments) != self.argument_bytes:
            raise ArgumentError("arguments", type(arguments).__name__, f"a {self.source.arguments.name}")

    def failed(self, shape: LaunchShape, status: Any) -> None:
        """Raise the DeviceError of a launch that returned ``status``."""
        check(f"cuLaunchKernelEx of {self.source.name}, {shape.blocks} blocks of {shape.threads} threads", (status,))


def _launch_config(shape: LaunchShape, stream: CudaStream) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = stream.cuda
    config.numAttrs = 0
    if shape.dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def require_stream(stream: Stream) -> CudaStream:
    """``stream``, if it is one of CUDA."""
    if not isinstance(stream, CudaStream):
        raise ArgumentError("stream", stream, "a stream of the CUDA device (see Device.as_stream)")
    return stream


@lru_cache
def _function(name: str, parameters: int) -> Callable[..., int]:
    """A driver function of pointers. It is called outside Python's lock: a launch may wait for room in the queue."""
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    found = check(f"cuGetProcAddress of {name}", driver.cuGetProcAddress(name.encode(), _CUDA_VERSION, flags.value))
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * parameters)(int(found[0]))


class CudaLaunch:
    """A launch that is repeated, see `Device.prepare`.

    Everything that cuda.bindings would convert at every call is an address here that was found once: two launches a
    step are what an exchange does most.
    """

    def __init__(self, kernel: CudaKernel, shape: LaunchShape, arguments: ctypes.Structure, context: Any) -> None:
        kernel.check_arguments(arguments)
        self._kernel = kernel
        self._shape = shape
        self._arguments = arguments
        self._parameters = ctypes.c_void_p(ctypes.addressof(arguments))
        self._make_current = partial(_function("cuCtxSetCurrent", 1), int(context))
        self._calls: dict[int, tuple[Callable[[], int], object]] = {}  # by stream: the call, what it points to

    def enqueue(self, stream: Stream) -> None:
        """On ``stream``, with what the arguments hold now."""
        call = self._calls.get(stream.handle) or self._prepare(require_stream(stream))
        self._make_current()  # a failure shows in the launch
        status = call[0]()
        if status:
            self._kernel.failed(self._shape, status)

    def _prepare(self, stream: CudaStream) -> tuple[Callable[[], int], object]:
        if len(self._calls) >= _MAX_CONFIGS:
            self._calls.clear()
        config, parameters = self._kernel.config(self._shape, stream), ctypes.addressof(self._parameters)
        launch = _function("cuLaunchKernelEx", 4)
        call = partial(launch, int(config.getPtr()), int(self._kernel.function), parameters, None), config
        self._calls[stream.handle] = call
        return call
