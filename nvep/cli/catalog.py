"""Kernels that `nvep compile` builds: every kernel, with its options covered at least pairwise."""

from __future__ import annotations

from nvep.config import ExchangeConfig
from nvep.exchange.plan import Plan
from nvep.moe.grouped_gemm import ExpertShape
from nvep.moe.grouped_gemm.plain import plain_kernels
from nvep.moe.synthetic import scale_experts_source
from nvep.runtime.source import KernelSource

# ranks, top_k, payloads beside the row, partial format, lanes: any two values of two columns meet in some row.
COVERING = [
    (1, 1, (), "bf16", 1),
    (2, 8, (32,), "fp16", 2),
    (8, 20, (), "fp32", 2),
    (72, 1, (32,), "fp32", 1),
    (1, 8, (32,), "fp32", 1),
    (2, 1, (), "fp32", 2),
    (8, 1, (32,), "bf16", 2),
    (72, 8, (), "bf16", 2),
    (1, 20, (32,), "fp16", 2),
    (2, 20, (), "bf16", 1),
    (8, 8, (), "fp16", 1),
    (72, 20, (32,), "fp16", 1),
    (1, 1, (), "fp16", 1),
]


def kernel_catalog() -> list[tuple[str, KernelSource]]:
    """Labelled sources.

    Returns
    -------
    list of (str, KernelSource)
        The label names configuration and kernel.
    """
    entries = []
    for ranks, top_k, extra, partial_format, lanes in COVERING:
        config = ExchangeConfig(
            num_experts=256,
            top_k=top_k,
            max_tokens=128,
            row_bytes=7168,
            extra_payload_bytes=extra,
            partial_format=partial_format,
            lanes=lanes,
        )
        label = f"ranks={ranks} top_k={top_k} payloads={1 + len(extra)} partial={partial_format} lanes={lanes}"
        shape = ExpertShape(ranks * config.max_tokens, top_k, config.elements, 2048, partial_format)
        sources = {**Plan(config, ranks).kernels(), **plain_kernels(shape)}
        sources["scale_experts"] = scale_experts_source(config, ranks)
        entries += [(f"{name} {label}", source) for name, source in sources.items()]
    return entries
