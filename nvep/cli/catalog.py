"""Kernels that `nvep compile` builds: every kernel, with its options covered at least pairwise."""

from __future__ import annotations

from nvep.config import PARTIAL_ELEMENT_BYTES, ExchangeConfig
from nvep.exchange.plan import Plan
from nvep.formats import FORMATS
from nvep.formats.quantise import dequantise_source, quantise_source
from nvep.moe.grouped_gemm import ACTIVATIONS, ExpertShape
from nvep.moe.grouped_gemm.gather import gather_kernels
from nvep.moe.grouped_gemm.library import STRATEGIES, library_kernels
from nvep.moe.routing import ROUTINGS, route_source
from nvep.moe.shared import add_source
from nvep.moe.synthetic import scale_experts_source
from nvep.nic.soft.engine import soft_nic_source
from nvep.runtime.source import KernelSource

# ranks, top_k, payloads beside the row, partial format, lanes, strict_ptx: any two values of two columns meet in some
# row. Both protocols are built for every row.
COVERING = [
    (1, 1, (), "bf16", 1, True),
    (2, 8, (32,), "fp16", 2, False),
    (8, 20, (), "fp32", 2, False),
    (72, 1, (32,), "fp32", 1, False),
    (1, 8, (32,), "fp32", 1, True),
    (2, 1, (), "fp32", 2, True),
    (8, 1, (32,), "bf16", 2, True),
    (72, 8, (), "bf16", 2, True),
    (1, 20, (32,), "fp16", 2, False),
    (2, 20, (), "bf16", 1, False),
    (8, 8, (), "fp16", 1, False),
    (72, 20, (32,), "fp16", 1, True),
    (1, 1, (), "fp16", 1, True),
]


def kernel_catalog() -> list[tuple[str, KernelSource]]:
    """Labelled sources.

    Returns
    -------
    list of (str, KernelSource)
        The label names configuration and kernel.
    """
    entries = []
    for ranks, top_k, extra, partial_format, lanes, strict in COVERING:
        config = ExchangeConfig(
            num_experts=256,
            top_k=top_k,
            max_tokens=128,
            row_bytes=7168,
            extra_payload_bytes=extra,
            partial_format=partial_format,
            lanes=lanes,
            protocol="auto",
            strict_ptx=strict,
        )
        label = f"ranks={ranks} top_k={top_k} payloads={1 + len(extra)} partial={partial_format} lanes={lanes}"
        for protocol in config.protocols:
            sources = Plan(config, ranks).kernels(protocol)
            entries += [(f"{name} {protocol} {label} strict={strict}", source) for name, source in sources.items()]
        entries.append((f"scale_experts {label}", scale_experts_source(config, ranks)))
    return [*entries, *_expert_entries(), *_format_entries(), *_routing_entries(), *_network_entries()]


# ranks, top_k, local experts, hidden, intermediate, rows, weights, partial format, activation, biases
EXPERT_SHAPES = [
    (8, 8, 32, 7168, 2048, "bf16", "bf16", "bf16", "swiglu", False),
    (8, 8, 32, 7168, 2048, "fp8_block", "fp8_block", "bf16", "swiglu", False),
    (2, 8, 128, 7168, 2048, "fp8_block_ue8m0", "bf16", "fp32", "swiglu", False),
    (4, 4, 32, 2880, 2880, "mxfp8", "bf16", "bf16", "swiglu_clamped", True),
    (1, 2, 8, 4096, 14336, "bf16", "fp8_block", "fp16", "geglu", True),
    (72, 1, 1, 2048, 768, "fp16", "bf16", "bf16", "plain", False),
    (2, 4, 8, 2048, 1024, "nvfp4", "fp8_block", "bf16", "swiglu", False),
    (2, 4, 8, 2048, 1024, "fp8_tensor", "bf16", "bf16", "swiglu", False),
]


def _expert_entries() -> list[tuple[str, KernelSource]]:
    """Expert kernels for rows and weights of every kind."""
    assert {shape[8] for shape in EXPERT_SHAPES} == set(ACTIVATIONS)
    entries = [(f"moe_add {partial}", add_source(7168, 128, partial)) for partial in PARTIAL_ELEMENT_BYTES]
    for ranks, top_k, local, hidden, intermediate, rows, weights, partial, activation, biases in EXPERT_SHAPES:
        shape = ExpertShape(
            ranks, 128, top_k, 256, local, hidden, intermediate, partial,
            activation=activation, row_format=rows, weight_format=weights, biases=biases,
        )  # fmt: skip
        label = f"ranks={ranks} top_k={top_k} {hidden}x{intermediate} {rows} {weights} {partial} {activation}"
        entries += [(f"{name} {label}", source) for name, source in gather_kernels(shape).items()]
        if rows == weights == "bf16":
            for strategy in STRATEGIES:
                sources = library_kernels(shape, strategy)
                del sources["moe_plan"]
                entries += [(f"{name} {strategy} {label}", source) for name, source in sources.items()]
    return entries


# ranks, top_k, payloads beside the row, domain size, queues
NETWORK_SHAPES = {
    "gdaki": (8, 8, (32,), 1, 1),
    "gpi": (72, 8, (), 4, 2),
    "gpi-mc": (72, 20, (32,), 8, 1),
    "free-flow": (2, 1, (), 1, 4),
}


def _network_entries() -> list[tuple[str, KernelSource]]:
    """The adapter's kernel, and the exchange over each transport that needs one."""
    entries = [("soft_nic", soft_nic_source())]
    for transport, (ranks, top_k, extra, domain, queues) in NETWORK_SHAPES.items():
        config = ExchangeConfig(
            num_experts=256,
            top_k=top_k,
            max_tokens=128,
            row_bytes=7168,
            extra_payload_bytes=extra,
            transport=transport,
            domain_size=domain,
            queues=queues,
        )
        label = f"{transport} ranks={ranks} top_k={top_k} payloads={1 + len(extra)} domain={domain} queues={queues}"
        entries += [(f"{name} {label}", source) for name, source in Plan(config, ranks).kernels("signal").items()]
    return entries


def _routing_entries() -> list[tuple[str, KernelSource]]:
    """The routing functions of models, from both element types of logits, with replicas and without."""
    return [
        (f"route {name} {logits} replicas={replicas}", route_source(routing, logits, replicas=replicas))
        for name, routing in ROUTINGS.items()
        for logits, replicas in (("fp32", False), ("bf16", True))
    ]


def _format_entries() -> list[tuple[str, KernelSource]]:
    """Every payload format with every element type, rows of gpt-oss: their last block of 128 is short."""
    entries = []
    for payload_format in FORMATS.values():
        for elements in PARTIAL_ELEMENT_BYTES:
            label = f"{payload_format.name} {elements}"
            entries.append((f"quantise {label}", quantise_source(payload_format, 2880, elements)))
            entries.append((f"dequantise {label}", dequantise_source(payload_format, 2880, elements)))
    return entries
