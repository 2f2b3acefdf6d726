"""Train the demo's mixture-of-experts language model, and a dense model of equal active size beside it.

A tool outside the package: it needs torch, which nvep never imports. `tools/README.md` says where the text comes
from and records the command and the results of the run that made `nvep/cli/demo_model/weights.safetensors`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

VOCABULARY = 256
TRAIN_FRACTION, VALIDATION_FRACTION = 0.92, 0.03  # in file order; the last 5 % are held out


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; `num_experts` 0 means one dense SwiGLU block of `shared_hidden`."""

    layers: int = 4
    hidden: int = 160
    heads: int = 5
    num_experts: int = 32
    top_k: int = 4
    expert_hidden: int = 48
    shared_hidden: int = 64
    context: int = 512
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5

    def dense(self) -> Shape:
        """Equal active size: one block as wide as the experts that a token uses, shared one included."""
        width = self.top_k * self.expert_hidden + self.shared_hidden
        return Shape(**{**asdict(self), "num_experts": 0, "top_k": 0, "expert_hidden": 0, "shared_hidden": width})


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """Router and experts. Every expert is computed for every token and masked: fastest at this size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        e, f, d = shape.num_experts, shape.expert_hidden, shape.hidden
        self.router = nn.Linear(d, e, bias=False)
        self.gate = nn.Parameter(torch.empty(e, f, d))
        self.up = nn.Parameter(torch.empty(e, f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Dense routing weights `[tokens, experts]` (zero where not chosen) and the auxiliary loss."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router.weight.float())
        probability = logits.softmax(-1)
        top, ids = probability.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(probability).scatter(-1, ids, top / top.sum(-1, keepdim=True))
        chosen = (weights > 0).float().mean(0) / self.top_k
        balance = weights.shape[-1] * (chosen * probability.mean(0)).sum()
        stability = torch.logsumexp(logits, -1).pow(2).mean()
        return weights, 0.01 * balance + 1e-4 * stability

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, auxiliary = self.route(x)
        e, f, d = self.gate.shape
        h = F.silu(F.linear(x, self.gate.view(e * f, d))) * F.linear(x, self.up.view(e * f, d))
        h = (h.view(-1, e, f) * weights.to(h.dtype).unsqueeze(-1)).view(-1, e * f)
        return F.linear(h, self.down.transpose(0, 1).reshape(d, e * f)), auxiliary


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        d = shape.hidden
        self.heads = shape.heads
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = RMSNorm(d, shape.norm_epsilon)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attention_out = nn.Linear(d, d, bias=False)
        self.moe_norm = RMSNorm(d, shape.norm_epsilon)
        self.shared = SwiGLU(d, shape.shared_hidden)
        self.experts = Experts(shape) if shape.num_experts else None

    def attention(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        out: Tensor = self.attention_out(y.transpose(1, 2).reshape(b, t, d))
        return out

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        rows = self.moe_norm(x)
        y = self.shared(rows)
        if self.experts is None:
            return x + self.dropout(y), x.new_zeros(())
        routed, auxiliary = self.experts(rows.flatten(0, 1))
        return x + self.dropout(y + routed.view_as(y)), auxiliary


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: the first half of a head is paired with its second half."""
    cosine, sine = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """Byte-level decoder with tied embeddings."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.final_norm = RMSNorm(shape.hidden, shape.norm_epsilon)
        half = shape.hidden // shape.heads // 2
        frequency = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(shape.context, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights, 0.02 at the embedding; projections into the residual stream shrink with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            std = 0.02 if name == "embedding.weight" else parameter.shape[-1] ** -0.5
            if name.endswith(("attention_out.weight", "down.weight", "experts.down")):
                std /= math.sqrt(2 * self.shape.layers)
            nn.init.normal_(parameter, std=std)

    def forward(self, bytes_: Tensor) -> tuple[Tensor, Tensor]:
        t = bytes_.shape[1]
        rotation = (self.get_buffer("cosine")[:t], self.get_buffer("sine")[:t])
        x = self.dropout(self.embedding(bytes_).float())
        auxiliary = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, rotation)
            auxiliary = auxiliary + loss
        return F.linear(self.final_norm(x), self.embedding.weight).float(), auxiliary


@dataclass(frozen=True)
class Corpus:
    """A text in three contiguous parts, uint8 tensors on the device."""

    train: Tensor
    validation: Tensor
    held_out: Tensor
    sha256: str

    @staticmethod
    def read(path: Path, device: str) -> Corpus:
        raw = path.read_bytes()
        data = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()).to(device)
        a = int(len(raw) * TRAIN_FRACTION)
        b = int(len(raw) * (TRAIN_FRACTION + VALIDATION_FRACTION))
        return Corpus(data[:a], data[a:b], data[b:], hashlib.sha256(raw).hexdigest())

    def batches(self, seed: int, batch: int, length: int) -> Iterator[Tensor]:
        """Endless `[batch, length + 1]` windows of the training part; the order depends on the seed only."""
        generator = torch.Generator().manual_seed(seed)
        reach = torch.arange(length + 1, device=self.train.device)
        while True:
            start = torch.randint(len(self.train) - length - 1, (batch,), generator=generator)
            yield self.train[start.to(self.train.device)[:, None] + reach].long()


def unigram_bits(corpus: Corpus) -> float:
    """Held-out bits per byte of the training part's byte frequencies (add-one smoothed)."""
    counts = torch.bincount(corpus.train.long(), minlength=VOCABULARY).double() + 1
    bits = -(counts / counts.sum()).log2()
    return float(bits[corpus.held_out.long()].mean())


