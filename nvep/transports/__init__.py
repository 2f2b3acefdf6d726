"""How bytes move."""

from nvep.transports.base import Transport
from nvep.transports.free_flow import FREE_FLOW
from nvep.transports.gdaki import GDAKI
from nvep.transports.gpi import GPI
from nvep.transports.gpi_mc import GPI_MC
from nvep.transports.nvlink import NVLINK

TRANSPORTS: dict[str, Transport] = {t.name: t for t in (NVLINK, GDAKI, GPI, GPI_MC, FREE_FLOW)}

__all__ = ["TRANSPORTS", "Transport"]
