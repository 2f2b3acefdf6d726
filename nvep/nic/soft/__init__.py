"""The soft NIC: an emulated adapter between ranks of one host."""

from nvep.nic.soft.model import LABEL, SoftNicModel
from nvep.nic.soft.nic import SoftNic

__all__ = ["LABEL", "SoftNic", "SoftNicModel"]