@torch.no_grad()
def evaluate(model: Decoder, data: Tensor) -> float:
    """Bits per byte of all of `data` but its first; from half a context on, each byte sees at least that much."""
    model.eval()
    context, stride = model.shape.context, model.shape.context // 2
    begins = [*range(0, max(1, len(data) - 1 - stride), stride)]
    full = [b for b in begins if b + context < len(data)]
    total = 0.0
    for i in range(0, len(full), 64):
        windows = torch.stack([data[b : b + context + 1] for b in full[i : i + 64]]).long()
        nats = F.cross_entropy(model(windows[:, :-1])[0].mT, windows[:, 1:], reduction="none").double()
        total += float(nats[:, stride:].sum()) + (float(nats[0, :stride].sum()) if i == 0 else 0.0)
    if len(full) < len(begins):
        window = data[begins[-1] :].long()
        nats = F.cross_entropy(model(window[None, :-1])[0][0], window[1:], reduction="none").double()
        total += float(nats[stride if full else 0 :].sum())
    model.train()
    return total / (len(data) - 1) / math.log(2)


@torch.no_grad()
def expert_use(model: Decoder, data: Tensor) -> list[list[float]]:
    """Share of the routed rows that each expert gets, by layer, over the first windows of `data`."""
    model.eval()
    use: list[Tensor] = []

    def record(module: Experts, arguments: tuple[Tensor]) -> None:
        use.append((module.route(arguments[0])[0] > 0).float().mean(0) / module.top_k)

    hooks = [layer.experts.register_forward_pre_hook(record) for layer in model.layers]
    count = min(32, len(data) // model.shape.context)
    model(data[: count * model.shape.context].view(count, -1).long())
    for hook in hooks:
        hook.remove()
    model.train()
    return [[round(float(share), 5) for share in layer] for layer in use]


def optimiser_for(model: Decoder, options: argparse.Namespace) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98))


