"""Streaming of the demo's texts: lines for pipes, a live table for terminals."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from nvep.cli.demo_display import LineDisplay, LiveDisplay, make_display
from nvep.cli.demo_report import _thinned, _ticks
from nvep.cli.demo_results import percentile, printable

PROMPTS = [[b"In the ", b"And "], [b"Behold, "]]


def test_lines_are_whole_words_and_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    text = b"beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was"
    display = LineDisplay(["rank 3, text 5"], [b"In the "], new_tokens=len(text), bar=True)
    for byte in text:
        display.token(0, byte)
    first = capsys.readouterr().out.splitlines()
    display.close()
    display.close()
    lines = [*first, *capsys.readouterr().out.splitlines()]
    pieces = [line.removeprefix("rank 3, text 5: ") for line in lines]
    assert len(first) == 1
    assert len(lines) == 2
    assert 64 <= len(pieces[0]) + 1 < 80
    assert " ".join(pieces) == "[In the ] " + text.decode()


def test_bar_takes_ten_lines_and_ends_full(capsys: pytest.CaptureFixture[str]) -> None:
    display = LineDisplay(["a", "b"], [b"x", b"y"], new_tokens=25, bar=True)
    for _ in range(25):
        display.token(0, 97)
        display.token(1, 98)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [str(10 * n) for n in range(1, 11)]
    assert lines[-1].endswith("100 %, byte 25 of 25")
    assert set(lines[-1].split()[0]) == {"\u2588"}


def test_only_one_process_shows_progress(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(PROMPTS, rank=1, new_tokens=1)
    display.token(0, 65)
    display.close()
    out, err = capsys.readouterr()
    assert (out, err) == ("rank 1, text 2: [Behold, ] A\n", "")


def test_a_run_that_fails_before_its_first_byte_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_display(PROMPTS, rank=None, new_tokens=4).close()
    assert capsys.readouterr() == ("", "")


def test_terminals_get_a_live_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    display = LiveDisplay(["rank 0, text 0", "rank 1, text 1"], [b"In the ", b"And "], new_tokens=2, console=console)
    for byte in b"ab":
        display.token(0, byte)
        display.token(1, byte)
    display.close()
    display.close()
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rsplit("rank 0, text 0", 1)[1]
    assert "In the " in last
    assert "ab" in last
    assert "100%" in last
    assert console.file.getvalue().endswith("\x1b[?25h")


def test_unusual_bytes_are_not_sent_to_the_terminal() -> None:
    assert printable(b"a\nb\x1b[2J\xff\x00c") == "a/ b\u00b7[2J\u00b7\u00b7c"


def test_percentile_is_the_nearest_rank() -> None:
    values = np.array([4.0, 1.0, 3.0, 2.0])
    assert [percentile(values, f) for f in (0.5, 0.51, 0.99, 1.0)] == [2.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(0.9, 12, [1, 2, 5, 10]), (0.04, 0.3, [0.05, 0.1, 0.2]), (0.5, 5000, [1, 10, 100, 1000])]
)
def test_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert _ticks(low, high) == pytest.approx(ticks)


def test_thinning_keeps_the_slowest() -> None:
    times = np.ones(10_000)
    times[[17, 5_003]] = 9.0
    kept = _thinned(times)
    assert {0, 17, 5_003, 9_999} <= set(kept)
    assert len(kept) < 2_500
    assert _thinned(times[:50]) == list(range(50))
