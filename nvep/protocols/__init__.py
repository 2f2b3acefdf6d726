"""How a receiver knows that data has arrived."""

from nvep.protocols.base import ArrivalProtocol
from nvep.protocols.fence import FENCE
from nvep.protocols.sentinel import SENTINEL
from nvep.protocols.signal import SIGNAL

PROTOCOLS: dict[str, ArrivalProtocol] = {p.name: p for p in (FENCE, SENTINEL, SIGNAL)}

__all__ = ["PROTOCOLS", "ArrivalProtocol"]
