"""What ``nvep compile`` builds covers every kernel file and every pair of options."""

from itertools import combinations, product
from pathlib import Path

import nvep_kernels
from nvep.cli.catalog import COVERING, kernel_catalog


def test_every_kernel_file_is_built() -> None:
    files = {path.stem for path in (Path(nvep_kernels.__file__).parent / "kernels").glob("*.cu")}
    assert {source.name for _, source in kernel_catalog()} == files


def test_every_pair_of_options_meets() -> None:
    columns = list(zip(*COVERING, strict=True))
    for i, j in combinations(range(len(columns)), 2):
        wanted = set(product(set(columns[i]), set(columns[j])))
        assert set(zip(columns[i], columns[j], strict=True)) == wanted, f"columns {i} and {j}"


def test_labels_are_unique() -> None:
    labels = [label for label, _ in kernel_catalog()]
    assert len(labels) == len(set(labels))
