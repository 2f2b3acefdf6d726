"""Download what ``pip install .`` needs and add it up: the CPU path must stay within its budget.

Run by hand (``make wheel-size``): it fetches about 110 MB unless pip's cache holds them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

BUDGET_BYTES = 120_000_000
REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print each wheel's size and the sum; return 1 if the sum is above the budget."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", folder]
        # Wheels only: an sdist would need a compiler, which users of the CPU path need not have.
        result = subprocess.run([*pip, "--only-binary", ":all:", str(REPOSITORY)], check=False)
        if result.returncode:
            return 1
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.2f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:8.2f} MB  in {len(sizes)} files; budget {BUDGET_BYTES / 1e6:.0f} MB")
    return 0 if total <= BUDGET_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
