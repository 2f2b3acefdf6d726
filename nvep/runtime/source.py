"""A kernel's translation unit: prelude (sizes and type aliases), argument struct, then its readable ``.cu`` file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import nvep_kernels
from nvep.runtime.arguments import ArgumentStruct

KERNEL_ROOT = Path(nvep_kernels.__file__).parent


@dataclass(frozen=True)
class KernelSource:
    """What to compile.

    Parameters
    ----------
    name : str
        ``kernels/<name>.cu`` holds one ``extern "C" __global__`` entry called ``<name>``, whose only parameter is
        ``const __grid_constant__ <arguments.name> arguments``.
    arguments : ArgumentStruct
        The parameter's declaration.
    prelude : str
        ``#include`` lines, ``constexpr`` sizes and type aliases that specialise the kernel.
    file : Path or None
        Another file to compile instead of ``kernels/<name>.cu`` (tests).
    """

    name: str
    arguments: ArgumentStruct
    prelude: str = ""
    file: Path | None = None

    @property
    def path(self) -> Path:
        return self.file or KERNEL_ROOT / "kernels" / f"{self.name}.cu"

    def translation_unit(self) -> str:
        """Complete C++ text; includes are relative to ``nvep_kernels/``."""
        body = self.path.read_text()
        label = self.path.relative_to(KERNEL_ROOT) if self.path.is_relative_to(KERNEL_ROOT) else self.path.name
        return f'{self.arguments.cpp()}\n{self.prelude}\n#line 1 "{label}"\n{body}'

    def digest(self, *options: str) -> str:
        """Key of the compiled form: source, every header of ``nvep_kernels``, and ``options``."""
        h = hashlib.sha256(self.translation_unit().encode())
        h.update(headers_digest().encode())
        for option in options:
            h.update(b"\0" + option.encode())
        return h.hexdigest()[:32]


@lru_cache(maxsize=1)
def headers_digest() -> str:
    """Digest over every header under ``nvep_kernels``: a change of any of them recompiles everything."""
    h = hashlib.sha256()
    for path in sorted(KERNEL_ROOT.rglob("*")):
        if path.suffix in (".cuh", ".h", ".cpp"):
            h.update(str(path.relative_to(KERNEL_ROOT)).encode() + b"\0" + path.read_bytes())
    return h.hexdigest()
