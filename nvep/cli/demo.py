"""``nvep demo``: a mixture-of-experts model generates text over several ranks, checked against one process."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from nvep.cli.demo_display import Display, make_display, show
from nvep.cli.demo_exchange import ExpertParallel
from nvep.cli.demo_model import (
    PROMPTS,
    DecoderModel,
    Generated,
    ReferenceExperts,
    StepPlan,
    feed_order,
    generate,
    load_weights,
    plan_steps,
    split_prompts,
)
from nvep.cli.demo_report import page
from nvep.cli.demo_results import DemoResult, RankRecord
from nvep.cli.launch import open_groups_and_run
from nvep.config import PROTOCOLS
from nvep.errors import ArgumentError
from nvep.group import RankGroup

MAX_TOKENS = 32  # rows of a rank in a step, at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``nvep demo``."""
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks in this process, without mpirun (default 4)")
    parser.add_argument(
        "--tokens", type=int, default=120, metavar="N", help="bytes to add to each prompt (default 120)"
    )
    parser.add_argument("--protocol", choices=(*PROTOCOLS, "auto"), default=PROTOCOLS[0])
    parser.add_argument("--sabotage", action="store_true", help="flip one bit that was exchanged: it must be noticed")
    parser.add_argument("--record-routing", metavar="OUT", help="write the routers' choices as JSONL")
    parser.add_argument("--html", metavar="OUT", help="write a page with traffic, load, step times and texts")


def run(options: argparse.Namespace) -> int:
    """Run ``nvep demo``; return the exit status: 0 identical to the reference, 1 different."""
    demo = Demo(options)
    try:
        results = open_groups_and_run(demo.run_rank, options.ranks)
    finally:
        demo.close_display()
    return 1 if results[0].differences() else 0


class Demo:
    """The command in this process; all ranks of a local group share it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._display: Display | None = None

    def run_rank(self, group: RankGroup) -> DemoResult:
        """One rank's whole command. Collective; the same result on every rank."""
        group.together(lambda: check_options(self._options))
        parts = split_prompts(PROMPTS, group.size)
        group.together(lambda: self._open_display(group, parts))
        model = group.together(lambda: DecoderModel(load_weights()))
        records = group.allgather(self._generate(group, model, parts))
        self.close_display()
        reference = reference_texts(group, model, self._options.tokens)
        kind = "local group" if group.in_process else "MPI"
        result = DemoResult(tuple(records), tuple(map(tuple, parts)), kind, reference)
        group.together(lambda: self._finish(result) if group.rank == 0 else None)
        return result

    def close_display(self) -> None:
        """Leave the terminal as it was. Idempotent."""
        if self._display is not None:
            self._display.close()

    def _open_display(self, group: RankGroup, parts: Sequence[Sequence[bytes]]) -> None:
        if group.rank == 0 or not group.in_process:
            rank = None if group.in_process else group.rank
            self._display = make_display(parts, rank=rank, new_tokens=self._options.tokens)

    def _generate(self, group: RankGroup, model: DecoderModel, parts: Sequence[Sequence[bytes]]) -> RankRecord:
        plan = plan_steps(parts, MAX_TOKENS)
        first = sum(map(len, parts[: group.rank])) if group.in_process else 0

        def on_token(text: int, byte: int) -> None:
            if self._display is not None:
                self._display.token(first + text, byte)

        with ExitStack() as stack:
            experts = stack.enter_context(
                ExpertParallel(
                    group,
                    model.weights,
                    max_tokens=MAX_TOKENS,
                    protocol=self._options.protocol,
                    sabotage=self._options.sabotage,
                )
            )
            if self._options.sabotage:  # it makes numbers infinite, which is no news then
                stack.enter_context(np.errstate(all="ignore"))
            begin = time.perf_counter()
            generated = generate(
                model,
                parts[group.rank],
                new_tokens=self._options.tokens,
                plan=plan,
                experts=experts,
                on_token=on_token,
            )
            seconds = time.perf_counter() - begin
        device = "emulated device (CPU)" if group.device.emulated else group.device.name
        return RankRecord(device, generated, experts.traffic, seconds, experts.config)

    def _finish(self, result: DemoResult) -> None:
        show(result)
        for option, text_of in (("record_routing", routing_log), ("html", page)):
            path = getattr(self._options, option)
            if path is not None:
                _write(option, path, text_of(result))


def reference_texts(group: RankGroup, model: DecoderModel, new_tokens: int) -> Generated:
    """All texts from rank 0 alone. Collective; prompt by prompt, so that the others' wait stays within its deadline."""
    experts = ReferenceExperts(model.weights)
    done: list[Generated] = []
    for prompt in PROMPTS:
        plan = plan_steps([[prompt]], MAX_TOKENS)

        def one(prompt: bytes = prompt, plan: StepPlan = plan) -> None:
            if group.rank == 0:
                done.append(generate(model, [prompt], new_tokens=new_tokens, plan=plan, experts=experts))

        group.together(one)
    done = group.allgather(done)[0]
    return Generated(
        tuple(text for part in done for text in part.texts),
        min(part.logit_margin for part in done),
        min(part.router_margin for part in done),
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise ArgumentError for what can be refused before anything runs."""
    if options.tokens < 1:
        raise ArgumentError("--tokens", options.tokens, "1 or more")
    for name in ("record_routing", "html"):
        path = getattr(options, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ArgumentError(f"--{name.replace('_', '-')}", path, "a file in an existing directory")


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror})"
        raise ArgumentError(f"--{option.replace('_', '-')}", path, allowed) from error


def routing_log(result: DemoResult) -> str:
    """Router log as JSONL that ``nvep replay`` reads: a meta line, then a line for each text, byte and layer."""
    layers = range(len(result.load))
    meta = {
        "type": "meta",
        "model_id": "nvep-demo",
        "layers_logged": list(layers),
        "num_experts": result.config.num_experts,
        "top_k": result.config.top_k,
    }
    lines = [json.dumps(meta)]
    request = 0
    for record, prompts in zip(result.records, result.prompts_by_rank, strict=True):
        if not prompts:
            continue
        order = feed_order(prompts, len(record.generated.texts[0]))
        ids = [np.concatenate(record.traffic.ids[layer]).tolist() for layer in layers]
        weights = [np.concatenate(record.traffic.weights[layer]).tolist() for layer in layers]
        for row in sorted(range(len(order)), key=order.__getitem__):
            text, position = order[row]
            token = {"type": "route", "req_id": f"text{request + text}", "token_idx": position}
            for layer in layers:
                chosen = {"topk_ids": ids[layer][row], "topk_weights": [round(w, 6) for w in weights[layer][row]]}
                lines.append(json.dumps({**token, "layer": layer, **chosen}))
        request += len(prompts)
    return "\n".join(lines) + "\n"
