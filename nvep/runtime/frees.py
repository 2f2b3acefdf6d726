"""Frees that wait until no kernel of the process can be waiting for a peer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from nvep.errors import DeviceError

Free = Callable[[], object]


class Frees:
    """What devices of one process that exchange with one another may free only when none of them exchanges.

    A driver call that frees memory may wait for every kernel of the GPU and hold off the process's other driver calls
    meanwhile. A peer's kernel may in turn wait for one whose launch is held off. So nobody waits for anybody: frees are
    put off while some exchange is open, and whoever closes the last one runs them, in the order of their arrival.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._put_off: deque[Free] = deque()

    def enter(self) -> None:
        """An exchange opens."""
        with self._lock:
            self._open += 1

    def leave(self) -> None:
        """An exchange has closed; after the last, run what was put off.

        Raises
        ------
        DeviceError
            Some of it failed; all of it was tried.
        """
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self.settle()

    def defer(self, free: Free) -> None:
        """Run ``free`` now if no exchange is open, else later."""
        with self._lock:
            if self._open:
                self._put_off.append(free)
                return
        free()

    def settle(self) -> None:
        """Run what was put off. For moments at which no kernel of these devices waits for a launch to come.

        Raises
        ------
        DeviceError
            Some of it failed; all of it was tried.
        """
        failures: list[Exception] = []
        with suppress(IndexError):  # several threads may settle at once: each free runs in one of them
            while True:
                free = self._put_off.popleft()
                try:
                    free()
                except Exception as error:
                    failures.append(error)
        if failures:
            raise DeviceError(f"freeing after the last exchange closed: {failures[0]}") from failures[0]
