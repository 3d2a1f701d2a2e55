"""The quickstart's own logic; the way itself is run by `make quickstart`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from launcher_scripts.checkpoint.sources.gguf_llama import GGUFLlama
from launcher_scripts.steps import quickstart
from tests.processes import wait_for

METRICS = {"perplexity": {"value": 2.0}, "last_token_accuracy": {"value": 0.5}}


def _items(*, last: float = -2.0) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "target": word,
            "correct": correct,
            "log_likelihood": likelihood,
            "last_token_correct": correct,
        }
        for index, (word, correct, likelihood) in enumerate(
            [(" door", True, -0.5), (" Helen", False, last)]
        )
    ]


@pytest.fixture
def results_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder with a report that agrees with the reference."""
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"metrics": METRICS, "items": _items()}))
    monkeypatch.setattr(quickstart, "REFERENCE", reference)
    _report(tmp_path, _items(last=-2.001))
    return tmp_path


def _report(results_dir: Path, items: list[dict[str, Any]]) -> None:
    folder = results_dir / "evaluate"
    folder.mkdir(exist_ok=True)
    tasks = {"lambada": {"metrics": METRICS, "items": items}}
    (folder / "report.json").write_text(json.dumps({"tasks": tasks}))


def test_the_last_lines_are_the_table_and_the_report(
    results_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart.show(results_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"report: {results_dir / 'evaluate' / 'report.html'}"
    table = "\n".join(lines)
    assert "1/2 = 50.0 %" in table
    assert "2 of 2" in table
    assert "1.0e-03" in table


@pytest.mark.parametrize(
    "change",
    [
        {"correct": True},
        {"last_token_correct": True},
        {"log_likelihood": -2.5},
        {"target": " Ann"},
    ],
)
def test_one_differing_item_fails(
    results_dir: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    items = _items()
    items[1] |= change
    _report(results_dir, items)
    assert quickstart.show(results_dir) == 1
    out = capsys.readouterr().out
    assert out.startswith("item 1: served")
    assert "1 of 2" in out


def test_missing_items_fail(results_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _report(results_dir, _items()[:1])
    assert quickstart.show(results_dir) == 1
    assert "1 items were evaluated; the reference has 2" in capsys.readouterr().out


def test_paths_survive_hydras_command_line(tmp_path: Path) -> None:
    nasty = tmp_path / "a 'b' \\c\\'d, $(e) ${f}=[g]\\"
    parser = OverridesParser.create()
    arguments = {
        argument.partition("=")[0]: argument for argument in quickstart.command(nasty, nasty)
    }
    for key in ("base_results_dir", "export.model.checkpoint_path"):
        value = str(parser.parse_override(arguments[key]).value())
        assert OmegaConf.create({"path": value}).path == str(nasty)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cpu"), (2, "auto")])
def test_two_ranks_want_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str
) -> None:
    lines = "".join(f"echo 'GPU {number}: NVIDIA H200 (UUID: GPU-0)'\n" for number in range(gpus))
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert quickstart.device() == device


def test_without_a_driver_the_ranks_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert quickstart.device() == "cpu"


def test_the_shipped_model_is_the_one_described() -> None:
    llama = GGUFLlama(quickstart.gguf_file())
    shape = llama.shape
    assert (shape.num_layers, shape.hidden_size, shape.ffn_size) == (30, 576, 1536)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_size) == (9, 3, 64)
    assert (shape.vocab_size, shape.rotary_base, shape.norm_eps) == (49152, 100000.0, 1e-5)
    assert llama.tied_embeddings


def test_the_launchers_exit_code_is_handed_on() -> None:
    assert quickstart.run([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_a_signal_ends_the_launcher_too(tmp_path: Path) -> None:
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
    child += f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(600)"
    parent = (
        "import sys; from launcher_scripts.steps import quickstart; "
        f"sys.exit(quickstart.run([sys.executable, '-c', {child!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=quickstart.CHECKOUT)
    try:
        wait_for((tmp_path / "up").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 7
    finally:
        process.kill()
        process.wait()
