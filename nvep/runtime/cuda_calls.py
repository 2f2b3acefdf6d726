"""Calls into the CUDA driver and cuda.core, each checked, and what may be asked before any GPU is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cuda.bindings import driver

from nvep.config import widen_hardware_queues
from nvep.errors import DeviceError

T = TypeVar("T")

_NO_DEVICE = driver.CUresult.CUDA_ERROR_NO_DEVICE
_STUB_LIBRARY = driver.CUresult.CUDA_ERROR_STUB_LIBRARY


def describe(status: Any) -> str:
    """Name and meaning of a ``CUresult``."""
    code = int(status)
    try:
        known = driver.CUresult(code)
    except ValueError:  # a driver newer than cuda.bindings
        return f"CUDA error {code}"
    found, text = driver.cuGetErrorString(known)
    meaning = text.decode() if int(found) == 0 and text else "no description"
    return f"{known.name} ({code}): {meaning}"


def check(call: str, result: tuple[Any, ...]) -> Any:
    """Return what a driver call gave besides its status.

    Parameters
    ----------
    call : str
        For the error: the function, and what it was asked to do where that helps.
    result : tuple
        As ``cuda.bindings.driver`` returns it.

    Raises
    ------
    DeviceError
        The call failed, or reports an earlier failure of asynchronous work.
    """
    if result[0] != 0:
        raise DeviceError(f"{call} failed: {describe(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def core_call(call: str, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Call into cuda.core; whatever it raises becomes a DeviceError that names ``call``."""
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        raise DeviceError(f"{call} failed: {error}") from error


def count_devices() -> tuple[int, str]:
    """Return the number of GPUs and, if there is none, why. Creates no context.

    Raises
    ------
    DeviceError
        There is a driver and it does not work.
    """
    try:
        widen_hardware_queues()
        (status,) = driver.cuInit(0)
    except RuntimeError:  # cuda.bindings found no libcuda
        return 0, "no CUDA driver is installed (libcuda.so.1 not found)"
    if status == _NO_DEVICE:
        return 0, "the CUDA driver finds no GPU (see CUDA_VISIBLE_DEVICES)"
    if status == _STUB_LIBRARY:
        return 0, "libcuda.so.1 is the toolkit's link-time stub, not a driver"
    check("cuInit", (status,))
    count = int(check("cuDeviceGetCount", driver.cuDeviceGetCount()))
    return count, "" if count else "the CUDA driver finds no GPU"
