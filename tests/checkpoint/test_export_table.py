"""The table of all shared checkpoints says what is so, and says when something is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import export_table


def test_rows(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shared_dir == export_table.SHARED
    names = ["t5_sp_learned_shared_tp2pp2_nemo1.18.1", "gpt_ia3_nemo1.18.1", "nemo_t5_tp1_to4"]
    assert export_table.main(names) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| gpt_ia3_nemo1.18.1 | ok, verified, on gpt_gpt2bpe_learned_nemo1.18.1; alone refused |",
        "| t5_sp_learned_shared_tp2pp2_nemo1.18.1 | "
        "ok, verified; bytes of t5_sp_learned_shared_nemo1.18.1 |",
        "| nemo_t5_tp1_to4 | 222 of 222 digests identical |",
    ]


def test_a_difference_is_a_failure(
    shared_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = {
        "t5_sp_relative_geglu_untied_tp2_nemo1.18.1": "t5_sp_relative_rmsnorm_nobias_nemo1.18.1"
    }
    monkeypatch.setattr(export_table, "SAME", twins)
    monkeypatch.setattr(export_table, "digests", lambda _case: {"model.wte.bin": "0"})
    assert (shared_dir / "golden").is_dir()
    assert export_table.main([*twins, "nemo_gpt_tp1pp1_to1"]) == 1
    output = capsys.readouterr().out
    assert "RuntimeError: other bytes than" in output
    assert "52 of 1 digests differ" in output
