"""The documentation holds together: links lead somewhere, the API reference is current, every command exists."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.host import snippets
from tools import api_docs

REPOSITORY = snippets.REPOSITORY
PAGES = [str(path.relative_to(REPOSITORY)) for path in snippets.pages()]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SVG = "{http://www.w3.org/2000/svg}"


def anchors(markdown: str) -> set[str]:
    """Names that headings can be linked by."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for target in _LINK.findall(_FENCED.sub("", page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(REPOSITORY / page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title here\n[a](missing.md) [b](#title-here) [c](#no) [d](https://example.org)\n")
    assert broken_links(page) == ["missing.md", "#no"]


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    queue = [REPOSITORY / "README.md"]
    while queue:
        page = queue.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = [t for t in _LINK.findall(_FENCED.sub("", page.read_text())) if "://" not in t and t[0] != "#"]
        queue += [(page.parent / link.partition("#")[0]).resolve() for link in links]
    pages = {path.resolve() for path in snippets.pages() if "design" not in path.parts}
    assert pages - seen == set()


def test_the_api_reference_is_current() -> None:
    current = api_docs.TARGET.read_text() == api_docs.render()
    assert current, "run `make docs`"  # a comparison in the assert would print both texts whole


def test_the_api_reference_covers_what_nvep_exports() -> None:
    import nvep

    documented = {r.partition(":")[2] for _, _, references in api_docs.SECTIONS for r in references} | {"errors"}
    assert set(nvep.__all__) <= documented


def test_everything_exported_has_a_docstring() -> None:
    for _, _, references in api_docs.SECTIONS:
        for reference in references:
            obj = api_docs.load(reference)
            assert obj.__doc__, reference
            if isinstance(obj, type):
                methods = [(n, m) for n, m in api_docs.members(obj) if not isinstance(m, property)]
                bare = [name for name, method in methods if not method.__doc__]
                assert bare == [], reference


@pytest.mark.parametrize("program", snippets.all_programs(), ids=lambda program: program.name)
def test_snippets_are_python(program: snippets.Program) -> None:
    compile(program.text, program.name, "exec")


@pytest.mark.parametrize("picture", sorted((REPOSITORY / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_svg_with_a_title(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc") is not None


@pytest.mark.parametrize("package", ["nvep", "nvep_kernels", "tests"])
def test_the_map_shows_the_folders_that_exist(package: str) -> None:
    text = (REPOSITORY / "docs" / "layout.md").read_text()
    (section,) = re.findall(rf"^{package}/.*?\n((?:  .*\n)+)", text, re.MULTILINE)
    shown = set(re.findall(r"\b(\w+)/", "\n".join(line[:40] for line in section.splitlines())))
    folders = {path.name for path in (REPOSITORY / package).iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert shown == folders


def _shell_lines() -> list[tuple[str, str]]:
    """Commands of ``sh`` and ``console`` blocks, with their page."""
    lines = []
    for page in PAGES:
        text = (REPOSITORY / page).read_text()
        for block in re.finditer(r"^```(?:sh|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            commands = [line for line in block[1].splitlines() if line.startswith(("$ ", "make ", "nvep "))]
            lines += [(page, command.removeprefix("$ ")) for command in commands]
    return lines


def test_make_targets_that_are_mentioned_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    mentioned = {name for _, line in _shell_lines() for name in re.findall(r"\bmake ([a-z-]+)", line)}
    assert mentioned
    assert mentioned <= targets


def test_options_of_nvep_that_are_mentioned_exist() -> None:
    commands = {line for _, line in _shell_lines() if re.search(r"\bnvep [a-z]+", line)}
    assert commands
    for line in commands:
        (command,) = re.findall(r"\bnvep ([a-z]+)", line)
        result = subprocess.run(
            [sys.executable, "-m", "nvep.cli.main", command, "--help"], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, line
        after = line.partition(f"nvep {command}")[2]
        missing = [o for o in re.findall(r"--[a-z][a-z-]*", after) if o not in result.stdout]
        assert missing == [], line
