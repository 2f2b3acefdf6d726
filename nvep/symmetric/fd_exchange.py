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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from nvep.errors import GroupError
from nvep.group.base import RankGroup
from nvep.group.placement import collective_timeout, name_ranks

_TOKEN_BYTES = 16
_MESSAGE = struct.Struct(f"={_TOKEN_BYTES}sI")  # token, rank of the sender
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_FD = struct.Struct("=i")
_SPARE_QUEUE = 128  # connections of strangers that may stand before those of peers


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
    end = time.monotonic() + (collective_timeout() if timeout is None else timeout)
    with ExitStack() as sockets:
        exchange = _Exchange(group, token, end, sockets)
        try:
            group.together(exchange.listen)
            group.together(lambda: exchange.send_all(fd))
            group.together(exchange.receive_all)
        except BaseException:
            for peer_fd in exchange.received.values():
                os.close(peer_fd)
            raise
    return [fd if rank == group.rank else exchange.received[rank] for rank in range(group.size)]


class _Exchange:
    """One rank's part.

    Sending does not wait for receivers: the kernel queues connections and what was sent on them. So all ranks send,
    learn together whether all could, and only then wait for what must be there.
    """

    def __init__(self, group: RankGroup, token: bytes, end: float, sockets: ExitStack) -> None:
        self._rank, self._size = group.rank, group.size
        self._token, self._end = token, end
        self._sockets = sockets
        self.received: dict[int, int] = {}

    def _name(self, rank: int) -> bytes:
        return b"\0nvep-%s-%d" % (self._token.hex().encode(), rank)

    def listen(self) -> None:
        with self._errors("listen for file descriptors"):
            self._listener = self._sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(self._name(self._rank))
            self._listener.listen(self._size + _SPARE_QUEUE)

    def send_all(self, fd: int) -> None:
        with self._errors("send its file descriptor"):
            for step in range(1, self._size):
                self._send(fd, (self._rank + step) % self._size)

    def receive_all(self) -> None:
        with self._errors("receive file descriptors"):
            while len(self.received) < self._size - 1:
                self._listener.settimeout(self._left())
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(self._left())
                    self._receive(connection)

    def _send(self, fd: int, rank: int) -> None:
        # Kept open until all ranks are done: a queued descriptor needs its sender's end.
        peer = self._sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        peer.settimeout(self._left())
        peer.connect(self._name(rank))
        if _peer_uid(peer) != os.geteuid():
            raise GroupError(f"the socket of rank {rank} belongs to another user")
        socket.send_fds(peer, [_MESSAGE.pack(self._token, self._rank)], [fd])

    def _receive(self, connection: socket.socket) -> None:
        """Take a descriptor; whoever is not a peer of this group is turned away."""
        if _peer_uid(connection) != os.geteuid():
            return
        # Not socket.recv_fds: it ignores its flags, so that a fork in another thread would inherit the descriptor.
        room = socket.CMSG_LEN(_FD.size)
        data, ancillary, _, _ = connection.recvmsg(_MESSAGE.size, room, socket.MSG_CMSG_CLOEXEC)
        fds = [_FD.unpack(content)[0] for *_, content in ancillary if len(content) == _FD.size]
        if len(data) == _MESSAGE.size and len(fds) == 1:
            token, rank = _MESSAGE.unpack(data)
            expected = set(range(self._size)) - {self._rank} - set(self.received)
            if token == self._token and rank in expected:
                self.received[rank] = fds[0]
                return
        for fd in fds:
            os.close(fd)

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0.0:
            raise TimeoutError
        return left

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            missing = set(range(self._size)) - set(self.received) - {self._rank}
            raise GroupError(f"rank {self._rank} got no file descriptor from {name_ranks(missing)} in time") from None
        except OSError as error:
            raise GroupError(f"rank {self._rank} cannot {what}: {error}") from error


def _peer_uid(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid
