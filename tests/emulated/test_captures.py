"""What a lane remembers of captures: nothing of those that failed, and inputs only as long as a graph needs them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nvep.config import ExchangeConfig
from nvep.errors import StepOrderError
from nvep.exchange import Arrivals, Exchange
from nvep.exchange.lane import _LONGEST
from nvep.group import RankGroup, run_local
from nvep.runtime.device import LaunchShape
from nvep.runtime.emulated import EmulatedDevice

CONFIG = ExchangeConfig(num_experts=4, top_k=2, max_tokens=4, row_bytes=64, deadline=20.0)


def _inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.arange(3 * 64, dtype=np.uint8).reshape(3, 64)
    return rows, np.array([[0, 2], [1, 3], [3, 0]], np.int32), np.ones((3, 2), np.float32)


def _alone(function: Callable[[Exchange], Any], config: ExchangeConfig = CONFIG) -> Any:
    def main(group: RankGroup) -> Any:
        with Exchange(group, config) as exchange:
            return function(exchange)

    return run_local(main, 1, device="emulated", timeout=60)[0]


def _check_a_step(exchange: Exchange) -> None:
    arrivals = exchange.dispatch(*_inputs())
    arrivals.partial_rows.numpy()
    exchange.combine(arrivals.partial_rows, arrivals)
    exchange.synchronize()
    assert arrivals.counts.numpy().tolist() == [3]
    assert (arrivals.rows.numpy()[0, :3] == _inputs()[0]).all()


def _capture_and_fail(exchange: Exchange, phase: Callable[..., Any], before: Arrivals | None = None) -> None:
    with exchange.device.capture(exchange.device.default_stream):
        if before is not None:
            exchange.combine(before.partial_rows, before)
        phase(*_inputs(), num_tokens=2)
        raise ValueError("an expert failed")


@pytest.mark.parametrize("split", [False, True])
def test_a_failed_capture_returns_the_lane(split: bool) -> None:
    def main(exchange: Exchange) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="expert"):
                _capture_and_fail(exchange, exchange.dispatch_send if split else exchange.dispatch)
            _check_a_step(exchange)

    _alone(main)


def test_a_capture_that_fails_later_returns_to_the_step_that_was_under_way() -> None:
    def main(exchange: Exchange) -> None:
        arrivals = exchange.dispatch(*_inputs())
        with pytest.raises(ValueError, match="expert"):
            _capture_and_fail(exchange, exchange.dispatch, before=arrivals)
        assert exchange.combine(arrivals.partial_rows, arrivals).shape[0] == 3
        _check_a_step(exchange)

    _alone(main)


def test_capture_of_another_library_is_undone_by_hand() -> None:
    def main(exchange: Exchange) -> None:
        device, stream = exchange.device, exchange.device.default_stream
        graph = device._begin_capture(stream)
        arrivals = exchange.dispatch(*_inputs())
        device._end_capture(stream, graph, keep=False)
        with pytest.raises(StepOrderError, match=r"must be 'idle'; .* call Exchange\.undo_capture"):
            exchange.dispatch(*_inputs())
        exchange.undo_capture()
        with pytest.raises(StepOrderError):
            exchange.combine(arrivals.partial_rows, arrivals)
        _check_a_step(exchange)
        exchange.undo_capture()  # there is none any more
        _check_a_step(exchange)

    _alone(main)


def test_what_a_graph_reads_lives_as_long_as_the_graph() -> None:
    def main(exchange: Exchange) -> None:
        stream = exchange.device.default_stream
        inputs = _inputs()
        seen = weakref.ref(inputs[0])
        with exchange.device.capture(stream) as graph:
            exchange.release(exchange.dispatch(*inputs))
        del inputs
        gc.collect()
        assert seen() is not None
        for _ in range(3):
            graph.launch(stream)
        exchange.synchronize()
        graph.close()
        gc.collect()
        assert seen() is None

    _alone(main)


def test_what_another_library_captures_is_held_once() -> None:
    def main(exchange: Exchange) -> None:
        device, stream, inputs = exchange.device, exchange.device.default_stream, _inputs()
        for _ in range(5):
            graph = device._begin_capture(stream)
            exchange.release(exchange.dispatch(*inputs))
            device._end_capture(stream, graph, keep=True)
        assert len(exchange._lanes[0]._captured) == 3

    _alone(main)


def test_eager_steps_let_go_of_their_inputs() -> None:
    def main(exchange: Exchange) -> list[bool]:
        alive = []
        for _ in range(3):
            inputs = _inputs()
            alive.append(weakref.ref(inputs[0]))
            exchange.release(exchange.dispatch(*inputs))
            exchange.drain()
            del inputs
        gc.collect()
        return [seen() is not None for seen in alive]

    assert _alone(main) == [False, False, True]


def _steps(exchange: Exchange, count: int, *inputs: np.ndarray, lane: int = 0) -> None:
    """Steps that end before the next, with these inputs, or with others each time."""
    for _ in range(count):
        exchange.release(exchange.dispatch(*(inputs or _inputs()), lane=lane))
        exchange.drain()


def test_what_is_read_again_is_let_go_once_others_dropped_it() -> None:
    def main(exchange: Exchange) -> None:
        inputs = _inputs()
        seen = weakref.ref(inputs[0])
        _steps(exchange, 5, *inputs)
        _steps(exchange, 3)
        del inputs
        gc.collect()
        assert seen() is not None  # nothing has been asked since
        _steps(exchange, 2)
        gc.collect()
        assert seen() is None

    _alone(main)


def test_what_no_step_reads_any_more_is_let_go_though_nothing_new_comes() -> None:
    def main(exchange: Exchange) -> None:
        inputs, others = _inputs(), _inputs()
        seen = weakref.ref(inputs[0])
        for arrays in (inputs, others, inputs, others):
            _steps(exchange, 1, *arrays)
        del inputs, arrays
        _steps(exchange, 2 * _LONGEST, *others)
        gc.collect()
        assert seen() is None

    _alone(main)


def test_lanes_do_not_keep_for_each_other() -> None:
    def main(exchange: Exchange) -> None:
        inputs = _inputs()
        seen = weakref.ref(inputs[0])
        for _ in range(2):
            for lane in range(2):
                _steps(exchange, 1, *inputs, lane=lane)
        del inputs
        for lane in range(2):
            _steps(exchange, _LONGEST + 2, lane=lane)
        gc.collect()
        assert seen() is None

    _alone(main, ExchangeConfig(**{**vars(CONFIG), "lanes": 2}))


def test_only_phases_directly_behind_one_another_are_dependent(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[bool] = []
    launch = EmulatedDevice.launch

    def record(self: EmulatedDevice, kernel: Any, shape: LaunchShape, *rest: Any) -> None:
        launched.append(shape.dependent)
        launch(self, kernel, shape, *rest)

    def took(steps: Callable[[], None]) -> list[bool]:
        launched.clear()
        steps()
        return list(launched)

    def main(exchange: Exchange) -> None:
        other = exchange.device.create_stream()

        def step(dispatch: Any = None, combine: Any = None) -> None:
            arrivals = exchange.dispatch(*_inputs(), stream=dispatch)
            exchange.combine(arrivals.partial_rows, arrivals, stream=combine)

        def split() -> None:
            exchange.dispatch_send(*_inputs())
            arrivals = exchange.dispatch_recv()
            exchange.combine_send(arrivals.partial_rows, arrivals)
            exchange.combine_recv(arrivals)

        def captured() -> None:
            with exchange.device.capture(exchange.device.default_stream) as graph:
                step()
            graph.close()

        assert took(step) == [False, True]
        assert took(split) == [True] * 4
        assert took(lambda: step(combine=other)) == [True, False]
        assert took(step) == [False, True]
        assert took(captured) == [False, True]
        assert took(captured) == [False, True]
        assert took(step) == [False, True]
        exchange.set_mask([False])
        assert took(step) == [False, True]

    monkeypatch.setattr(EmulatedDevice, "launch", record)
    _alone(main, ExchangeConfig(**{**vars(CONFIG), "dependent_launch": True}))
    launched.clear()
    _alone(_check_a_step)
    assert launched == [False, False]
