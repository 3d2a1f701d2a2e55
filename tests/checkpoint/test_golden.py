"""Byte for byte what FasterTransformer v5.3's own NeMo converter wrote from the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.exporting import export_folder
from tests.checkpoint.golden_cases import digests, found_digests

CASES = (
    "nemo_gpt_tp1pp1_to2",
    "nemo_gpt_tp1pp1_to1_fp16",
    "nemo_gpt_tp2pp1_to2",
    "nemo_gpt_bf16src_to1",
)


@pytest.mark.parametrize("case", CASES)
def test_same_bytes(case: str, data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "golden" / case
    check(folder / "m.nemo", folder, tmp_path)


def test_same_bytes_for_all(shared_dir: Path, tmp_path: Path) -> None:
    cases = sorted((shared_dir / "golden").glob("nemo_gpt_*"))
    assert len(cases) >= 6
    for case in cases:
        check(case / "input" / "m.nemo", case, tmp_path / case.name)


def check(source: Path, case: Path, target: Path) -> None:
    tp_size = 2 if "_to2" in case.name else 1
    folder = export_folder(source, target, tp_size, "fp16" if "fp16" in case.name else "fp32")
    assert found_digests(folder) == digests(case)
    # The original's keys, in its order, come first.
    config = (folder / "config.ini").read_text()
    assert config.startswith((case / "config.ini").read_text().rstrip("\n") + "\n")
