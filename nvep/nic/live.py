"""Rings of a running process: it answers on a socket that only its user can reach, while its kernels go on."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from nvep.errors import ArgumentError, NvepError
from nvep.nic.dump import RingDump, read_dumps

_PEER_CREDENTIALS = struct.Struct("3i")
_TIMEOUT_S = 10.0
_LOG = logging.getLogger("nvep.nic")


def _name(pid: int) -> str:
    return f"\0nvep-rings-{os.getuid()}-{pid}"  # abstract: it goes with the process


class LiveRings:
    """Answers every connection with what ``dump`` returns, from a thread of its own, until ``close``."""

    def __init__(self, dump: Callable[[], Iterable[RingDump]]) -> None:
        self._dump = dump
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_name(os.getpid()))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ArgumentError("live", True, f"once per process, on Linux ({error.strerror})") from error
        self._thread = threading.Thread(target=self._serve, name="nvep-live-rings", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        if _PEER_CREDENTIALS.unpack(raw)[1] != os.getuid():
            return
        text = io.BytesIO()
        try:
            for dump in self._dump():
                dump.write(text)
        except NvepError as error:
            _LOG.warning("rings could not be shown: %s", error)
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.sendall(text.getvalue())
        except OSError:
            return  # the one who asked has gone

    def close(self) -> None:
        """Stop answering. Idempotent."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_TIMEOUT_S)


def processes() -> list[int]:
    """Processes of this user that answer."""
    pattern = re.compile(rf"@nvep-rings-{os.getuid()}-(\d+)$", re.MULTILINE)
    try:
        return sorted({int(pid) for pid in pattern.findall(Path("/proc/net/unix").read_text())})
    except OSError:
        return []


def ask(pid: int) -> list[RingDump]:
    """Rings of process ``pid``.

    Raises
    ------
    ArgumentError
        It does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(_name(pid))
            text = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError as error:
            known = ", ".join(map(str, processes())) or "none now"
            raise ArgumentError("--live", pid, f"a process that answers ({error.strerror}): {known}") from error
    return list(read_dumps(io.BytesIO(text), f"process {pid}"))
