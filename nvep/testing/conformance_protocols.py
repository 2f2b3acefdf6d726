"""Changing the protocol from step to step: tests of a transport with both protocols inherit `ProtocolConformance`."""

from __future__ import annotations

import numpy as np
import pytest

from nvep import errors
from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import PROTOCOLS
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.testing.backend import Backend
from nvep.testing.steps import device_copy, output_of, poison_receive_buffers, random_step, same


class ProtocolConformance(Backend):
    """Both protocols of a transport in one exchange: inherit this and set the backend, with ``protocol = "auto"``."""

    protocol = "auto"

    def test_both_protocols_give_the_same_bits(self) -> None:
        config = self.config(num_experts=16, top_k=4, max_tokens=24, row_bytes=2200 * 2, partial_elements=2200)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(3):
                    step = random_step((71, index), config, group.size)
                    outputs = set()
                    for protocol in (*PROTOCOLS, *PROTOCOLS[::-1]):
                        exchange.protocol = protocol
                        poison_receive_buffers(exchange)
                        outputs.add(self.verified_step(exchange, step, f"{protocol}, step {index}").tobytes())
                    assert len(outputs) == 1

        self.run(main, 4)

    def test_the_protocol_changes_between_steps(self) -> None:
        """No host synchronisation: a fast peer's step in one protocol meets a slow one's step in the other."""
        config = self.config(num_experts=16, top_k=4, max_tokens=12)
        order = np.random.default_rng(73).integers(0, 2, 40)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                steps = [random_step((73, i), config, group.size) for i in range(len(order))]
                blank = np.zeros((config.max_tokens, config.partial_row_bytes), dtype=np.uint8)
                buffers = [device_copy(exchange, blank) for _ in steps]
                group.barrier()
                outputs = []
                for index, step in enumerate(steps):
                    exchange.protocol = PROTOCOLS[order[index]]
                    source, dtype = step.sources[group.rank], step.partial_rows[0].dtype
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    assert arrivals.protocol == PROTOCOLS[order[index]]
                    if index % 7 == 3:
                        exchange.release(arrivals)
                        continue
                    shape = (config.max_tokens, config.elements)
                    owner = ArrayOwner(exchange.device)
                    out = DeviceArray(buffers[index].address, shape, dtype, owner=owner)
                    outputs.append((index, self.finish(exchange, arrivals, step, out=out)))
                exchange.synchronize()
                for index, output in outputs:
                    same(output.numpy(), output_of(steps[index], config, group.rank), f"step {index}")
                for memory in buffers:
                    memory.free()

        self.run(main, 4)

    def test_ranks_that_disagree_are_told(self) -> None:
        config = self.config()

        def main(group: RankGroup) -> str:
            exchange = Exchange(group, config)
            step = random_step((79,), config, group.size)
            source = step.sources[group.rank]
            exchange.protocol = PROTOCOLS[group.rank % 2]
            exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
            with pytest.raises(errors.ProtocolMismatch) as caught:
                exchange.synchronize()
            group.barrier()
            exchange.close()
            return str(caught.value)

        texts = self.run(main, 2)
        assert ["rank 1 ran step 1" in texts[0], "rank 0 ran step 1" in texts[1]] == [True, True], texts

    def test_only_planned_protocols(self) -> None:
        def main(group: RankGroup) -> None:
            with Exchange(group, self.config(protocol="fence")) as exchange:
                assert exchange.protocol == "fence"
                with pytest.raises(errors.ArgumentError, match="protocol: got 'sentinel'; allowed: fence"):
                    exchange.protocol = "sentinel"

        self.run(main, 2)
