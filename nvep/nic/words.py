"""Descriptors that hardware reads, declared once: bit fields of 8-byte words, for C++ and for NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.errors import ArgumentError

_WORD = 8


@dataclass(frozen=True)
class Bits:
    """A field of a descriptor.

    Attributes
    ----------
    name : str
        In snake_case; C++ gets ``name()`` and ``set_name(value)``.
    byte : int
        Offset of the container that holds it.
    bits : int
        Width.
    shift : int
        Position of its lowest bit within the container's value.
    container : int
        Bytes of the container (1, 2, 4 or 8), aligned to its size.
    big_endian : bool
        Byte order of the container in memory; little otherwise.
    """

    name: str
    byte: int
    bits: int
    shift: int = 0
    container: int = 8
    big_endian: bool = False

    @property
    def word(self) -> int:
        return self.byte // _WORD

    @property
    def offset(self) -> int:
        """Lowest bit of the container within its word."""
        return self.byte % _WORD * 8

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1


class Descriptor:
    """A fixed number of 8-byte words with named fields.

    Parameters
    ----------
    name : str
        C++ struct name, in namespace ``nvep::ring``.
    nbytes : int
        A multiple of 8.
    fields : list of Bits
        May overlap where the meaning depends on another field.
    """

    def __init__(self, name: str, nbytes: int, fields: list[Bits]) -> None:
        for field in fields:
            inside = field.byte % field.container == 0 and field.byte + field.container <= nbytes
            if not inside or field.shift + field.bits > 8 * field.container:
                raise ArgumentError("fields", field, f"aligned containers within {nbytes} bytes that hold the field")
        self.name = name
        self.nbytes = nbytes
        self.words = nbytes // _WORD
        self.fields = {field.name: field for field in fields}

    def encode(self, **values: Any) -> np.ndarray:
        """Words of a descriptor.

        Parameters
        ----------
        **values : int or array of int
            Fields by name, broadcast against one another; the others are zero.

        Returns
        -------
        numpy.ndarray
            uint64, shape ``[..., words]``.

        Raises
        ------
        ArgumentError
            There is no such field, or a value does not fit.
        """
        for name in values:
            if name not in self.fields:
                raise ArgumentError(name, name, f"one of {', '.join(self.fields)}")
        arrays = {name: np.asarray(value, dtype=np.uint64) for name, value in values.items()}
        words = np.zeros((*np.broadcast_shapes(*(a.shape for a in arrays.values())), self.words), dtype=np.uint64)
        for name, value in arrays.items():
            field = self.fields[name]
            if (value > np.uint64(field.mask)).any():
                raise ArgumentError(name, int(value.max()), f"at most {field.mask:#x}")
            container = _swapped(value << np.uint64(field.shift), field)
            words[..., field.word] |= container << np.uint64(field.offset)
        return words

    def decode(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Fields of descriptors.

        Parameters
        ----------
        words : numpy.ndarray
            uint64, shape ``[..., words]``.

        Returns
        -------
        dict of str to numpy.ndarray
            uint64 arrays of shape ``[...]``.
        """
        fields = {}
        for name, field in self.fields.items():
            container = words[..., field.word] >> np.uint64(field.offset)
            if field.container < _WORD:
                container = container & np.uint64((1 << 8 * field.container) - 1)
            fields[name] = (_swapped(container, field) >> np.uint64(field.shift)) & np.uint64(field.mask)
        return fields

    def cpp(self) -> str:
        """C++ struct with a getter and a setter per field; setters expect the field to be zero."""
        lines = [f"struct {self.name} {{", f"  static constexpr u32 kBytes = {self.nbytes}, kWords = {self.words};"]
        lines += [f"  u64 word[{self.words}];"]
        for name, f in self.fields.items():
            scalar = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[f.container]
            kind = "u64" if f.bits > 32 else "u32"
            container = f"static_cast<{scalar}>(word[{f.word}] >> {f.offset})"
            placed = f"static_cast<{scalar}>((static_cast<u64>(v) & {f.mask:#x}ull) << {f.shift})"
            if f.big_endian:
                container, placed = f"swap_bytes({container})", f"swap_bytes({placed})"
            lines.append(
                f"  __device__ __forceinline__ {kind} {name}() const "
                f"{{ return static_cast<{kind}>(({container} >> {f.shift}) & {f.mask:#x}ull); }}"
            )
            lines.append(
                f"  __device__ __forceinline__ void set_{name}({kind} v) "
                f"{{ word[{f.word}] |= static_cast<u64>({placed}) << {f.offset}; }}"
            )
        lines += ["};", f'static_assert(sizeof({self.name}) == {self.nbytes}, "{self.name}: size");']
        return "\n".join(lines)


def _swapped(values: np.ndarray, field: Bits) -> np.ndarray:
    """Containers in the other byte order if the field asks for it; both orders are values of ``container`` bytes."""
    if not field.big_endian:
        return values
    swapped: np.ndarray = np.asarray(values).byteswap()
    return swapped >> np.uint64(8 * (_WORD - field.container))
