"""Network adapters: who executes send queues and descriptor rings."""

from nvep.nic.base import Nic, NicStatistics, RingSpec

__all__ = ["Nic", "NicStatistics", "RingSpec"]
