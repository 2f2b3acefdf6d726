"""The simulator's shared library: kernels compiled against the memory model, and the C interface of the machine."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nvep.config import Settings
from nvep.errors import CompilationError
from nvep.runtime.device import Kernel
from nvep.runtime.host_jit import HostJit
from nvep.runtime.source import KERNEL_ROOT, KernelSource

ANY = 0xFFFFFFFF
_MACHINE = ("context", "stacks", "report", "collectives")
_MODEL = ("view", "location", "ordinary", "causality", "choices", "grids", "machine", "bulk", "accesses", "api")
# A simulation compiles far more than it computes.
_KERNEL_FLAGS = ("-O1", "-DNVEP_SIMULATED=1")


class Options(ctypes.Structure):
    """As ``Options`` in simulation.h; odds are out of 1024."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("slots", ctypes.c_uint32),
        ("stale", ctypes.c_uint32),
        ("early", ctypes.c_uint32),
        ("preempt", ctypes.c_uint32),
        ("hold", ctypes.c_uint32),
        ("pause", ctypes.c_uint32),
        ("axiom", ctypes.c_uint32),
        ("spin_bound", ctypes.c_uint32),
        ("trace", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("jump_ns", ctypes.c_uint64),
        ("budget", ctypes.c_uint64),
    ]


class CRule(ctypes.Structure):
    """As ``Rule`` in rules.h."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("directive", "rank", "block", "thread", "line", "skip", "times")),
        ("file", ctypes.c_char * 128),
        ("kernel", ctypes.c_char * 32),
    ]


class CEvent(ctypes.Structure):
    """As ``Event`` in trace.h."""

    _fields_ = [
        ("number", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("file", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        *(
            (name, ctypes.c_uint32)
            for name in ("line", "did", "rank", "stream", "block", "thread", "order", "distance")
        ),
    ]


class CLaunch(ctypes.Structure):
    """As ``NvepSimLaunch`` in api.cpp."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_char_p),
        ("argument_bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
    ]


_P, _U64, _U32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[type | None, list[object]]] = {
    "nvep_sim_create": (_P, [ctypes.POINTER(Options)]),
    "nvep_sim_destroy": (None, [_P]),
    "nvep_sim_stream": (_P, [_P, _U32]),
    "nvep_sim_records": (None, [_P, _U64, _U64]),
    "nvep_sim_alarm": (None, [_P, _U64]),
    "nvep_sim_forget": (None, [_P]),
    "nvep_sim_rule": (None, [_P, ctypes.POINTER(CRule)]),
    "nvep_sim_launch": (ctypes.c_int, [_P, ctypes.POINTER(CLaunch)]),
    "nvep_sim_copy_in": (None, [_P, _U64, ctypes.c_char_p, _U64]),
    "nvep_sim_copy": (None, [_P, _U64, _U64, _U64]),
    "nvep_sim_fill": (None, [_P, _U64, _U32, _U64]),
    "nvep_sim_record": (_P, [_P]),
    "nvep_sim_await": (None, [_P, _P]),
    "nvep_sim_reached": (ctypes.c_int, [_P]),
    "nvep_sim_run": (ctypes.c_char_p, [_P, _P]),
    "nvep_sim_picks": (_U64, [_P]),
    "nvep_sim_events": (_U32, [_P]),
    "nvep_sim_event": (None, [_P, _U32, ctypes.POINTER(CEvent)]),
}


@dataclass(frozen=True)
class Overlay:
    """Texts that take the place of files of ``nvep_kernels``, by path relative to it."""

    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        h = hashlib.sha256()
        for name in sorted(self.files):
            h.update(name.encode() + b"\0" + self.files[name].encode() + b"\0")
        return h.hexdigest()[:24]

    def write(self, folder: Path) -> Path:
        """Files below ``folder``, at a place that depends on nothing but their contents."""
        root = folder / self.digest
        for name, text in self.files.items():
            path = root / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return root


class SimulatedKernel(Kernel):
    """A kernel's entry point in this process."""

    def __init__(self, source: KernelSource, library: ctypes.CDLL, entry: str) -> None:
        self.source = source
        address = ctypes.cast(getattr(library, entry), ctypes.c_void_p).value
        assert address is not None
        self.entry: int = address
        self._library = library


class SimulatorLibrary:
    """Compiles the simulator and kernels for it; one instance serves many simulations.

    Parameters
    ----------
    settings : Settings, optional
        Compiler and cache; default: the environment's.
    overlay : Overlay, optional
        Kernel sources to compile instead of the true ones.
    """

    def __init__(self, settings: Settings | None = None, *, overlay: Overlay | None = None) -> None:
        self._settings = settings or Settings.from_environment()
        self._root = KERNEL_ROOT
        flags = list(_KERNEL_FLAGS)
        self._overlay: Path | None = None
        if overlay is not None:
            self._overlay = overlay.write(self._settings.cache_dir / "host" / "overlays")
            flags += ["-I", str(self._overlay)]
        self._jit = HostJit(self._settings, extra_flags=flags)
        self.calls = machine(self._settings)
        self._bundles: dict[str, ctypes.CDLL] = {}

    def load(self, sources: Sequence[KernelSource]) -> list[SimulatedKernel]:
        """Load kernels; those that share a prelude are compiled together, once.

        Raises
        ------
        CompilationError
            The compiler refused; its output is in the text.
        """
        by_prelude: dict[str, list[KernelSource]] = {}
        for source in sources:
            by_prelude.setdefault(source.prelude, []).append(source)
        libraries = {prelude: self._bundle(members) for prelude, members in by_prelude.items()}
        return [SimulatedKernel(s, libraries[s.prelude], f"nvep_entry_{s.name}") for s in sources]

    def _bundle(self, sources: Sequence[KernelSource]) -> ctypes.CDLL:
        text = "\n".join(self._translation_unit(sources))
        if text not in self._bundles:
            name = sources[0].name if len(sources) == 1 else "bundle"
            self._bundles[text] = _open(self._jit.library(name, text))
        return self._bundles[text]

    def _translation_unit(self, sources: Sequence[KernelSource]) -> Iterator[str]:
        yield '#include "emulator/cuda.cuh"'
        for struct in dict.fromkeys(source.arguments for source in sources):
            yield struct.cpp()
        yield sources[0].prelude
        for source in sources:
            path = source.path
            if self._overlay is not None and path.is_relative_to(self._root):
                mutated = self._overlay / path.relative_to(self._root)
                path = mutated if mutated.exists() else path
            yield f'#line 1 "{source.path.parent.name}/{source.path.name}"'
            yield path.read_text()
            yield (
                f'extern "C" __attribute__((visibility("default"))) void nvep_entry_{source.name}(const void* p) {{\n'
                f"  {source.name}(*static_cast<const {source.arguments.name}*>(p));\n}}"
            )


@lru_cache(maxsize=4)
def machine(settings: Settings) -> ctypes.CDLL:
    """The simulator, compiled and loaded."""
    files = [f"emulator/{name}.cpp" for name in _MACHINE] + [f"emulator/simulation/{name}.cpp" for name in _MODEL]
    text = "".join(f'#include "{name}"\n' for name in files)
    library = _open(HostJit(settings).library("simulator", text, "-pthread"))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CompilationError(f"{path} cannot be loaded (removed; try again): {error}") from error
