"""What every transport and protocol must do: tests of a backend inherit `ExchangeConformance` and name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvep import errors
from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import partial_dtype
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.testing.backend import Backend
from nvep.testing.steps import (
    Step,
    arrivals_of,
    check_arrivals,
    device_copy,
    fill_unused,
    output_of,
    poison_receive_buffers,
    random_step,
    same,
)

SHAPES = [
    # ranks, experts, top_k, max_tokens, row bytes, further payloads
    pytest.param((1, 4, 2, 8, 64, ()), id="one-rank"),
    pytest.param((2, 8, 2, 16, 256, ()), id="two-ranks"),
    pytest.param((3, 10, 3, 33, 48, ()), id="experts-not-divisible"),
    pytest.param((4, 32, 4, 70, 512, (16, 32)), id="three-payloads"),
    pytest.param((8, 5, 1, 9, 16, ()), id="more-ranks-than-experts"),
    pytest.param((8, 256, 8, 40, 1024, ()), id="eight-ranks"),
    pytest.param((5, 64, 20, 12, 160, ()), id="top-20"),
]


class ExchangeConformance(Backend):
    """Results of every transport and protocol, bit for bit: inherit this and set the backend."""

    # --- data -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_matches_reference(self, shape: tuple[Any, ...], split: bool) -> None:
        ranks, experts, top_k, max_tokens, row_bytes, extra = shape
        config = self.config(
            num_experts=experts,
            top_k=top_k,
            max_tokens=max_tokens,
            row_bytes=row_bytes,
            extra_payload_bytes=extra,
        )

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(4):
                    poison_receive_buffers(exchange)
                    step = random_step((ranks, experts, index), config, ranks)
                    self.verified_step(exchange, step, f"rank {group.rank}, step {index}", split=split)

        self.run(main, ranks)

    @pytest.mark.parametrize("partial_format", ["bf16", "fp16", "fp32"])
    def test_partial_formats(self, partial_format: str) -> None:
        config = self.config(partial_format=partial_format, partial_elements=24, num_experts=12, top_k=6)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                poison_receive_buffers(exchange)
                for index in range(3):
                    self.verified_step(exchange, random_step((7, index), config, group.size), partial_format)

        self.run(main, 4)

    @pytest.mark.parametrize("partial_format", ["bf16", "fp32"])
    def test_payloads_made_of_sentinel_words(self, partial_format: str) -> None:
        """Any bytes go through, those that mark empty memory above all: everywhere, in places, and next to keys."""
        config = self.config(
            row_bytes=4176, partial_format=partial_format, partial_elements=2088 if partial_format == "bf16" else 1044
        )
        words = np.array([0x8080808080808080, 0x8080808080808081, 0x7FFFFFFFFFFFFFFF, 0, 0x80808080], dtype=np.uint64)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(3):
                    step = random_step((67, index), config, group.size, counts=[config.max_tokens] * group.size)
                    rng = np.random.default_rng((67, index))
                    for rows in [source.payloads[0] for source in step.sources] + step.partial_rows:
                        bits = rows.view(np.uint64)
                        chosen = words[rng.integers(0, len(words) if index else 1, bits.shape)]
                        bits[...] = np.where(rng.random(bits.shape) < (1.0, 1.0, 0.1)[index], chosen, bits)
                    for rows in step.partial_rows:
                        rows[np.isnan(rows)] = 0
                    poison_receive_buffers(exchange)
                    self.verified_step(exchange, step, f"step {index}")

        self.run(main, 3)

    def test_many_ranks(self) -> None:
        ranks = self.wide_ranks
        config = self.config(num_experts=2 * ranks, top_k=8, max_tokens=5, row_bytes=32)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(2):
                    self.verified_step(exchange, random_step((64, index), config, ranks), f"rank {group.rank}")

        self.run(main, ranks)

    def test_extreme_counts(self) -> None:
        config = self.config()
        full = config.max_tokens
        cases = [[full] * 4, [0] * 4, [full, 0, 0, 0], [0, 1, full, 0], [1, 1, 1, 1]]

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index, counts in enumerate(cases):
                    step = random_step((3, index), config, group.size, counts=counts)
                    self.verified_step(exchange, step, f"counts {counts}")

        self.run(main, 4)

    def test_placement(self) -> None:
        placement = (3, 0, 1, 0, 3, 3, 0, 1)  # rank 2 owns nothing
        config = self.config(placement=placement)

        def main(group: RankGroup) -> np.ndarray:
            with Exchange(group, config) as exchange:
                step = random_step((11,), config, group.size)
                self.verified_step(exchange, step, "placement")
                return arrivals_of(step, config, group.rank, protocol=exchange.protocol).valid

        assert self.run(main, 4)[2].sum() == 0

    @pytest.mark.parametrize("top_k", [2, 40])
    def test_invalid_ids_on_the_device_are_counted(self, top_k: int) -> None:
        """Among few ids, and among more than a warp has lanes."""
        config = self.config(invalid_expert=-7, num_experts=4 * top_k, top_k=top_k)
        ids = np.array([[0, 8], [-1, 3], [5, 5], [-7, 2], [-3, 1 << 20]], dtype=np.int64)
        if top_k > 2:  # the given ones in the first and the last place
            ids = np.hstack([ids[:, :1], np.tile(np.arange(60, 58 + top_k), (len(ids), 1)), ids[:, 1:]])
            ids[0, -1] = config.num_experts

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                step = random_step((13,), config, group.size, counts=[len(ids)] * group.size)
                for source in step.sources:
                    source.expert_ids[:] = ids
                source = step.sources[group.rank]
                memory = device_copy(exchange, ids)
                view = DeviceArray(memory.address, ids.shape, ids.dtype, owner=ArrayOwner(exchange.device))
                group.barrier()
                arrivals = exchange.dispatch(source.payloads[0], view, source.expert_weights)
                check_arrivals(
                    arrivals, arrivals_of(step, config, group.rank, protocol=exchange.protocol), "invalid ids"
                )
                output = self.finish(exchange, arrivals, step)
                exchange.synchronize()
                same(output.numpy(), output_of(step, config, group.rank), "output")
                assert exchange.statistics().invalid_ids == 4  # 8 or 160, the second 5, -3, 2^20; -1 and -7 mean none
                memory.free()

        self.run(main, 2)

    def test_same_bits_every_time(self) -> None:
        config = self.config(num_experts=64, top_k=8, max_tokens=32, row_bytes=128)

        def main(group: RankGroup) -> bytes:
            with Exchange(group, config) as exchange:
                step = random_step((17,), config, group.size)
                outputs = {self.verified_step(exchange, step, f"repeat {i}").tobytes() for i in range(5)}
                assert len(outputs) == 1
                return outputs.pop()

        assert self.run(main, 4) == self.run(main, 4)

    # --- steps ------------------------------------------------------------------------------------------------------

    def test_steps_without_host_synchronisation(self) -> None:
        """Fast ranks run ahead as far as the protocol lets them; nothing may be overwritten too early."""
        config = self.config(num_experts=16, top_k=4, max_tokens=12)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                steps = [random_step((19, i), config, group.size) for i in range(40)]
                blank = np.zeros((config.max_tokens, config.elements), dtype=np.float32)
                buffers = [device_copy(exchange, blank) for _ in steps]
                group.barrier()  # an allocation may wait for kernels that wait for this rank
                outputs = []
                for step, keep in zip(steps, buffers, strict=True):
                    source = step.sources[group.rank]
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    owner = ArrayOwner(exchange.device, keepalive=keep)
                    dtype = step.partial_rows[0].dtype
                    out = DeviceArray(keep.address, (config.max_tokens, config.elements), dtype, owner=owner)
                    outputs.append((self.finish(exchange, arrivals, step, out=out), keep))
                exchange.synchronize()
                for index, (output, keep) in enumerate(outputs):
                    same(output.numpy(), output_of(steps[index], config, group.rank), f"step {index}")
                    keep.free()

        self.run(main, 4)

    def test_epoch_wraps(self) -> None:
        config = self.config(first_epoch=(1 << 32) - 3)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(8):
                    poison_receive_buffers(exchange)
                    self.verified_step(exchange, random_step((23, index), config, group.size), f"step {index}")

        self.run(main, 3)

    def test_two_lanes(self) -> None:
        config = self.config(lanes=2)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                streams = [exchange.device.create_stream() for _ in range(2)]
                poison_receive_buffers(exchange)
                for index in range(6):
                    steps = [random_step((29, index, lane), config, group.size) for lane in range(2)]
                    self._interleave(exchange, steps, streams)

        self.run(main, 3)

    def _interleave(self, exchange: Exchange, steps: list[Step], streams: list[Any]) -> None:
        """Both lanes in flight at once; phases of a lane alternate between two streams, so events must order them."""
        rank, config = exchange.group.rank, exchange.config
        for lane, step in enumerate(steps):
            source = step.sources[rank]
            inputs = (source.payloads[0], source.expert_ids, source.expert_weights)
            exchange.dispatch_send(*inputs, lane=lane, stream=streams[lane])
        arrivals = [exchange.dispatch_recv(lane=lane, stream=streams[1 - lane]) for lane in range(2)]
        outputs = []
        for lane, step in enumerate(steps):
            expected = arrivals_of(step, config, rank, protocol=exchange.protocol)
            check_arrivals(arrivals[lane], expected, f"lane {lane}")
            exchange.combine_send(
                fill_unused(step, expected, rank, protocol=exchange.protocol), arrivals[lane], stream=streams[lane]
            )
        for lane in (1, 0):
            outputs.append((lane, exchange.combine_recv(arrivals[lane], stream=streams[1 - lane])))
        for lane, output in outputs:
            same(output.numpy(), output_of(steps[lane], config, rank), f"lane {lane}: output")
        for stream in streams:
            exchange.synchronize(stream)

    def test_release_ends_a_step(self) -> None:
        config = self.config()

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(6):
                    step = random_step((31, index), config, group.size)
                    source = step.sources[group.rank]
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    check_arrivals(
                        arrivals, arrivals_of(step, config, group.rank, protocol=exchange.protocol), f"step {index}"
                    )
                    exchange.release(arrivals)
                self.verified_step(exchange, random_step((31, 99), config, group.size), "after release")

        self.run(main, 3)

    def test_in_place_partial_rows(self) -> None:
        config = self.config()

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                for index in range(3):
                    step = random_step((37, index), config, group.size)
                    source, rank = step.sources[group.rank], group.rank
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    expected = arrivals_of(step, config, rank, protocol=exchange.protocol)
                    rows = fill_unused(step, expected, rank, protocol=exchange.protocol)
                    device = exchange.device
                    device.copy_in(arrivals.partial_rows.address, rows, device.default_stream)
                    output = exchange.combine(arrivals.partial_rows, arrivals)
                    exchange.synchronize()
                    same(output.numpy(), output_of(step, config, rank), f"step {index}")

        self.run(main, 4)

    def test_masked_rank_is_left_out(self) -> None:
        config = self.config(num_experts=16, top_k=4)

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                self.verified_step(exchange, random_step((41, 0), config, group.size), "before")
                if group.rank == 2:
                    return
                exchange.set_mask([r == 2 for r in range(group.size)])
                for index in range(1, 4):
                    step = random_step((41, index), config, group.size)
                    source = step.sources[group.rank]
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    expected = arrivals_of(step, config, group.rank, masked=(2,), protocol=exchange.protocol)
                    check_arrivals(arrivals, expected, f"masked step {index}")
                    output = exchange.combine(
                        fill_unused(step, expected, group.rank, protocol=exchange.protocol), arrivals
                    )
                    exchange.synchronize()
                    same(output.numpy(), output_of(step, config, group.rank, masked=(2,)), f"masked step {index}")
                assert exchange.statistics().dropped_tokens > 0
                with pytest.raises(errors.ArgumentError, match="masked"):
                    exchange.set_mask([False] * group.size)

        self.run(main, 4)

    # --- graphs -----------------------------------------------------------------------------------------------------

    def test_graph_replays_with_new_inputs_and_counts(self) -> None:
        config = self.config(num_experts=16, top_k=4)
        ranks = 3

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                inputs = _GraphInputs(exchange)
                stream, rank = exchange.device.create_stream(), group.rank
                with exchange.device.capture(stream) as graph:
                    arrivals = exchange.dispatch(*inputs.tokens, num_tokens=inputs.count, stream=stream)
                    output = exchange.combine(inputs.partial, arrivals, stream=stream)
                for index in range(6):
                    step = random_step((43, index), config, ranks)
                    expected = arrivals_of(step, config, rank, protocol=exchange.protocol)
                    count = inputs.write(step, fill_unused(step, expected, rank, protocol=exchange.protocol), stream)
                    graph.launch(stream)
                    exchange.synchronize(stream)
                    check_arrivals(arrivals, expected, f"replay {index}")
                    same(output.numpy()[:count], output_of(step, config, rank), f"replay {index}: output")
                    group.barrier()  # the graph combined: peers that replay would overwrite these arrivals
                graph.close()
                inputs.free()

        self.run(main, ranks)


class _GraphInputs:
    """Device arrays of fixed addresses, long enough for any step, whose contents change between replays."""

    def __init__(self, exchange: Exchange) -> None:
        config, self._device = exchange.config, exchange.device
        most, ranks = config.max_tokens, exchange.group.size
        self._owner = ArrayOwner(exchange.device)
        self._memory: list[Any] = []
        self._rank = exchange.group.rank
        self.tokens = (
            self._array((most, config.row_bytes), np.uint8),
            self._array((most, config.top_k), np.int32),
            self._array((most, config.top_k), np.float32),
        )
        self.count = self._array((1,), np.int32)
        self.partial = self._array((ranks, most, config.elements), partial_dtype(config.partial_format))

    def _array(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        memory = self._device.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._memory.append(memory)
        return DeviceArray(memory.address, shape, dtype, owner=self._owner)

    def write(self, step: Step, partial_rows: np.ndarray, stream: Any) -> int:
        """Write a step's inputs in stream order; returns its number of tokens."""
        source = step.sources[self._rank]
        count = len(source.expert_ids)
        arrays = (*self.tokens, self.count, self.partial)
        values: tuple[np.ndarray, ...] = (
            source.payloads[0],
            source.expert_ids,
            source.expert_weights,
            np.array([count], np.int32),
            partial_rows,
        )
        for array, value in zip(arrays, values, strict=True):
            self._device.copy_in(array.address, value, stream)
        return count

    def free(self) -> None:
        for memory in self._memory:
            memory.free()
