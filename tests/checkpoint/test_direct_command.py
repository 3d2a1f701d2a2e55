"""convert_checkpoint by flags: the same export, the same checks, and no Hydra."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.config.settings import ExportSettings, read_settings, write_settings
from launcher_scripts.steps import convert_checkpoint
from launcher_scripts.steps.command import fields
from tests.checkpoint.exporting import export_folder, weight_bytes

CASE = "nemo_gpt_tp2pp1_to2"


def flags(source: Path, target: Path, *more: str) -> list[str]:
    return ["--checkpoint-path", str(source), "--triton-model-dir", str(target), *more]


@pytest.fixture
def source(data_dir: Path) -> Path:
    return data_dir / "golden" / CASE / "m.nemo"


def test_same_files_as_by_settings(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = flags(source, tmp_path / "model", "--tensor-parallel-size", "2", "--tokenizer", "none")
    assert convert_checkpoint.main([*argv, "--weight-data-type=bf16", "--verify"]) == 0
    folder = tmp_path / "model" / "1" / "2-gpu"
    output = capsys.readouterr().out
    assert f"checkpoint {folder}\n" in output and "verified" in output
    assert weight_bytes(folder) == weight_bytes(
        export_folder(source, tmp_path / "other", 2, "bf16")
    )


def test_settings_from_flags() -> None:
    argv = flags(
        Path("a"),
        Path("b/gpt_126m"),
        *("--pipeline-parallel-size", "3", "--ia3-checkpoints", "x", "y", "--no-verify"),
        *("--num-attention-heads", "4", "--end-id", "7", "--tokenizer-vocab-file", "v.json"),
    )
    given = convert_checkpoint.FLAGS.settings(_parse(argv))
    assert given.model_name == "gpt_126m"
    assert (given.parallelism.tp_size, given.parallelism.pp_size) == (1, 3)
    assert given.ia3_checkpoints == ("x", "y")
    assert (given.num_attention_heads, given.verify, given.source) == (4, False, "auto")
    assert (given.tokenizer.end_id, given.tokenizer.vocab_file) == (7, "v.json")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    convert_checkpoint.FLAGS.add_to(parser)
    return parser.parse_args(argv)


def test_every_setting_has_a_flag_or_is_left_out() -> None:
    table = convert_checkpoint.FLAGS
    keys = {key for key, _, _ in fields(ExportSettings)}
    assert keys - {*table.options} == {"model_name", "model_type", *table.left_out}


def test_the_same_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--weight-data-type", "int4", "--source", "onnx", "--processes", "0")
    assert convert_checkpoint.main(flags(tmp_path / "no", tmp_path / "model", *more)) == 1
    error = capsys.readouterr().err
    assert "3 problems in the command line" in error
    assert "choices: auto, fp32, fp16, bf16" in error and "Traceback" not in error
    assert convert_checkpoint.main(flags(tmp_path / "no", tmp_path / "model")) == 1
    assert "the checkpoint does not exist" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--checkpoint-path, --triton-model-dir"),
        (["--checkpoint-path", "a", "--triton-model-dir", "b", "--verif"], "--verif"),
        (["--settings", "a.yaml", "--verify"], "--verify"),
        (["--checkpoint-path", "a", "--triton-model-dir", "b", "--processes", "x"], "int value"),
    ],
)
def test_misuse(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        convert_checkpoint.main(argv)
    assert caught.value.code == 3
    assert message in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert_checkpoint.main(["--help"])
    text = capsys.readouterr().out
    assert "--settings FILE" in text
    for name in ("--checkpoint-path PATH", "--tensor-parallel-size N", "--no-verify", "[auto]"):
        assert name in text


def test_a_settings_file_still_says_all(source: Path, tmp_path: Path) -> None:
    settings = convert_checkpoint.FLAGS.settings(
        _parse(flags(source, tmp_path / "model", "--tokenizer", "none"))
    )
    path = tmp_path / "settings.yaml"
    write_settings(settings, path)
    assert read_settings(ExportSettings, path) == settings
    assert convert_checkpoint.main([f"--settings={path}"]) == 0
    assert (tmp_path / "model" / "1" / "1-gpu" / "manifest.json").exists()


def test_without_hydra_torch_and_nemo(source: Path, tmp_path: Path, checkout: Path) -> None:
    """What is imported during a whole conversion."""
    code = (
        "import sys; from launcher_scripts.steps.convert_checkpoint import main; "
        "status = main(sys.argv[1:]); "
        "names = {name.partition('.')[0] for name in sys.modules}; "
        "print('found', sorted(names & {'hydra', 'omegaconf', 'torch', 'nemo', 'submitit'})); "
        "sys.exit(status)"
    )
    argv = flags(source, tmp_path / "model", "--tokenizer", "none")
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "found []" in done.stdout


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        (("--tensor-parallel-size", "3"), "change --tensor-parallel-size"),
        (("--num-attention-heads", "7"), "change --num-attention-heads"),
        (("--checkpoint-path", "/absent"), "change --checkpoint-path"),
        (("--source", "gguf"), None),
    ],
)
def test_errors_name_flags(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    advice: str | None,
) -> None:
    assert convert_checkpoint.main(flags(source, tmp_path / "model", *more)) == 1
    error = capsys.readouterr().err
    assert "export." not in error
    assert advice is None or advice in error


def test_keys_of_the_configuration_as_flags() -> None:
    table = convert_checkpoint.FLAGS
    assert table.in_flags("change export.model.overwrite=True, or export.model.tokenizer=none") == (
        "change --overwrite, or --tokenizer none"
    )
    sizes = "export.model.tensor_model_parallel_size, export.run.results_dir or deploy.run.nodes"
    flags = "--tensor-parallel-size, --triton-model-dir or deploy.run.nodes"
    assert table.in_flags(sizes) == flags
