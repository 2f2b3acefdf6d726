"""Code blocks of the documentation, as programs that tests run.

A ``python`` block is a program of its own. HTML comments on the line before a block, which readers do not see, say
more: ``<!-- continues -->`` puts the blocks before it (of the same page, from the last one that starts a program) in
front, ``<!-- ranks: 2 -->`` runs it under mpirun, and ``<!-- prints -->`` before a ``text`` block compares it with what
the program before it printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Program:
    """One runnable snippet."""

    page: str
    line: int
    text: str
    ranks: int = 0
    output: str | None = None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def programs(page: str, markdown: str) -> Iterator[Program]:
    """Yield the programs of a page in order."""
    current: Program | None = None
    for block in _BLOCK.finditer(markdown):
        note = block["note"] or ""
        if block["language"] == "text" and note == "prints":
            assert current is not None, f"{page}: nothing was run before the output"
            current.output = block["text"]
        if block["language"] != "python":
            continue
        line = markdown.count("\n", 0, block.start("text")) + 1
        if note == "continues":
            assert current is not None, f"{page}:{line}: continues nothing"
            previous, ranks = current.text, current.ranks
        else:
            ranks = int(note.removeprefix("ranks: ")) if note.startswith("ranks: ") else 0
            previous = ""
        if current is not None:
            yield current
        current = Program(page, line, previous + block["text"], ranks)
    if current is not None:
        yield current


def all_programs() -> list[Program]:
    return [
        program
        for path in pages()
        for program in programs(str(path.relative_to(REPOSITORY)), path.read_text())
    ]
