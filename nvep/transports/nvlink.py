"""Host half of the peer load/store transport."""

from __future__ import annotations

from nvep.transports.base import Transport


class NvlinkTransport(Transport):
    """Fence pushes into rank-major buffers and pulls exposed partial rows; Sentinel pushes both ways into wires."""

    name = "nvlink"

    def header(self, protocol: str) -> str:
        return f"transports/nvlink_{protocol}.cuh"

    def cpp_template(self, protocol: str) -> str:
        return {"fence": "NvlinkFence", "sentinel": "NvlinkSentinel"}[protocol]


NVLINK = NvlinkTransport()
