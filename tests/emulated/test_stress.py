"""Steps from graphs with every row checked on the device; and that the check can fail."""

from __future__ import annotations

import pytest

from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.testing.stress import StressCase, run_stress, small_sentinel_steps


@pytest.mark.parametrize("strict_ptx", [False, True])
def test_alternating_protocols(strict_ptx: bool) -> None:
    assert run_stress(StressCase(ranks=3, steps=60, strict_ptx=strict_ptx), device="emulated") == 60


def test_small_sentinel_steps() -> None:
    assert run_stress(small_sentinel_steps(400), device="emulated") == 400


def test_a_wrong_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = KernelSource.translation_unit

    def without_last_word(source: KernelSource) -> str:
        old = "i < count * stress::kRowWords; i"
        return text(source).replace(old, "i + 1 < count * stress::kRowWords; i")

    assert (KERNEL_ROOT / "testing" / "stress_prepare.cu").read_text().count("i < count * stress::kRowWords; i") == 1
    monkeypatch.setattr(KernelSource, "translation_unit", without_last_word)
    with pytest.raises(AssertionError, match="errors, one in step"):
        run_stress(StressCase(ranks=2, steps=20), device="emulated")
