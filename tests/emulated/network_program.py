"""Ranks that are processes exchange over every network transport; every row and sum is compared with the reference."""

from __future__ import annotations

import sys

from mpi4py import MPI

from nvep.config import NETWORK_TRANSPORTS
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.testing.backend import Backend
from nvep.testing.steps import random_step


def main(domain_size: int) -> None:
    with RankGroup.from_mpi(MPI.COMM_WORLD, device="emulated") as group:
        for transport in NETWORK_TRANSPORTS:
            backend = Backend()
            backend.transport = transport
            config = backend.config(num_experts=16, top_k=4, max_tokens=40, row_bytes=512, domain_size=domain_size)
            with Exchange(group, config) as exchange:
                for index in range(4):
                    step = random_step((index,), config, group.size)
                    backend.verified_step(exchange, step, f"{transport}, step {index}", split=index % 2 == 1)
                assert exchange.network is not None
                messages = exchange.network.statistics().messages
            if group.rank == 0:
                print(transport, messages > 0, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
