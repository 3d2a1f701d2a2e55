"""The command `launcher`, and the package that has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher_scripts import launcher
from launcher_scripts.launcher import launcher_arguments, model_name
from tests.login.conftest import write_nemo

CORE = Path(__file__).parents[1] / "data" / "core"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launcher.shutil, "which", lambda _: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/gpt3_126m.nemo", "gpt3_126m"),
        ("/models/tiny-q4.gguf", "tiny-q4"),
        ("/runs/gpt/checkpoints/iter_0000100", "gpt"),
        (f"/hub/models--org--Qwen3-0.6B/snapshots/{'0a' * 20}", "Qwen3-0.6B"),
        ("/models/a model (1)", "a-model-1"),
        ("/models/gpt-2b/model.nemo", "gpt-2b"),
        ("/models/ensemble", "ensemble-model"),
        ("/", "model"),
    ],
)
def test_the_name_is_that_of_the_folder(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def test_convert_is_a_line_of_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr(launcher, "_run", lambda line: lines.append(line) or 0)
    assert launcher.main(["convert", "m", "out dir", "export.model.processes=2"]) == 0
    assert lines[0][1:] == [
        "stages=[export]",
        "cluster_type=interactive",
        f"base_results_dir={tmp_path}/results",
        "export.run.model_train_name=m",
        f"export.model.checkpoint_path={tmp_path}/m",
        "export.format=huggingface",
        f"export.huggingface.folder='{tmp_path}/out dir'",
        "export.model.processes=2",
    ]
    for words in (["convert", "m"], ["convert", "m", "export.model.processes=2"], ["convert"]):
        assert launcher.main(words) == 3
        assert (
            "convert needs the PATH of a checkpoint and the folder OUT" in capsys.readouterr().err
        )


def test_serve_is_a_line_of_main(tmp_path: Path) -> None:
    found = launcher_arguments("serve", Path("m"), ["export.model.processes=2"])
    assert found == [
        "stages=[export,deploy]",
        "cluster_type=interactive",
        f"base_results_dir={tmp_path}/results",
        "export.run.model_train_name=m",
        f"export.model.checkpoint_path={tmp_path}/m",
        "deploy.server.http_port=0",
        "deploy.server.grpc_port=0",
        "deploy.server.metrics_port=0",
        "deploy.gateway.port=8000",
        "export.model.processes=2",
    ]
    own = launcher_arguments("judge", Path("m"), ["cluster_type=bcm", "deploy.server.http_port=1"])
    assert own[0] == "stages=[export,deploy,evaluate]"
    assert "cluster_type=interactive" not in own and "deploy.server.http_port=0" not in own
    assert not any(argument.startswith("deploy.gateway") for argument in own)


def test_the_family_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    values = {"model_type": "t5", "vocab_size": 32, **sizes}
    for kind, export_file in (
        ("T5ForConditionalGeneration", "export=t5/export_t5"),
        ("T5EncoderModel", "export=t5/export_t5_encoder"),
    ):
        (folder / "config.json").write_text(json.dumps({**values, "architectures": [kind]}))
        found = launcher_arguments("serve", folder, [])
        assert found[0] == export_file
        assert "deploy.gateway.port=8000" in found
    core = CORE / "mcore016_t5_relative_a"
    for path in (core, core / "checkpoint"):
        assert launcher_arguments("serve", path, [])[0] == "export=t5/export_t5"
    assert launcher_arguments("serve", CORE / "mcore019_qwen3_nonhomog_a", [])[0][:6] == "stages"
    nemo = write_nemo(tmp_path / "n.nemo", encoder={"num_layers": 1}, decoder={})
    assert launcher_arguments("judge", nemo, [])[:2] == [
        "export=t5/export_t5",
        "stages=[export,deploy,evaluate]",
    ]


def test_without_a_path_there_is_one_line_of_advice(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, error in (
        (["serve"], "serve needs the PATH of a checkpoint"),
        (["serve", "a=b"], "serve needs the PATH of a checkpoint"),
        (["server", "x"], "unknown word server"),
    ):
        assert launcher.main(arguments) == 3
        assert capsys.readouterr().err.startswith(f"error: {error}\n")
    assert launcher.main([]) == 0
    assert "launcher serve PATH" in capsys.readouterr().out


@pytest.mark.slow
def test_the_package_has_all_that_the_command_needs(checkout: Path, tmp_path: Path) -> None:
    source = tmp_path / "checkout"
    names = ("launcher_scripts", "stages", "conf", "templates", "requirements")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in names:
        shutil.copytree(checkout / name, source / name, ignore=ignored)
    for name in ("main.py", "setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(checkout / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-q", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = "from nemo_deployment_launcher.launcher_scripts.launcher import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "serve", "/nowhere", "dry_run=True"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"python3 {tmp_path}/site/nemo_deployment_launcher/main.py")
    assert "deploy_nowhere" in result.stdout and "/nowhere" in result.stdout
