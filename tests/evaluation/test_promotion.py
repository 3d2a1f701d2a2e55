"""What an evaluation does after its verdict with a server that is held back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.files import may_publish
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation import gate
from launcher_scripts.evaluation.gate import promote


def settings(folder: Path, published_as: str | None, replicas: int = 0) -> EvaluateSettings:
    where = str(folder)
    return EvaluateSettings(
        *(where, where, "tiny", where),
        benchmark=BenchmarkSettings(),
        server_job_folder=where,
        published_as=published_as,
        replicas=replicas,
    )


def test_a_server_that_was_not_held_back_is_left_alone(tmp_path: Path) -> None:
    promote(settings(tmp_path, None), "GO")
    promote(settings(tmp_path, str(tmp_path / "ready.json")), "INCONCLUSIVE")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_publish_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(gate, "_POLL_SECONDS", 0.0)
    held_back = settings(tmp_path, str(tmp_path / "ready.json"), replicas=2)
    facts = json.dumps({"job": {"folder": str(tmp_path)}})
    (tmp_path / "ready-0.json").write_text(facts)
    (tmp_path / "ready-1.json").write_text(facts.replace("folder", "other"))
    with pytest.raises(ServerError, match=r"has not published its address.*ready-1\.json'\]"):
        promote(held_back, "GO")
    assert may_publish(tmp_path)
    (tmp_path / "ready-1.json").write_text(facts)
    promote(held_back, "GO")
    assert "ready-0.json, " in capsys.readouterr().out
