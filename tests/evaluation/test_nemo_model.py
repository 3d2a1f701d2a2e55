"""NeMo itself as a reference, and as the reader of what the export refuses.

What needs NeMo runs with `--nemo-python`: a Python with nemo_toolkit 1.23 (docs/nemo-toolkit.md).
"""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.evaluation.comparison import compare, open_reference, read_report
from launcher_scripts.steps import convert_checkpoint, resave_checkpoint
from tests.whole_job import WORDS, run_whole_job

FIXTURE = "fixtures/nemo/gpt_gpt2bpe_learned_nemo1.23.0/model.nemo"
STAND_INS = Path(__file__).parent / "nemo_stand_ins"


# A class of somebody's own, which the export's reader does not create.
OWN_CLASS = "import collections\n\n\nclass TrainingState(collections.OrderedDict): ...\n"


@pytest.fixture
def run_in_nemo(request: pytest.FixtureRequest, checkout: Path, tmp_path: Path, data_dir: Path):
    """Run a step with NeMo's Python."""
    python = request.config.getoption("--nemo-python")
    if python is None:
        pytest.skip("--nemo-python names no Python with nemo_toolkit")
    # NeMo asks Hugging Face for the tokenizer `gpt2`, unless there is a folder of that name.
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    for path in (data_dir / "tokenizers" / "gpt2bpe").iterdir():
        (tmp_path / "gpt2" / path.name).write_bytes(path.read_bytes())

    def run(step: str, *arguments: str | Path) -> None:
        path = os.pathsep.join(map(str, (STAND_INS, checkout)))
        ran = subprocess.run(
            [python, "-m", f"launcher_scripts.steps.{step}", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]

    return run


def with_own_class(source: Path, target: Path, kind: type) -> None:
    """The same checkpoint, with its weights in an object of `kind`."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            file = old.extractfile(member)
            content = file.read() if file is not None else b""
            if member.name.endswith(".ckpt"):
                state = kind(torch.load(io.BytesIO(content), weights_only=True))
                saved = io.BytesIO()
                torch.save(state, saved)
                content = saved.getvalue()
            member.size = len(content)
            new.addfile(member, io.BytesIO(content) if member.isfile() else None)


def export(checkpoint: Path, folder: Path) -> int:
    flags = ["--checkpoint-path", str(checkpoint), "--triton-model-dir", str(folder)]
    return convert_checkpoint.main([*flags, "--weight-data-type", "fp32"])


@pytest.mark.slow
def test_nemo_resaves_what_the_export_refuses(
    run_in_nemo,
    shared_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = tmp_path / "own.nemo", tmp_path / "saved.nemo"
    (tmp_path / "own_training.py").write_text(OWN_CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_training")
    with_own_class(shared_dir / FIXTURE, source, own.TrainingState)
    assert export(source, tmp_path / "refused") == 1
    assert "TrainingState" in capsys.readouterr().err
    run_in_nemo("resave_checkpoint", source, target)
    assert export(target, tmp_path / "taken") == 0
    assert export(shared_dir / FIXTURE, tmp_path / "original") == 0
    made, right = (read_manifest(tmp_path / name / "1" / "1-gpu") for name in ("taken", "original"))
    assert made is not None and right is not None
    weights = {entry.name: entry.digest for entry in right.files if entry.dtype is not None}
    assert weights and weights.items() <= {e.name: e.digest for e in made.files}.items()
    assert not list(tmp_path.glob("*.partial*"))


@pytest.mark.slow
def test_nemo_is_the_reference_of_an_evaluation(
    run_in_nemo, shared_dir: Path, tmp_path: Path, data_dir: Path
) -> None:
    """What it scores (lambada) and what it generates (squad) are the served model's."""
    (tmp_path / "job").mkdir()
    questions = f"{{data_file: {data_dir}/tasks/squad.json, limit: 2, batch_size: 2,"
    questions += " reference: null, generation: {output_len: 8, max_input_len: 40}}"
    run_whole_job(
        tmp_path / "job",
        Path(sys.executable),
        checkpoint=shared_dir / FIXTURE,
        options={"+evaluate.tasks.squad": questions},
    )
    (settings,) = (tmp_path / "job").rglob("evaluate_*_hydra.yaml")
    arguments = ("--checkpoint", shared_dir / FIXTURE, "--results-dir", tmp_path / "reference")
    run_in_nemo("measure_reference", "--settings", settings, *arguments)
    (served_file,) = (tmp_path / "job").rglob("report.json")
    for name in ("squad", "lambada"):
        task = TaskSettings(name, "items", limit=len(WORDS))
        served = read_report(served_file, task)
        reference = read_report(tmp_path / "reference" / "report.json", task)
        assert compare(served, reference, "NeMo").different == []
    for ours, theirs in zip(served.items, reference.items, strict=True):
        assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], abs=1e-3)
    content = json.loads((tmp_path / "reference" / "report.json").read_text())
    measured_on = content["tasks"]["lambada"]["measured_on"]
    assert measured_on["server"]["http"].startswith("NeMo 1.")
    assert measured_on["server"]["versions"]["nemo_toolkit"]


def test_a_nemo_reference_needs_nemo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nemo", None)
    (tmp_path / "m.nemo").touch()
    with pytest.raises(ConfigError, match=r"has no NeMo .*docs/nemo-toolkit\.md"):
        open_reference(TaskSettings("lambada", "items.jsonl", reference=str(tmp_path / "m.nemo")))


def test_what_is_resaved_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nemo", None)
    source, target = tmp_path / "m.nemo", tmp_path / "new.nemo"
    assert resave_checkpoint.main([str(source), str(target)]) == 1
    assert "no such checkpoint" in capsys.readouterr().err
    source.touch()
    assert resave_checkpoint.main([str(source), str(source)]) == 1
    assert "must be a new .nemo file" in capsys.readouterr().err
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    assert resave_checkpoint.main([str(source), str(target)]) == 1
    assert "docs/nemo-toolkit.md" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [source]
