"""Write docs/api.md from the docstrings of what nvep calls public.

``python tools/api_docs.py`` writes the file, ``--check`` only tells whether it is current (a test does the same).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "docs" / "api.md"
# Heading, what it is for, and the objects in reading order.
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Exchanging tokens",
        "What a program needs to send tokens to experts and to bring the results back.",
        (
            "nvep.config:ExchangeConfig",
            "nvep.exchange:Exchange",
            "nvep.exchange:Arrivals",
            "nvep.group:RankGroup",
            "nvep.group:local_groups",
            "nvep.group:run_local",
        ),
    ),
    (
        "The MoE layer",
        "Router output in, layer output out.",
        ("nvep.moe:MoELayer", "nvep.moe:MoEWeights"),
    ),
    (
        "Routing and placement",
        "From router logits to ids and weights, and experts on several ranks at once.",
        (
            "nvep.moe:Routing",
            "nvep.moe:Router",
            "nvep.moe:Placement",
            "nvep.moe:Replicas",
            "nvep.moe:balance",
        ),
    ),
    (
        "Payload formats",
        "How rows are encoded while they travel.",
        (
            "nvep.formats:payload_format",
            "nvep.formats:PayloadFormat",
            "nvep.formats:Quantiser",
            "nvep.formats:Dequantiser",
        ),
    ),
    (
        "Arrays",
        "What views into nvep's memory can do.",
        ("nvep.arrays:DeviceArray",),
    ),
)
ERRORS = "nvep.errors"
SIGNATURE_WIDTH = 100
_UNDERLINE = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n-{3,}\n", re.MULTILINE)


def load(reference: str) -> Any:
    """Return the object that ``module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _inline(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _items(body: str) -> Iterator[str]:
    """Turn ``name : type`` entries with indented text into list items."""
    for entry in re.split(r"\n(?=\S)", body.strip("\n")):
        head, _, rest = entry.partition("\n")
        text = " ".join(line.strip() for line in rest.splitlines()).strip()
        name, separator, kind = head.partition(" : ")
        label = f"`{name}` ({_inline(kind)})" if separator else f"`{head}`"
        yield f"- {label}: {_inline(text)}" if text else f"- {label}"


def markdown(docstring: str) -> str:
    """Render a NumPy-style docstring."""
    text = inspect.cleandoc(docstring)
    pieces = _UNDERLINE.split(text)
    lines = [_inline(pieces[0].strip())]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        lines += ["", f"**{title}**", ""]
        lines += _items(body) if title not in ("Notes", "Examples", "See Also") else [_inline(body.strip())]
    return "\n".join(lines).strip()


class _Verbatim:
    """An annotation shown as it was written: with ``from __future__ import annotations`` they are strings."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _as_written(annotation: Any) -> Any:
    return _Verbatim(annotation) if isinstance(annotation, str) else annotation


def _signature(name: str, obj: Any) -> str:
    """Return a call as text, one parameter a line where it would not fit on one."""
    signature = inspect.signature(obj)
    given = [p for p in signature.parameters.values() if p.name != "self"]
    parameters = [p.replace(annotation=_as_written(p.annotation)) for p in given]
    returns = signature.empty if inspect.isclass(obj) else _as_written(signature.return_annotation)
    text = f"{name}{signature.replace(parameters=parameters, return_annotation=returns)}"
    if len(text) <= SIGNATURE_WIDTH:
        return text
    _, _, result = text.rpartition(")")
    # Rendered one at a time, so that commas inside annotations stay where they are.
    named = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind == p.KEYWORD_ONLY else p for p in parameters]
    lines = [str(inspect.Signature([p]))[1:-1] for p in named]
    for index, parameter in enumerate(parameters):
        if parameter.kind == parameter.KEYWORD_ONLY:
            lines.insert(index, "*")
            break
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){result}"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, in the order of their definition, base classes last."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if not owner.__module__.startswith("nvep"):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") and name != "__call__":
                continue
            if name not in seen and (callable(member) or isinstance(member, (property, staticmethod, classmethod))):
                seen.add(name)
                yield name, member


def _class_docs(cls: type) -> Iterator[str]:
    yield f"### `{cls.__name__}`\n"
    if not inspect.isabstract(cls):
        yield f"```text\n{_signature(cls.__name__, cls)}\n```\n"
    yield markdown(cls.__doc__ or "") + "\n"
    for name, member in members(cls):
        function = member.fget if isinstance(member, property) else getattr(cls, name)
        if not function.__doc__:
            continue
        call = f"{cls.__name__}.{name}" if name != "__call__" else f"{cls.__name__}.__call__"
        yield f"#### `{call}`\n"
        if not isinstance(member, property):
            yield f"```text\n{_signature(name, function)}\n```\n"
        yield markdown(function.__doc__) + "\n"


def _object_docs(obj: Any) -> Iterator[str]:
    if inspect.isclass(obj):
        yield from _class_docs(obj)
        return
    yield f"### `{obj.__name__}`\n"
    yield f"```text\n{_signature(obj.__name__, obj)}\n```\n"
    yield markdown(obj.__doc__ or "") + "\n"


def _error_docs() -> Iterator[str]:
    module = importlib.import_module(ERRORS)
    yield "## Errors\n"
    yield _inline(inspect.cleandoc(module.__doc__ or "")) + "\n"
    for name, cls in vars(module).items():
        if inspect.isclass(cls) and issubclass(cls, Exception) and cls.__module__ == ERRORS:
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            yield f"### `{name}`\n\nA kind of {bases}.\n"
            yield markdown(cls.__doc__ or "") + "\n"


def render() -> str:
    """Return the text of docs/api.md."""
    lines = ["# API reference\n", "Written by `tools/api_docs.py` from the docstrings; edit those.\n"]
    for heading, purpose, references in SECTIONS:
        lines += [f"## {heading}\n", f"{purpose}\n"]
        for reference in references:
            lines += _object_docs(load(reference))
    lines += _error_docs()
    return "\n".join(lines)


def main() -> int:
    """Write the file, or compare it with ``--check``; return the exit status."""
    text = render()
    if "--check" in sys.argv[1:]:
        current = TARGET.is_file() and TARGET.read_text() == text
        print(f"{TARGET}: {'current' if current else 'not current; run tools/api_docs.py'}")
        return 0 if current else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
