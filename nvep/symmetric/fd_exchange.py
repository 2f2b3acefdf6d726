"""File descriptors between the processes of one host: everybody's to everybody, over abstract AF_UNIX sockets.

Abstract names live in the kernel only: whatever happens to a process, no file is left behind. They are visible to other
users of the host, so each side checks that its peer runs as the same user and knows the group's token.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack

from nvep.errors import GroupError
from nvep.group.base import RankGroup
from nvep.group.placement import collective_timeout, name_ranks

_TOKEN_BYTES = 16
_MESSAGE = struct.Struct(f"={_TOKEN_BYTES}sI")  # token, rank of the sender
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


def exchange_fds(group: RankGroup, fd: int, *, timeout: float | None = None) -> list[int]:
    """Give ``fd`` to every rank and get one from each (collective; all ranks on one host).

    Parameters
    ----------
    group : RankGroup
        Who takes part.
    fd : int
        Stays the caller's.
    timeout : float, optional
        Seconds that the transfer may take.

    Returns
    -------
    list of int
        Descriptors by rank: ``fd`` itself at this rank's place; the others are close-on-exec duplicates that the
        caller closes.

    Raises
    ------
    GroupError
        Some rank could not take part, or did not in time; raised on every rank.
    """
    token: bytes = group.allgather(secrets.token_bytes(_TOKEN_BYTES))[0]
    received: dict[int, int] = {}
    with ExitStack() as sockets:
        exchange = _Exchange(group.rank, group.size, token, sockets)
        try:
            group.together(exchange.listen)
            end = time.monotonic() + (collective_timeout() if timeout is None else timeout)
            group.together(lambda: exchange.run(fd, received, end))
        except BaseException:
            for peer_fd in received.values():
                os.close(peer_fd)
            raise
    received[group.rank] = fd
    return [received[rank] for rank in range(group.size)]


class _Exchange:
    """One rank's part. Sending never waits for a receiver: the kernel queues connections and what was sent on them."""

    def __init__(self, rank: int, size: int, token: bytes, sockets: ExitStack) -> None:
        self._rank, self._size, self._token = rank, size, token
        self._sockets = sockets

    def _name(self, rank: int) -> bytes:
        return b"\0nvep-%s-%d" % (self._token.hex().encode(), rank)

    def listen(self) -> None:
        try:
            self._listener = self._sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(self._name(self._rank))
            self._listener.listen(self._size)
        except OSError as error:
            raise GroupError(f"rank {self._rank} cannot listen for file descriptors: {error}") from error

    def run(self, fd: int, received: dict[int, int], end: float) -> None:
        try:
            for step in range(1, self._size):
                self._send(fd, (self._rank + step) % self._size, end)
            while len(received) < self._size - 1:
                self._listener.settimeout(_left(end))
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_left(end))
                    self._receive(connection, received)
        except TimeoutError:
            missing = set(range(self._size)) - set(received) - {self._rank}
            raise GroupError(f"rank {self._rank} got no file descriptor from {name_ranks(missing)} in time") from None
        except OSError as error:
            raise GroupError(f"rank {self._rank} cannot exchange file descriptors: {error}") from error

    def _send(self, fd: int, rank: int, end: float) -> None:
        # Kept open until all ranks are done: a queued descriptor needs its sender's end.
        peer = self._sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        peer.settimeout(_left(end))
        peer.connect(self._name(rank))
        if _peer_uid(peer) != os.geteuid():
            raise GroupError(f"the socket of rank {rank} belongs to another user")
        socket.send_fds(peer, [_MESSAGE.pack(self._token, self._rank)], [fd])

    def _receive(self, connection: socket.socket, received: dict[int, int]) -> None:
        """Take a descriptor; whoever is not a peer of this group is turned away."""
        if _peer_uid(connection) != os.geteuid():
            return
        data, fds, _, _ = socket.recv_fds(connection, _MESSAGE.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(data) == _MESSAGE.size and len(fds) == 1:
            token, rank = _MESSAGE.unpack(data)
            if token == self._token and rank < self._size and rank != self._rank and rank not in received:
                received[rank] = fds[0]
                return
        for fd in fds:
            os.close(fd)


def _peer_uid(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    return left
