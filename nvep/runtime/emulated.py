"""The emulated device: kernels compiled for the host, run by the emulator on the threads of its streams."""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import weakref
from typing import Any

import numpy as np

from nvep.config import Settings
from nvep.errors import ArgumentError, DeviceError, ShapeError
from nvep.runtime.device import BulkCopies, Device, Graph, HostMemory, Kernel, LaunchShape, Stream
from nvep.runtime.emulated_launch import MAX_SHARED_BYTES, MAX_THREADS, EmulatedKernel, Emulator, window
from nvep.runtime.emulated_stream import EmulatedGraph, EmulatedStream, stream_of_handle
from nvep.runtime.host_jit import HostJit
from nvep.runtime.source import KernelSource

_CUDA_DEFAULT_HANDLES = (0, 1, 2)  # what CUDA libraries call their default, legacy and per-thread streams


class EmulatedMemory(HostMemory):
    """Anonymous pages. After ``free()`` they live on until the last view of them is gone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pages: mmap.mmap | None = mmap.mmap(-1, max(nbytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def view(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        if self._pages is None:
            raise DeviceError("the memory was freed")
        needed = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if needed > self.nbytes:
            raise ShapeError("shape", shape, f"at most {self.nbytes} bytes of {np.dtype(dtype)}")
        flat: np.ndarray = np.frombuffer(self._pages, dtype=np.uint8, count=needed).view(dtype)
        return flat.reshape(shape)

    def free(self) -> None:
        self._pages = None


class EmulatedDevice(Device):
    """CPU cores in the role of a GPU.

    Parameters
    ----------
    settings : Settings, optional
        Compiler and cache; default: the environment's.
    jit : HostJit, optional
        Compiles with other flags than usual.
    seed : int
        Order in which blocks and threads of a launch start; 0 is ascending.
    """

    kind = "emulated"
    ordinal = 0
    multiprocessors = 1
    default_threads = 128
    default_blocks = 4
    bulk: BulkCopies | None = BulkCopies(512, 256, 8 << 10, 8 << 10)  # small, so that rows are cut and rings go round

    def __init__(self, settings: Settings | None = None, *, jit: HostJit | None = None, seed: int = 0) -> None:
        self.name = f"emulated on {platform.machine()}"
        self._emulator = Emulator(jit or HostJit(settings), seed=seed)
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[EmulatedStream] = weakref.WeakSet()
        self._default: EmulatedStream | None = None
        self._closed = False

    def make_current(self) -> None:
        """Nothing to bind."""

    def allocate(self, nbytes: int) -> EmulatedMemory:
        return self.allocate_host(nbytes)

    def allocate_host(self, nbytes: int) -> EmulatedMemory:
        if nbytes < 0:
            raise ArgumentError("nbytes", nbytes, "0 or more")
        return EmulatedMemory(nbytes)

    def create_stream(self) -> EmulatedStream:
        with self._lock:
            if self._closed:
                raise DeviceError("the device is closed")
            stream = EmulatedStream()
            self._streams.add(stream)
            return stream

    @property
    def default_stream(self) -> EmulatedStream:
        if self._default is None:
            stream = self.create_stream()
            with self._lock:
                self._default = self._default or stream
        return self._default

    def as_stream(self, stream: Any) -> EmulatedStream:
        if stream is None:
            return self.default_stream
        if isinstance(stream, EmulatedStream):
            return stream
        handle = stream
        if hasattr(stream, "__cuda_stream__"):
            _, handle = stream.__cuda_stream__()
        if isinstance(handle, int) and not isinstance(handle, bool):
            if handle in _CUDA_DEFAULT_HANDLES:
                return self.default_stream
            found = stream_of_handle(handle)
            if found is not None:
                return found
        raise ArgumentError("stream", stream, "None, a stream of an emulated device, its handle, or a __cuda_stream__")

    def order(self, consumer_handle: int, producer: Stream) -> None:
        consumer = stream_of_handle(consumer_handle)
        if consumer is None:
            producer.synchronize()  # a library whose streams are unknown here reads memory as the host does
        else:
            consumer.wait(producer.record())

    def copy_in(self, address: int, array: np.ndarray, stream: Stream) -> None:
        data = array.tobytes() if _contiguous(array) else b""
        self.as_stream(stream).enqueue(lambda: _move(address, data, len(data)))

    def copy_out(self, array: np.ndarray, address: int, stream: Stream) -> None:
        _contiguous(array)
        target = self.as_stream(stream)
        if target.graph is not None:
            raise DeviceError("copy_out waits, so it cannot be captured")
        target.enqueue(lambda: _move(array.ctypes.data, address, array.nbytes))
        target.synchronize()

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self.as_stream(stream).enqueue(lambda: _move(target, source, nbytes))

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        self.as_stream(stream).enqueue(lambda: _fill(address, byte, nbytes))

    def load(self, source: KernelSource) -> EmulatedKernel:
        return self._emulator.load(source)

    def load_all(self, sources: dict[str, KernelSource]) -> dict[str, Kernel]:
        self._emulator.compile_all(list(sources.values()))
        return {name: self.load(source) for name, source in sources.items()}

    def launch(self, kernel: Kernel, shape: LaunchShape, arguments: ctypes.Structure, stream: Stream) -> None:
        if not isinstance(kernel, EmulatedKernel):
            raise ArgumentError("kernel", kernel, "a kernel loaded by an emulated device")
        if not isinstance(arguments, kernel.source.arguments.ctype):
            raise ArgumentError("arguments", arguments, f"a {kernel.source.arguments.name}")
        if not 1 <= shape.threads <= MAX_THREADS:
            raise ArgumentError("shape.threads", shape.threads, f"1 to {MAX_THREADS}")
        if shape.blocks < 1:
            raise ArgumentError("shape.blocks", shape.blocks, "1 or more")
        if not 0 <= shape.shared_bytes <= MAX_SHARED_BYTES:
            raise ArgumentError("shape.shared_bytes", shape.shared_bytes, f"0 to {MAX_SHARED_BYTES}")
        snapshot = bytes(arguments)
        self.as_stream(stream).enqueue(lambda: self._emulator.run(kernel, shape, snapshot))

    def resident_blocks(self, kernel: Kernel, threads: int, *, shared_bytes: int = 0) -> int:
        return window(threads)

    def _begin_capture(self, stream: Stream) -> Graph:
        captured = self.as_stream(stream)
        if captured.graph is not None:
            raise DeviceError("the stream is captured already")
        graph = EmulatedGraph()
        captured.graph = graph
        graph.streams.append(captured)
        return graph

    def _end_capture(self, stream: Stream, graph: Graph, *, keep: bool) -> None:
        assert isinstance(graph, EmulatedGraph)
        for captured in graph.streams:
            captured.graph = None
        graph.streams.clear()
        if keep:
            graph.complete = True
        else:
            graph.close()

    def is_capturing(self, stream: Stream) -> bool:
        return self.as_stream(stream).graph is not None

    def capture_of(self, stream: Stream) -> int:
        graph = self.as_stream(stream).graph
        return 0 if graph is None else graph.number

    def synchronize(self) -> None:
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()


def _contiguous(array: np.ndarray) -> bool:
    if not array.flags.c_contiguous:
        raise ShapeError("array", array.strides, "a C-contiguous array")
    return True


def _move(target: int, source: int | bytes, nbytes: int) -> None:
    if nbytes:
        ctypes.memmove(target, source, nbytes)


def _fill(address: int, byte: int, nbytes: int) -> None:
    if nbytes:
        ctypes.memset(address, byte, nbytes)
