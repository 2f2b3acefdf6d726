"""What the environment says of folders."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvep.config import Settings


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVEP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_cache_folder_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert Settings.from_environment().cache_dir == Path("/h/.cache/nvep")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert Settings.from_environment().cache_dir == Path("/x/nvep")
    monkeypatch.setenv("NVEP_CACHE_DIR", "/c")
    assert Settings.from_environment().cache_dir == Path("/c")


@pytest.mark.parametrize("home", [None, ""])
def test_without_home_the_cache_is_in_no_shared_folder(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=f"/homes/{uid}"))
    assert Settings.from_environment().cache_dir == Path(f"/homes/{os.getuid()}/.cache/nvep")


def test_a_user_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Settings.from_environment().cache_dir == Path("/.cache/nvep")
