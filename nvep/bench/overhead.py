"""What a step costs the host: CPU time of eager dispatch and combine, called from Python."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from nvep.bench.cases import Case
from nvep.bench.inputs import Inputs
from nvep.exchange import Exchange
from nvep.group import RankGroup

_STEPS = 100  # a batch: two launches each, well below what the driver queues before a launch waits
_BATCHES = 12


@dataclass(frozen=True)
class HostOverhead:
    """Microseconds of the host a step, the rank with most.

    Attributes
    ----------
    cpu_us : float
        CPU time of the calling thread for dispatch + combine: the median over batches of the mean over a batch.
    dispatch_us, combine_us : float
        Elapsed time of one call: medians over all calls. With ranks that are threads of one process it holds waits for
        Python's lock.
    """

    case: Case
    protocol: str
    cpu_us: float
    dispatch_us: float
    combine_us: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def host_overhead(group: RankGroup, case: Case) -> HostOverhead:
    """Measure eager steps on device arrays. Collective; the same result on every rank.

    Every batch is enqueued on an idle stream and waited for outside the measurement.
    """
    inputs = group.together(lambda: Inputs(group, case))
    cpu, dispatch, combine = [], [], []
    try:
        with Exchange(group, case.config()) as exchange:
            stream = exchange.device.create_stream()
            for _ in range(_BATCHES + 1):
                group.barrier()
                begin = time.thread_time()
                calls = [_step(exchange, inputs, i, stream) for i in range(_STEPS)]
                cpu.append((time.thread_time() - begin) / _STEPS)
                dispatch += [d for d, _ in calls]
                combine += [c for _, c in calls]
                exchange.synchronize(stream)
            protocol = exchange.protocol
            group.barrier()
    finally:
        inputs.close()
    mine = (statistics.median(cpu[1:]), statistics.median(dispatch[_STEPS:]), statistics.median(combine[_STEPS:]))
    worst = max(group.allgather(mine))
    return HostOverhead(case, protocol, *(seconds * 1e6 for seconds in worst))


def _step(exchange: Exchange, inputs: Inputs, index: int, stream: Any) -> tuple[float, float]:
    start = time.perf_counter()
    arrivals = exchange.dispatch(*inputs[index], stream=stream)
    middle = time.perf_counter()
    exchange.combine(arrivals.partial_rows, arrivals, stream=stream)
    return middle - start, time.perf_counter() - middle