def train(name: str, shape: Shape, corpus: Corpus, options: argparse.Namespace) -> tuple[Decoder, dict[str, Any]]:
    """Train one model; the last evaluation is of the weights rounded to bf16, as they are stored."""
    torch.manual_seed(options.seed)
    model = Decoder(shape, options.dropout).to(options.device)
    optimiser = optimiser_for(model, options)
    warmup = min(200, options.steps // 10 + 1)
    batches = corpus.batches(options.seed, options.batch, shape.context)
    curve, begin = [], time.perf_counter()
    for step in range(options.steps):
        progress = max(0.0, (step - warmup) / max(1, options.steps - warmup))
        scale = min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimiser.param_groups:
            group["lr"] = options.rate * scale
        window = next(batches)
        with torch.autocast(options.device, dtype=torch.bfloat16):
            logits, auxiliary = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        (loss + auxiliary).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % max(1, options.steps // 8) == 0:
            bits = {"train": loss.item() / math.log(2), "validation": evaluate(model, corpus.validation)}
            curve.append({"step": step + 1, **{part: round(value, 4) for part, value in bits.items()}})
            print(f"{name} {json.dumps(curve[-1])} {time.perf_counter() - begin:.0f} s", flush=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    seconds = time.perf_counter() - begin
    return model, summary(model, corpus, {"seconds": round(seconds, 1), "curve": curve})


def summary(model: Decoder, corpus: Corpus, record: dict[str, Any]) -> dict[str, Any]:
    shape = model.shape
    total = sum(p.numel() for p in model.parameters())
    idle = shape.layers * 3 * shape.hidden * shape.expert_hidden * (shape.num_experts - shape.top_k)
    return {
        "shape": asdict(shape),
        "parameters": total,
        "active_parameters": total - idle,
        "validation_bits_per_byte": round(evaluate(model, corpus.validation), 4),
        "held_out_bits_per_byte": round(evaluate(model, corpus.held_out), 4),
        **record,
    }


def export(model: Decoder, path: Path) -> None:
    """Write bf16 weights; names and shapes are those that nvep/cli/demo_model/weights.py reads."""
    names = {"embedding.weight": "embedding", "final_norm.weight": "final_norm"}
    tensors = {}
    for name, parameter in model.named_parameters():
        stored = names.get(name, name.removesuffix(".weight")).replace("experts.router", "router")
        tensors[stored] = parameter.detach().bfloat16().cpu().contiguous()
    save_file(tensors, str(path), metadata={"shape": json.dumps(asdict(model.shape))})


def check_sample(model: Decoder, corpus: Corpus) -> dict[str, Any]:
    """A held-out sample with its bits per byte in one window: the NumPy model is checked against it."""
    sample = corpus.held_out[len(corpus.held_out) // 2 :][: model.shape.context + 1]
    text = bytes(sample.cpu().numpy()).decode("ascii")
    return {"text": text, "bits_per_byte": round(evaluate(model, sample), 5)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="plain text, one verse a line")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and demo_model_results.json")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.use_deterministic_algorithms(True, warn_only=True)
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read(options.corpus, options.device)
    results: dict[str, Any] = {
        "corpus": {"sha256": corpus.sha256, "bytes": [len(corpus.train), len(corpus.validation), len(corpus.held_out)]},
        "options": {k: v for k, v in vars(options).items() if k not in ("corpus", "out")},
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "unigram": {"held_out_bits_per_byte": round(unigram_bits(corpus), 4)},
    }
    for name, shape in (("mixture_of_experts", Shape()), ("dense_equal_active", Shape().dense())):
        model, results[name] = train(name, shape, corpus, options)
        if shape.num_experts:
            export(model, options.out / "weights.safetensors")
            results[name]["expert_use_validation"] = expert_use(model, corpus.validation)
            results["check"] = check_sample(model, corpus)
        (options.out / "demo_model_results.json").write_text(json.dumps(results, indent=1) + "\n")
    for name in ("unigram", "dense_equal_active", "mixture_of_experts"):
        print(f"{name}: {results[name]['held_out_bits_per_byte']:.4f} held-out bits per byte")


if __name__ == "__main__":
    main()
