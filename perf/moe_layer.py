"""A whole MoE layer, part by part and as a graph: ``python perf/moe_layer.py``, or under ``mpirun`` for processes.

Without ``mpirun`` all ranks are threads of this process, on the GPUs there are. Experts are spread evenly over the
ranks: ``--ranks 1 --experts 32 --top-k 1`` is the share of one of eight ranks of DeepSeek-V3.
"""

from __future__ import annotations

import argparse

from nvep.bench.moe import MoECase
from nvep.bench.moe_layer import LayerTiming, time_layer
from nvep.config import mpi_launch
from nvep.group import RankGroup, run_local
from nvep.moe.grouped_gemm import BACKENDS


def time_everywhere(case: MoECase) -> LayerTiming | None:
    """On this process's rank, or on threads; None where another rank reports."""
    if mpi_launch() is None:
        return run_local(lambda group: time_layer(group, case), case.ranks)[0]
    from mpi4py import MPI

    with RankGroup.from_mpi(MPI.COMM_WORLD) as group:
        timing = time_layer(group, case)
        return timing if group.rank == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8_block"), default=["bf16", "fp8_block"])
    parser.add_argument("--backend", choices=BACKENDS, default="gather")
    options = parser.parse_args()
    launch = mpi_launch()
    ranks = options.ranks if launch is None else launch[1]
    for formats in options.formats:
        for tokens in options.tokens:
            sizes = (ranks, options.experts, options.top_k, options.hidden, options.intermediate)
            timing = time_everywhere(MoECase(tokens, formats, options.backend, *sizes))
            if timing is not None:
                parts = "  ".join(f"{name} {us:.1f}" for name, us in timing.parts_us.items())
                print(f"{formats:<10}{tokens:>6} tokens: {timing.step_us:9.1f} us a step | {parts}", flush=True)


if __name__ == "__main__":
    main()
