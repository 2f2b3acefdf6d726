"""Tables of bad arguments of the phases of a step: for each argument, what is wrong with it, and the error."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, NvepError, ShapeError
from tests.emulated.bad_input import Bad, good_inputs, good_partial

GOOD = good_inputs()
ROWS, SCALES = GOOD["tokens"]
IDS, WEIGHTS = GOOD["expert_ids"], GOOD["expert_weights"]


class OtherGpu:
    """A device that this rank does not have."""

    kind, ordinal = "cuda", 3


def expired(array: np.ndarray) -> DeviceArray:
    owner = ArrayOwner(OtherGpu(), keepalive=array)  # type: ignore[arg-type]
    view = DeviceArray(array.ctypes.data, array.shape, array.dtype, owner=owner)
    owner.expire("its memory was freed")
    return view


def on_gpu(array: np.ndarray) -> DeviceArray:
    owner = ArrayOwner(OtherGpu(), keepalive=array)  # type: ignore[arg-type]
    return DeviceArray(array.ctypes.data, array.shape, array.dtype, owner=owner)


def misaligned(array: np.ndarray, by: int) -> np.ndarray:
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64 + by
    return raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


def wide(array: np.ndarray) -> np.ndarray:
    """Equal in shape, with a gap behind each row."""
    return np.concatenate([array, array], axis=-1)[..., : array.shape[-1]]


def bad(argument: str, value: Any, error: type[NvepError], text: str) -> Bad:
    """One argument is bad; ``text`` follows its name in the message."""
    return Bad({argument: value}, error, argument + text)


def ids(*first: int, dtype: Any = np.int32) -> np.ndarray:
    """Good ids but for the first entries of token 3."""
    changed = IDS.astype(dtype)
    changed[3, : len(first)] = first
    return changed


TOKENS: dict[str, Bad] = {
    "none": bad("tokens", (None, SCALES), ArgumentError, r"\[0\]: got None; allowed: an array: NumPy, DLPack"),
    "list": bad("tokens", (ROWS.tolist(), SCALES), ArgumentError, r"\[0\]: got 'builtins.list'; allowed: an ar"),
    "one payload": bad("tokens", ROWS, ArgumentError, r": got '1 arrays'; allowed: one array per payload: 2"),
    "no payload": bad("tokens", (), ArgumentError, r": got '0 arrays'; allowed: one array per payload: 2"),
    "objects": bad("tokens", (ROWS.astype(object), SCALES), DTypeError, r"\[0\]: got 'object'; allowed: any ele"),
    "swapped": bad("tokens", (ROWS.view(">u4"), SCALES), DTypeError, r"\[0\]: got '>u4'; allowed: .*native byte"),
    "short rows": bad(
        "tokens",
        (ROWS[:, :60].copy(), SCALES),
        ShapeError,
        r"\[0\]: got '\(5, 60\) of 1-byte elements'; allowed: \(tokens <= 16, \.\.\.\) with 64 bytes per token",
    ),
    "long rows": bad("tokens", (ROWS.astype(np.float16), SCALES), ShapeError, r"\[0\]: got .* with 64 bytes per"),
    "no axis": bad("tokens", (np.zeros((), "V64"), SCALES), ShapeError, r"\[0\]: got '\(\) of 64-byte"),
    "flat": bad("tokens", (ROWS.reshape(-1), SCALES), ShapeError, r"\[0\]: got '\(320,\) of 1-byte"),
    "too many": Bad(
        {
            "tokens": (np.zeros((17, 64), np.uint8), np.zeros((17, 16), np.uint8)),
            "expert_ids": np.resize(IDS, (17, 2)),
            "expert_weights": np.resize(WEIGHTS, (17, 2)),
        },
        ShapeError,
        r"tokens\[0\]: got '\(17, 64\).*allowed: \(tokens <= 16",
    ),
    "columns": bad("tokens", (wide(ROWS), SCALES), ShapeError, r"\[0\]: got 'strides \(128, 1\).*axis 0 must step 64"),
    "transposed": bad("tokens", (np.zeros((64, 5), np.uint8).T, SCALES), ShapeError, r"\[0\]: got 'strides \(1, 5\)"),
    "misaligned": bad(
        "tokens", (misaligned(ROWS, 8), SCALES), ShapeError, r"\[0\]: got '0x\w+8'; allowed: an address .* 16 bytes"
    ),
    "second payload": bad("tokens", (ROWS, ROWS), ShapeError, r"\[1\]: got .*with 16 bytes per token"),
    "payloads differ": bad("tokens", (ROWS, SCALES[:4]), ShapeError, r"\[1\]: got \(4, 16\); allowed: 5 tokens"),
    "freed": bad("tokens", (expired(ROWS), SCALES), ExchangeClosed, r"\[0\]: its memory was freed"),
    "other GPU": bad("tokens", (on_gpu(ROWS), SCALES), ArgumentError, r"\[0\]: got 'an array on cuda:3'; allowed: h"),
}
EXPERT_IDS: dict[str, Bad] = {
    "none": bad("expert_ids", None, ArgumentError, r": got None; allowed: an array"),
    "floats": bad("expert_ids", IDS.astype(float), DTypeError, r": got 'float64'; allowed: int32 or int64"),
    "unsigned": bad("expert_ids", IDS.astype(np.uint32), DTypeError, r": got 'uint32'"),
    "swapped": bad("expert_ids", IDS.astype(">i4"), DTypeError, r": got '>i4'"),
    "top_k": bad("expert_ids", IDS[:, :1].copy(), ShapeError, r": got \(5, 1\); allowed: \(tokens <= 16, 2\)"),
    "flat": bad("expert_ids", IDS.reshape(-1), ShapeError, r": got \(10,\); allowed: \(tokens <= 16, 2\)"),
    "too few": bad("expert_ids", IDS[:4], ShapeError, r": got \(4, 2\); allowed: 5 tokens"),
    "columns": bad("expert_ids", wide(IDS), ShapeError, r": got 'strides \(16, 4\).*axis 0 must step 8 bytes"),
    "misaligned": bad("expert_ids", misaligned(IDS, 2), ShapeError, r": got '0x\w+2'; .*multiple of 4 bytes"),
    "too large": bad("expert_ids", ids(8), ArgumentError, r"\[3, 0\]: got 8; allowed: 0 to 7, or -1 for none"),
    "negative": bad("expert_ids", ids(0, -2), ArgumentError, r"\[3, 1\]: got -2; allowed: 0 to 7"),
    "beyond 32 bits": bad("expert_ids", ids(1 << 32, dtype=np.int64), ArgumentError, r"\[3, 0\]: got 4294967296"),
    "twice": bad("expert_ids", ids(4, 4), ArgumentError, r"\[3\]: got \[4, 4\]; allowed: distinct experts"),
    "freed": bad("expert_ids", expired(IDS), ExchangeClosed, r": its memory was freed"),
    "other GPU": bad("expert_ids", on_gpu(IDS), ArgumentError, r": got 'an array on cuda:3'; allowed: host mem"),
}
EXPERT_WEIGHTS: dict[str, Bad] = {
    "none": bad("expert_weights", None, ArgumentError, r": got None; allowed: an array"),
    "doubles": bad("expert_weights", WEIGHTS.astype(float), DTypeError, r": got 'float64'; allowed: float32"),
    "bf16": bad("expert_weights", WEIGHTS.astype(ml_dtypes.bfloat16), DTypeError, r": got 'bfloat16'"),
    "top_k": bad("expert_weights", np.ones((5, 3), np.float32), ShapeError, r": got \(5, 3\); allowed"),
    "too many": bad("expert_weights", np.ones((6, 2), np.float32), ShapeError, r": got \(6, 2\); allowed: 5 "),
    "reversed": bad("expert_weights", WEIGHTS[::-1], ShapeError, r": got 'strides \(-8, 4\)"),
    "broadcast": bad("expert_weights", np.broadcast_to(WEIGHTS[0], (5, 2)), ShapeError, r": got 'strides \(0, 4"),
    "misaligned": bad("expert_weights", misaligned(WEIGHTS, 2), ShapeError, r": got '0x\w+2'; .*4 bytes"),
    "freed": bad("expert_weights", expired(WEIGHTS), ExchangeClosed, r": its memory was freed"),
}
NUM_TOKENS: dict[str, Bad] = {
    "negative": bad("num_tokens", -1, ArgumentError, r": got -1; allowed: 0 to 5"),
    "too many": bad("num_tokens", 6, ArgumentError, r": got 6; allowed: 0 to 5"),
    "bool": bad("num_tokens", True, ArgumentError, r": got True; allowed: 0 to 5"),
    "float": bad("num_tokens", 5.0, ArgumentError, r": got .*float'?; allowed: "),
    "text": bad("num_tokens", "5", ArgumentError, r": got .*; allowed: "),
    "two counts": bad("num_tokens", np.zeros(2, np.int32), ShapeError, r": got \(2,\); allowed: \(1,\)"),
    "64 bits": bad("num_tokens", np.zeros(1, np.int64), DTypeError, r": got 'int64'; allowed: int32 or uint32"),
    "freed": bad("num_tokens", expired(np.zeros(1, np.int32)), ExchangeClosed, r": its memory was freed"),
}
LANE: dict[str, Bad] = {
    repr(lane): bad("lane", lane, ArgumentError, rf": got {lane!r}; allowed: 0 to 3")
    for lane in (-1, 4, True, "0", None, 0.0)
}
STREAM: dict[str, Bad] = {
    "text": bad("stream", "default", ArgumentError, r": got 'default'; allowed: None, a stream"),
    "object": bad("stream", object(), ArgumentError, r": got <object"),
    "negative": bad("stream", -1, ArgumentError, r": got -1"),
    "bool": bad("stream", True, ArgumentError, r": got True"),
}
PARTIAL, OUT = good_partial(), np.zeros((5, 16), np.float32)
FROZEN = OUT.copy()
FROZEN.flags.writeable = False
PARTIAL_ROWS: dict[str, Bad] = {
    "none": bad("partial_rows", None, ArgumentError, r": got None; allowed: an array"),
    "bf16": bad("partial_rows", PARTIAL.astype(ml_dtypes.bfloat16), DTypeError, r": got 'bfloat16'; allowed: float32"),
    "one rank": bad("partial_rows", PARTIAL[0], ShapeError, r": got \(16, 16\); allowed: \(2, 16, 16\)"),
    "short": bad("partial_rows", PARTIAL[..., :8].copy(), ShapeError, r": got \(2, 16, 8\); allowed: \(2, 16, 16\)"),
    "columns": bad("partial_rows", wide(PARTIAL), ShapeError, r": got 'strides .*axis 1 must step 64 bytes"),
    "misaligned": bad("partial_rows", misaligned(PARTIAL, 4), ShapeError, r": got '0x\w+4'; .*16 bytes"),
    "freed": bad("partial_rows", expired(PARTIAL), ExchangeClosed, r": its memory was freed"),
    "other GPU": bad("partial_rows", on_gpu(PARTIAL), ArgumentError, r": got 'an array on cuda:3'"),
}
OUTPUT: dict[str, Bad] = {
    "list": bad("out", [], ArgumentError, r": got 'builtins.list'; allowed: an array"),
    "doubles": bad("out", OUT.astype(float), DTypeError, r": got 'float64'; allowed: float32"),
    "elements": bad("out", np.zeros((5, 15), np.float32), ShapeError, r": got \(5, 15\); allowed: \(tokens, 16\)"),
    "too few rows": bad("out", OUT[:4], ShapeError, r": got \(4, 16\); allowed: at least 5 rows"),
    "columns": bad("out", wide(OUT), ShapeError, r": got 'strides \(128, 4\).*axis 0 must step 64"),
    "misaligned": bad("out", misaligned(OUT, 4), ShapeError, r": got '0x\w+4'; .*16 bytes"),
    "read-only": bad("out", FROZEN, ArgumentError, r": got 'a read-only array'; allowed: a writable array"),
    "freed": bad("out", expired(OUT), ExchangeClosed, r": its memory was freed"),
}
NOT_ITS_ARRIVALS = r": got .*; allowed: what dispatch of this exchange returned"
FOREIGN = r": got .*; allowed: what dispatch of this exchange returned"
ARRIVALS: dict[str, Bad] = {
    "none": bad("arrivals", None, ArgumentError, NOT_ITS_ARRIVALS),
    "rows": bad("arrivals", ROWS, ArgumentError, NOT_ITS_ARRIVALS),
    "of another exchange": bad("arrivals", "another exchange's", ArgumentError, NOT_ITS_ARRIVALS),
}
