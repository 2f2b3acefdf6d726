"""The project's structural rules as functions from a source tree to a list of violations (one line each)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# From top to bottom; a package imports only itself and what stands below it. One entry may hold several packages:
# these never import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("testing",),
    ("bench",),
    ("moe",),
    ("exchange",),
    ("reference",),
    ("transports", "protocols", "formats"),
    ("nic",),
    ("symmetric",),
    ("group",),
    ("runtime",),
    ("inputs",),
    ("arrays",),
    ("dlpack",),
    ("config",),
    ("errors",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
# Modules of one package that are choices of the same thing, by the first words of their names.
ALTERNATIVES = {
    "transports": ("nvlink", "gdaki", "gpi_mc", "gpi", "free_flow"),
    "protocols": ("fence", "sentinel"),
    "nic": ("soft", "verbs"),
    "group": ("mpi", "local"),
    "runtime": ("cuda", "emulated"),
    "symmetric": ("heap_cuda", "heap_shared"),
}
# The reference is the oracle: it may share configuration with the code it judges, nothing else.
REFERENCE_MAY_IMPORT = {"reference", "arrays", "config", "errors"}
PYTHON_LINES, KERNEL_LINES, FUNCTION_LINES, KERNEL_BODY_LINES, PUBLIC_PARAMETERS = 400, 300, 40, 150, 6
KERNEL_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")


def python_files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*.py")) if "__pycache__" not in p.parts)


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full module name of everything that ``path`` imports from nvep, at any depth of its code."""
    module = module_name(root, path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "nvep" or name.startswith("nvep."):
                yield node.lineno, name


def _layer(module: str) -> str:
    """``nvep.runtime.jit`` is in ``runtime``; ``nvep`` itself, and names it re-exports, are in ``""``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else ""


def _alternative(module: str) -> str | None:
    parts = module.split(".")
    if len(parts) < 3:
        return None
    choices = ALTERNATIVES.get(parts[1], ())
    return next((c for c in choices if parts[2] == c or parts[2].startswith(c + "_")), None)


def import_violations(root: Path) -> list[str]:
    """Imports that go upwards or sideways."""
    found = []
    for path in python_files(root / "nvep"):
        importer = module_name(root, path)
        layer = _layer(importer)
        if not layer:
            if importer != "nvep":
                found.append(f"{path.relative_to(root)}: {importer} is in no layer")
            continue
        for line, target in imports(root, path):
            reason = _why_not(layer, importer, target)
            if reason:
                found.append(f"{path.relative_to(root)}:{line}: {importer} imports {target}: {reason}")
    return found


def _why_not(layer: str, importer: str, target: str) -> str | None:
    other = _layer(target)
    if not other:
        return None if layer in ("cli", "testing") else "only the top layers use nvep's re-exports"
    if layer == "reference" and other not in REFERENCE_MAY_IMPORT:
        return "the reference depends on nothing that it judges"
    if layer == other:
        mine, theirs = _alternative(importer), _alternative(target)
        return "alternatives do not import each other" if mine and theirs and mine != theirs else None
    if HEIGHT[other] == HEIGHT[layer]:
        return f"{layer} and {other} are side by side"
    return "upwards" if HEIGHT[other] < HEIGHT[layer] else None


def environment_violations(root: Path) -> list[str]:
    """Uses of the environment outside ``nvep/config.py``."""
    forbidden = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for path in python_files(root / "nvep"):
        if path == root / "nvep" / "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
            if attribute and node.attr in forbidden:
                found.append(f"{path.relative_to(root)}:{node.lineno}: os.{node.attr}")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = [alias.name for alias in node.names if alias.name in forbidden]
                found += [f"{path.relative_to(root)}:{node.lineno}: {name}" for name in names]
    return found


def print_violations(root: Path) -> list[str]:
    """Output to the terminal from outside ``nvep/cli``; ``nvep/testing`` may report to the test that started it."""
    found = []
    for path in python_files(root / "nvep"):
        if (root / "nvep" / "cli") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{path.relative_to(root)}:{node.lineno}: print")
            standard = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys"
            reports = (root / "nvep" / "testing") in path.parents
            if standard and not reports and node.attr in ("stdout", "stderr"):
                found.append(f"{path.relative_to(root)}:{node.lineno}: sys.{node.attr}")
    return found


def kernel_files(root: Path) -> Iterator[Path]:
    return (p for p in sorted((root / "nvep_kernels").rglob("*")) if p.suffix in KERNEL_SUFFIXES)


def include_violations(root: Path) -> list[str]:
    """Includes of kernels that leave ``nvep_kernels``. The emulator is host C++ and may use the standard library."""
    kernels = root / "nvep_kernels"
    found = []
    for path in kernel_files(root):
        emulator = (kernels / "emulator") in path.parents
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*#\s*include\s*(\S+)", line)
            if not match:
                continue
            what = match.group(1)
            if what.startswith("<") and emulator:
                continue
            inside = (kernels / what.strip('"<>')).resolve()
            if not (what.startswith('"') and inside.is_file() and inside.is_relative_to(kernels.resolve())):
                found.append(f"{path.relative_to(root)}:{number}: {what}")
    return found


def size_violations(root: Path) -> list[str]:
    """Files over their budget of lines."""
    found = []
    for folder in ("nvep", "nvep_kernels", "tests", "tools", "perf"):
        for path in sorted((root / folder).rglob("*")):
            budget = PYTHON_LINES if path.suffix == ".py" else KERNEL_LINES if path.suffix in KERNEL_SUFFIXES else 0
            if budget and len(path.read_text().splitlines()) > budget:
                lines = len(path.read_text().splitlines())
                found.append(f"{path.relative_to(root)}: {lines} lines, budget {budget}")
    return found


def function_violations(root: Path) -> list[str]:
    """Python functions that are too long (docstring not counted), public calls with too many parameters."""
    found = []
    for path in python_files(root / "nvep"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            where = f"{path.relative_to(root)}:{node.lineno}: {node.name}"
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - docstring
            if lines > FUNCTION_LINES:
                found.append(f"{where}: {lines} lines, budget {FUNCTION_LINES}")
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [a.arg for a in arguments if a.arg not in ("self", "cls")]
            # pytest, not a person, passes the parameters of a test.
            if not node.name.startswith(("_", "test_")) and len(names) > PUBLIC_PARAMETERS:
                found.append(f"{where}: {len(names)} parameters, budget {PUBLIC_PARAMETERS}")
    return found


def _without_comments_and_strings(text: str) -> str:
    """Blank them out, keeping every newline."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)


def kernel_body_violations(root: Path) -> list[str]:
    """C++ functions whose body is too long."""
    found = []
    for path in kernel_files(root):
        text = _without_comments_and_strings(path.read_text())
        for opening in re.finditer(r"\)\s*(?:const|noexcept|mutable|\s)*\{", text):
            start = opening.end() - 1
            depth = 0
            for position in range(start, len(text)):
                depth += {"{": 1, "}": -1}.get(text[position], 0)
                if depth == 0:
                    break
            lines = text.count("\n", start, position) + 1
            if lines > KERNEL_BODY_LINES:
                line = text.count("\n", 0, start) + 1
                found.append(f"{path.relative_to(root)}:{line}: body of {lines} lines, budget {KERNEL_BODY_LINES}")
    return found


def mirror_violations(root: Path) -> list[str]:
    """Alternatives on the host side without a header of the same name on the kernel side."""
    found = []
    for package in ("transports", "protocols"):
        for name in ALTERNATIVES[package]:
            host = root / "nvep" / package / f"{name}.py"
            device = root / "nvep_kernels" / package / f"{name}.cuh"
            if host.is_file() and not device.is_file():
                found.append(f"{host.relative_to(root)} has no {device.relative_to(root)}")
    return found
