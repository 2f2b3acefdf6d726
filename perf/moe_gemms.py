"""Expert compute of one rank's share on one GPU, beside its floor: ``python perf/moe_gemms.py``.

A row of the table is a number of tokens a rank. The floor is the time to read the weights of the experts that were
chosen, at the bandwidth that a copy within this GPU's memory has in the same run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from nvep.bench.moe import MoECase, copy_bandwidth, open_device, share, time_experts
from nvep.errors import NvepError
from nvep.moe.grouped_gemm import BACKENDS
from nvep.moe.weights import LocalExperts
from nvep.runtime.device import Device

SHARES = {  # ranks, experts, top_k, hidden, intermediate
    "deepseek-v3": (8, 256, 8, 7168, 2048),
    "deepseek-v3-ep2": (2, 256, 8, 7168, 2048),
    "kimi-k2": (8, 384, 8, 7168, 2048),
    "qwen3-235b": (8, 128, 8, 4096, 1536),
    "qwen3-30b": (2, 128, 8, 2048, 768),
    "gpt-oss-120b": (8, 128, 4, 2880, 2880),
    "mixtral": (2, 8, 2, 4096, 14336),
    "tiny": (2, 8, 2, 64, 48),
}


def show(device: Device, case: MoECase, experts: LocalExperts, bandwidth: float) -> None:
    """Time a case and print its row."""
    name = f"{case.formats:<10}{case.backend:<10}{case.tokens:>7}"
    try:
        timing = time_experts(device, case, experts, bandwidth=bandwidth)
    except NvepError as error:
        print(f"{name}  {error}")
        return
    flops = 6 * timing.pairs * case.hidden * case.intermediate
    print(
        f"{name}{timing.rows:>7}{timing.pairs:>7}{timing.active:>7}{timing.us:>10.1f}{timing.floor_us:>10.1f}"
        f"{timing.us / timing.floor_us:>8.2f}{flops / timing.us / 1e6:>9.1f}{'' if timing.captured else '  eager'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", choices=SHARES, default="deepseek-v3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8_block"), default=["bf16", "fp8_block"])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["gather", "nvmath", "packed"])
    options = parser.parse_args()
    ranks, experts, top_k, hidden, intermediate = SHARES[options.share]
    device = open_device()
    print(f"{device.name}: {options.share}, {experts // ranks} local experts of {hidden} x {intermediate}")
    for formats in options.formats:
        base = MoECase(1, formats, "gather", ranks, experts, top_k, hidden, intermediate)
        with share(device, base) as weights:
            bandwidth = copy_bandwidth(device)
            print(f"\ncopy: {bandwidth / 1e6:.3f} TB/s read and written")
            print("formats   backend    tokens   rows  pairs active   time us  floor us   ratio  TFLOP/s")
            for tokens in options.tokens:
                for backend in options.backends if formats == "bf16" else ["gather"]:
                    show(device, replace(base, tokens=tokens, backend=backend), weights, bandwidth)
    device.close()


if __name__ == "__main__":
    main()
