"""How a receiver knows that data has arrived."""

from nvep.protocols.base import ArrivalProtocol
from nvep.protocols.fence import FENCE

PROTOCOLS: dict[str, ArrivalProtocol] = {FENCE.name: FENCE}

__all__ = ["PROTOCOLS", "ArrivalProtocol"]
