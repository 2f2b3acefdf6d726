"""The CUDA device: one GPU, through cuda.core, and through the driver where cuda.core does not reach."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import cuda.core
import numpy as np
from cuda.bindings import driver

from nvep.config import Settings
from nvep.errors import ArgumentError, DeviceError, ShapeError
from nvep.runtime.cuda_calls import check, core_call, count_devices
from nvep.runtime.cuda_launch import CudaKernel, CudaLaunch, require_stream
from nvep.runtime.cuda_memory import CudaHostMemory, CudaMemory, StagingRing
from nvep.runtime.cuda_stream import CudaGraph, CudaStream, stream_handle
from nvep.runtime.device import BulkCopies, Device, Graph, Kernel, Launch, LaunchShape, Stream
from nvep.runtime.jit import Cubin, architecture_for, check_architecture, compile_kernel
from nvep.runtime.source import KernelSource

_STAGING_BYTES = 16 << 20
_SMALLEST_ALLOCATION = 256  # also what an empty region gets: kernels are never handed a null pointer
_COMPILER_THREADS = 8
_TIMED, _UNTIMED = cuda.core.EventOptions(timing_enabled=True), cuda.core.EventOptions()


def _kernel(kernel: Kernel) -> CudaKernel:
    if not isinstance(kernel, CudaKernel):
        raise ArgumentError("kernel", kernel, "a kernel loaded by the CUDA device")
    return kernel


def _raw(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ShapeError("array", f"strides {array.strides}", "a C-contiguous array")
    return array.reshape(-1).view(np.uint8)


class _Made:
    """A stream that was handed out: it outlives its last user until its work is done."""

    def __init__(self, handed_out: CudaStream, stream: CudaStream) -> None:
        self.stream = stream
        self._handed_out = weakref.ref(handed_out)

    @property
    def used(self) -> bool:
        return self._handed_out() is not None


class CudaDevice(Device):
    """One GPU and its primary context.

    A method leaves this GPU's context current on the calling thread.

    Parameters
    ----------
    ordinal : int
        GPU number among those the process sees.
    settings : Settings, optional
        Cache folder and architecture; default: the environment's.

    Raises
    ------
    DeviceError
        There is no such GPU, or the driver refused.
    """

    kind = "cuda"
    frees_wait_for_kernels = True

    def __init__(self, ordinal: int = 0, *, settings: Settings | None = None) -> None:
        count, why = count_devices()
        if count == 0:
            raise DeviceError(f"no CUDA device: {why}")
        if not 0 <= ordinal < count:
            raise ArgumentError("ordinal", ordinal, f"one of the {count} GPUs, 0 to {count - 1}")
        self.ordinal = ordinal
        self._settings = settings or Settings.from_environment()
        core = self._core()
        self._context = core.context.handle
        arch = self._settings.cuda_arch
        self.arch = check_architecture("NVEP_CUDA_ARCH", arch) if arch else architecture_for(core.compute_capability)
        self.name = f"{core.name} (GPU {ordinal}, {self.arch})"
        self.multiprocessors = int(core.properties.multiprocessor_count)
        self._shared_bytes = int(core.properties.max_shared_memory_per_block_optin)
        self.bulk = BulkCopies() if core.compute_capability >= (9, 0) else None
        self.default_threads = 512
        # Eight ranks of a local group can then wait at once, two blocks of 64 registers a thread to a multiprocessor.
        self.default_blocks = max(1, self.multiprocessors // 4)
        self._lock = Lock()
        self._kernels: dict[str, CudaKernel] = {}
        self._allocations: set[CudaMemory] = set()
        self._closed = False
        self._streams: list[_Made] = []
        self._foreign: CudaStream | None = None  # the latest that a caller named by its handle
        self._default_stream = self.create_stream()
        self.control_stream = self._setup_stream = self.create_stream()
        self._pool = self._create_pool(core)
        self._staging = StagingRing(self.allocate_host(_STAGING_BYTES), lambda s: s.mark().core)

    def _core(self) -> Any:
        """cuda.core's object for this GPU (one per thread), current on the calling thread."""
        core = core_call("cuDeviceGet", cuda.core.Device, self.ordinal)
        core_call("cuDevicePrimaryCtxRetain", core.set_current)
        return core

    @staticmethod
    def _create_pool(core: Any) -> Any:
        """A pool of our own: it returns memory to the GPU once unused and, unlike cuMemAlloc, waits for no kernel."""
        if not core.properties.memory_pools_supported:
            return core.memory_resource
        options = cuda.core.DeviceMemoryResourceOptions()
        return core_call("cuMemPoolCreate", cuda.core.DeviceMemoryResource, core.device_id, options)

    def make_current(self) -> None:
        check("cuCtxSetCurrent", driver.cuCtxSetCurrent(self._context))

    # Memory

    def allocate(self, nbytes: int) -> CudaMemory:
        size = max(nbytes, _SMALLEST_ALLOCATION)
        self.make_current()
        owner = self._setup_stream.owner
        buffer = core_call(f"cuMemAllocFromPoolAsync of {size} bytes", self._pool.allocate, size, stream=owner)
        memory = CudaMemory(buffer, nbytes, self._release)
        with self._lock:
            self._allocations.add(memory)
        self.fill(memory.address, 0, size, self._setup_stream)
        self._setup_stream.synchronize()
        return memory

    def _release(self, memory: CudaMemory, buffer: Any) -> None:
        with self._lock:
            self._allocations.discard(memory)
        self.make_current()
        core_call("cuMemFreeAsync", buffer.close, self._setup_stream.owner)

    def allocate_host(self, nbytes: int) -> CudaHostMemory:
        return CudaHostMemory(nbytes, self.make_current, self._defer)

    def _defer(self, free: Callable[[], object]) -> None:
        self.frees.defer(free)

    def copy_in(self, address: int, array: np.ndarray, stream: Stream) -> None:
        """See :class:`Device`. Refused under capture: a graph would read this host array again at each replay."""
        target = self._host_copy_stream("copy_in", stream)
        if array.nbytes:
            self._staging.copy(address, _raw(array), target)

    def copy_out(self, array: np.ndarray, address: int, stream: Stream) -> None:
        target = self._host_copy_stream("copy_out", stream)
        # A copy to pageable memory blocks inside the driver, which then holds off the other ranks of this process: it
        # is issued when nothing is left to wait for.
        target.synchronize()
        if array.nbytes:
            result = driver.cuMemcpyDtoHAsync(_raw(array).ctypes.data, address, array.nbytes, target.cuda)
            check(f"cuMemcpyDtoHAsync of {array.nbytes} bytes from {address:#x}", result)
        target.synchronize()

    def _host_copy_stream(self, what: str, stream: Stream) -> CudaStream:
        target = require_stream(stream)
        if target.is_capturing():
            raise DeviceError(f"{what}: a copy between host and device cannot be captured in a graph")
        return target

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self.make_current()
            result = driver.cuMemcpyAsync(target, source, nbytes, require_stream(stream).cuda)
            check(f"cuMemcpyAsync of {nbytes} bytes from {source:#x} to {target:#x}", result)

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self.make_current()
            result = driver.cuMemsetD8Async(address, byte, nbytes, require_stream(stream).cuda)
            check(f"cuMemsetD8Async of {nbytes} bytes at {address:#x}", result)

    # Streams and graphs

    def create_stream(self) -> CudaStream:
        core = core_call("cuStreamCreate", self._core().create_stream)
        stream = self._wrap(int(core.handle), core)
        with self._lock:
            self._streams = [made for made in self._streams if made.used or not made.stream.idle]
            self._streams.append(_Made(stream, self._wrap(stream.handle, core)))
        return stream

    def _wrap(self, handle: int, owner: Any) -> CudaStream:
        return CudaStream(handle, self.ordinal, bind=self.make_current, new_event=self._new_event, owner=owner)

    def _new_event(self, timed: bool) -> Any:
        return core_call("cuEventCreate", self._core().create_event, _TIMED if timed else _UNTIMED)

    @property
    def default_stream(self) -> CudaStream:
        return self._default_stream

    def as_stream(self, stream: Any) -> CudaStream:
        if stream is None:
            return self._default_stream
        if isinstance(stream, CudaStream):
            if stream.ordinal != self.ordinal:
                raise ArgumentError("stream", f"a stream of GPU {stream.ordinal}", f"a stream of GPU {self.ordinal}")
            return stream
        if isinstance(stream, Stream):
            raise ArgumentError("stream", stream, f"a stream of GPU {self.ordinal}, not of another kind of device")
        handle, last = stream_handle(stream), self._foreign
        if last is None or last.handle != handle or not (last.owner is stream or isinstance(stream, int)):
            last = self._foreign = self._wrap(handle, stream)
        return last

    def order(self, consumer_handle: int, producer: Stream) -> None:
        if consumer_handle != producer.handle:
            self.as_stream(consumer_handle).wait(producer.mark())

    def _begin_capture(self, stream: Stream) -> CudaGraph:
        graph = CudaGraph(self.make_current, self._defer)
        graph.begin(require_stream(stream))
        return graph

    def _end_capture(self, stream: Stream, graph: Graph, *, keep: bool) -> None:
        assert isinstance(graph, CudaGraph)
        if keep:
            graph.end(require_stream(stream))
        else:
            graph.abandon(require_stream(stream))

    def is_capturing(self, stream: Stream) -> bool:
        return require_stream(stream).is_capturing()

    def capture_of(self, stream: Stream) -> int:
        return stream.capture if type(stream) is CudaStream else require_stream(stream).capture

    # Kernels

    def load(self, source: KernelSource) -> CudaKernel:
        return self._loaded(source, compile_kernel(source, self.arch, self._settings.cache_dir))

    def load_all(self, sources: dict[str, KernelSource]) -> dict[str, Kernel]:
        def compiled(source: KernelSource) -> Cubin:
            return compile_kernel(source, self.arch, self._settings.cache_dir)

        with ThreadPoolExecutor(_COMPILER_THREADS) as pool:  # NVRTC compiles outside Python's lock
            cubins = pool.map(compiled, sources.values())
            return {name: self._loaded(source, cubin) for (name, source), cubin in zip(sources.items(), cubins)}

    def _loaded(self, source: KernelSource, cubin: Cubin) -> CudaKernel:
        with self._lock:
            found = self._kernels.get(cubin.key)
            if found is None:
                found = self._kernels[cubin.key] = self._load(source, cubin)
            return found

    def _load(self, source: KernelSource, cubin: Cubin) -> CudaKernel:
        self.make_current()
        module = check(f"cuModuleLoadData of {source.name}", driver.cuModuleLoadData(cubin.code))
        function = check("cuModuleGetFunction", driver.cuModuleGetFunction(module, source.name.encode()))
        # Modules load lazily unless CUDA_MODULE_LOADING says otherwise, and a load at the first launch could wait for
        # a kernel that waits for this very launch. So could a launch that needs more local memory than is set aside.
        check("cuFuncLoad", driver.cuFuncLoad(function))
        local = self._attribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function)
        stack = driver.CUlimit.CU_LIMIT_STACK_SIZE
        if local > check("cuCtxGetLimit", driver.cuCtxGetLimit(stack)):
            check("cuCtxSetLimit", driver.cuCtxSetLimit(stack, local))
        self._allow_shared(function)
        return CudaKernel(source, cubin, module, function)

    def _allow_shared(self, function: Any) -> None:
        """Any dynamic shared memory that fits, and one split of it from L1 for all kernels.

        A multiprocessor changes the split only when it is idle: a kernel that waits there for a peer could otherwise
        hold off the very kernel that the peer needs.
        """
        attributes = driver.CUfunction_attribute
        static = self._attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, most, self._shared_bytes - static))
        split = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, split, 100))

    @staticmethod
    def _attribute(attribute: Any, function: Any) -> int:
        return int(check("cuFuncGetAttribute", driver.cuFuncGetAttribute(attribute, function)))

    def launch(self, kernel: Kernel, shape: LaunchShape, arguments: ctypes.Structure, stream: Stream) -> None:
        loaded = _kernel(kernel)
        loaded.check_arguments(arguments)
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        config = loaded.config(shape, require_stream(stream))
        driver.cuCtxSetCurrent(self._context)  # a failure shows in the launch
        (status,) = driver.cuLaunchKernelEx(config, loaded.function, ctypes.addressof(pointer), 0)
        if status != 0:
            loaded.failed(shape, status)

    def prepare(self, kernel: Kernel, shape: LaunchShape, arguments: ctypes.Structure) -> Launch:
        return CudaLaunch(_kernel(kernel), shape, arguments, self._context).enqueue

    def resident_blocks(self, kernel: Kernel, threads: int, *, shared_bytes: int = 0) -> int:
        self.make_current()
        result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(_kernel(kernel).function, threads, shared_bytes)
        return int(check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)) * self.multiprocessors

    def synchronize(self) -> None:
        with self._lock:
            streams = [made.stream for made in self._streams]
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.frees.defer(self._free)

    def _free(self) -> None:
        steps: list[Callable[[], Any]] = [made.stream.synchronize for made in self._streams]
        steps.append(self._staging.close)
        steps += [memory.free for memory in self._allocations]
        steps.append(self._setup_stream.synchronize)
        steps += [partial(self._unload, kernel) for kernel in self._kernels.values()]
        steps += [made.stream.owner.close for made in self._streams]
        failures = []
        for step in steps:  # all of them, also when a kernel failed and the context with it
            try:
                step()
            except Exception as error:
                failures.append(error)
        if failures:
            raise DeviceError(f"closing {self.name}: {failures[0]}") from failures[0]

    def _unload(self, kernel: CudaKernel) -> None:
        self.make_current()
        check("cuModuleUnload", driver.cuModuleUnload(kernel.module))
