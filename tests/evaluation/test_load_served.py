"""A load test of a real server on the CPU, through all three paths, as the step does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.packages import ERROR
from launcher_scripts.config.evaluation import GoodputBounds, LoadPrompts, LoadSettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.steps import measure_load
from tests.gateway.processes import gateway
from tests.server.processes import RunningStep

pytestmark = pytest.mark.usefixtures("tritonserver")
INPUT, OUTPUT, REQUESTS = 12, 6, 8


def measured(folder: Path, ready_file: Path, model: str, **more: Any) -> dict[str, Any]:
    """The report's section; `more` are LoadSettings."""
    ready = json.loads(ready_file.read_text())
    values = {
        "clients": (2,),
        "requests": REQUESTS,
        "seconds": None,
        "warmup": 0.0,
        "prompts": LoadPrompts(input=INPUT, output=OUTPUT),
        **more,
    }
    settings = EvaluateSettings(
        ready_file=str(ready_file),
        results_dir=str(folder / "results"),
        model_name=model,
        tokenizer_dir=f"{ready['model_repository']}/{model}/1/1-gpu",
        load=LoadSettings(**values),
        protocol="grpc",
        ready_timeout=10.0,
    )
    write_settings(settings, folder / "settings.yaml")
    code = measure_load.main(["--settings", str(folder / "settings.yaml")])
    load: dict[str, Any] = json.loads((folder / "results" / "report.json").read_text())["load"]
    assert code == (0 if any(run["valid"] for run in load["runs"]) else ERROR)
    return load


def test_the_three_paths_give_every_token(shared_server: RunningStep, tmp_path: Path) -> None:
    ready_file = shared_server.settings.ready_file
    with gateway(tmp_path / "gateway", "--ready", str(ready_file), "--models", "gpt") as door:
        load = measured(
            tmp_path,
            ready_file,
            "gpt",
            paths=("gateway", "grpc", "http"),
            rates=(50.0,),
            gateway=door.facts["openai"],
            bounds=GoodputBounds(latency_ms=60_000.0),
        )
    assert [(run["path"], run["mode"]) for run in load["runs"]] == [
        (path, mode) for path in ("gateway", "grpc", "http") for mode in ("closed", "open")
    ]
    for run in load["runs"]:
        # A busy machine delays the client, too, which says so; nothing else may be wrong.
        assert all("client was the bottleneck" in reason for reason in run["invalid_reasons"])
        assert (run["requests"], run["failed"]) == (REQUESTS, 0)
        assert run["prompt_tokens"] == REQUESTS * INPUT
        assert run["generated_tokens"] == REQUESTS * OUTPUT
        assert sum(row["tokens"] for row in run["timeline"]) == REQUESTS * OUTPUT
        assert run["goodput"] == run["requests_per_second"] > 0
        assert 0 < run["first_token_ms"]["p50"] <= run["latency_ms"]["p50"]
    assert load["saturation"] is None


def test_whole_answers_over_both_of_tritons_ways(
    shared_server: RunningStep, tmp_path: Path
) -> None:
    paths = ("grpc", "http")
    load = measured(tmp_path, shared_server.settings.ready_file, "plain", paths=paths)
    for run in load["runs"]:
        assert (run["generated_tokens"], run["failed"]) == (REQUESTS * OUTPUT, 0)
        assert run["first_token_ms"] is run["between_tokens_ms"] is None
        assert run["latency_ms"]["p50"] > 0
