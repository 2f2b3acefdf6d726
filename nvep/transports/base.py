"""What the host knows of a transport; the device half is ``nvep_kernels/transports/<name>*.cuh``."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Transport(ABC):
    """How bytes move.

    Attributes
    ----------
    name : str
        As in ``ExchangeConfig.transport``.
    """

    name: str

    @abstractmethod
    def header(self, protocol: str) -> str:
        """Header of the device half for a protocol."""

    @abstractmethod
    def cpp_template(self, protocol: str) -> str:
        """C++ class template in namespace ``nvep`` over the format of partial rows."""

    def prelude(self) -> str:
        """C++ that its header needs in front."""
        return ""
