"""How bytes move."""

from nvep.transports.base import Transport
from nvep.transports.nvlink import NVLINK

TRANSPORTS: dict[str, Transport] = {NVLINK.name: NVLINK}

__all__ = ["TRANSPORTS", "Transport"]
