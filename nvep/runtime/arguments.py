"""Kernel argument structs, declared once here and generated into C++ with size and offset checks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_CTYPES: dict[str, type] = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
}
_CPP = {"u32": "unsigned int", "i32": "int", "u64": "unsigned long long", "f32": "float"}


@dataclass(frozen=True)
class Field:
    """One field: ``kind`` is ``u32``, ``i32``, ``u64``, ``f32`` or a C++ pointee type followed by ``*``; with a
    ``count``, an array."""

    name: str
    kind: str
    count: int | None = None

    @property
    def ctype(self) -> Any:
        base: Any = ctypes.c_uint64 if self.kind.endswith("*") else _CTYPES[self.kind]
        return base if self.count is None else base * self.count

    def declaration(self) -> str:
        cpp = self.kind if self.kind.endswith("*") else _CPP[self.kind]
        suffix = "" if self.count is None else f"[{self.count}]"
        return f"  {cpp} {self.name}{suffix};"


class ArgumentStruct:
    """A by-value kernel argument.

    Parameters
    ----------
    name : str
        C++ struct name.
    fields : list of Field
        In order; C++ alignment rules apply.
    """

    def __init__(self, name: str, fields: list[Field]) -> None:
        self.name = name
        self.fields = tuple(fields)
        self.ctype: type[ctypes.Structure] = type(
            name, (ctypes.Structure,), {"_fields_": [(f.name, f.ctype) for f in fields]}
        )

    def new(self, **values: int | float) -> ctypes.Structure:
        """Return a zeroed instance with ``values`` set (pointers as integer addresses)."""
        instance = self.ctype()
        for name, value in values.items():
            if not hasattr(instance, name):
                raise KeyError(f"{self.name} has no field {name}")
            setattr(instance, name, value)
        return instance

    def cpp(self) -> str:
        """C++ declaration with checks that both sides agree on size and offsets."""
        lines = [f"struct {self.name} {{", *(f.declaration() for f in self.fields), "};"]
        lines.append(f'static_assert(sizeof({self.name}) == {ctypes.sizeof(self.ctype)}, "{self.name}: size");')
        for f in self.fields:
            offset = getattr(self.ctype, f.name).offset
            lines.append(
                f'static_assert(__builtin_offsetof({self.name}, {f.name}) == {offset}, "{self.name}.{f.name}: offset");'
            )
        return "\n".join(lines)
