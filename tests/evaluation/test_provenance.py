"""What a section says of where its figures come from."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.files import file_digest, value_digest
from launcher_scripts.config.evaluation import GenerationSettings, TaskSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation import report
from launcher_scripts.evaluation.report import data_files, digests, project_commit
from launcher_scripts.steps import measure_accuracy, measure_reference
from tests.evaluation.fake_server import FakeServer, logits_after
from tests.evaluation.test_steps import announce, settings_file


def settings(folder: Path, **changes: Any) -> EvaluateSettings:
    tasks = (TaskSettings("lambada", "items.jsonl"),)
    values = {
        "ready_file": "r",
        "results_dir": "x",
        "model_name": "m",
        "tokenizer_dir": str(folder),
    }
    return EvaluateSettings(**values, tasks=tasks, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with a chat template in its configuration, and a manifest."""
    (tmp_path / "tokenizer.json").write_text("{}")
    said = {"chat_template": "{{ messages }}", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "manifest.json").write_text('{"files": []}')
    return tmp_path


def test_digests_are_blake2b(tmp_path: Path) -> None:
    """The digest of nothing is that of the reference implementation."""
    (tmp_path / "empty").touch()
    empty = "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    assert file_digest(tmp_path / "empty") == empty
    assert value_digest({"a": 1, "b": [None]}) == value_digest({"b": [None], "a": 1})
    assert value_digest({"a": 1}) != value_digest({"a": 2})


@pytest.mark.skipif(shutil.which("b2sum") is None, reason="b2sum is of the GNU coreutils")
def test_digests_are_those_of_b2sum(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(range(256)) * 5000)
    said = subprocess.run(["b2sum", "-l", "256", file], capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == file_digest(file)


@pytest.mark.parametrize(
    ("name", "content", "changes"),
    [
        ("tokenizer.json", '{"a": 1}', {"tokenizer"}),
        ("special_tokens_map.json", '{"bos_token": "<s>"}', {"tokenizer"}),
        (
            "tokenizer_config.json",
            '{"add_bos_token": true, "chat_template": "other"}',
            {"chat_template"},
        ),
        (
            "tokenizer_config.json",
            '{"add_bos_token": false, "chat_template": "{{ messages }}"}',
            {"tokenizer"},
        ),
        ("chat_template.jinja", "other", {"chat_template"}),
        ("generation_config.json", "{}", set()),
        ("manifest.json", '{"files": [1]}', {"manifest", "system_fingerprint"}),
    ],
)
def test_a_digest_changes_with_its_own_file_alone(
    folder: Path, name: str, content: str, changes: set[str]
) -> None:
    before = digests(settings(folder))
    (folder / name).write_text(content)
    after = digests(settings(folder))
    assert {key for key in before if before[key] != after[key]} == changes
    assert len(before["manifest"]) == 64 and "reasons" not in before
    assert before["system_fingerprint"] == f"fp_{before['manifest'][:12]}"


def test_what_is_not_there_is_null_with_its_reason(tmp_path: Path) -> None:
    found = digests(settings(tmp_path), [str(tmp_path / "absent")])
    assert (found["manifest"], found["tokenizer"], found["chat_template"]) == (None, None, None)
    assert found["reasons"] == {
        "manifest": f"{tmp_path / 'manifest.json'}: No such file or directory",
        "tokenizer": f"{tmp_path} has no tokenizer",
    }
    assert found["data"] == {}
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "tokenizer" in digests(settings(tmp_path))["reasons"]


def test_the_configuration_is_what_figures_depend_on(folder: Path) -> None:
    given = settings(folder)
    before = digests(given)["configuration"]
    elsewhere = replace(given, results_dir="y", ready_file="z", resume=False, ready_timeout=1.0)
    assert digests(elsewhere)["configuration"] == before
    assert digests(replace(given, model_name="other"))["configuration"] != before


def test_the_data_of_a_task_are_all_its_files() -> None:
    generation = GenerationSettings(target_file="to/b.de")
    task = TaskSettings("translation", "to/a.en", generation=generation)
    assert data_files(task) == ("to/a.en", "to/b.de")


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_is_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CHECKOUT", tmp_path)
    assert project_commit() is None
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "m")):
        (tmp_path / "file").write_text("a")
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    commit = project_commit()
    assert commit is not None and len(commit) == 40
    (tmp_path / "file").write_text("b")
    assert project_commit() == f"{commit}-dirty"


def test_a_section_says_what_it_was_measured_on(job: Path) -> None:
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(["--settings", settings_file(job)]) == 0
    section = json.loads((job / "results" / "report.json").read_text())["tasks"]["lambada"]
    on = section["measured_on"]
    assert on["digests"]["data"] == {"items.jsonl": file_digest(job / "items.jsonl")}
    assert len(on["digests"]["tokenizer"]) == len(on["digests"]["configuration"]) == 64
    assert on["digests"]["manifest"] is None and "manifest" in on["digests"]["reasons"]
    assert on["parameters"] == {"max_batch_size": 4}
    assert on["runs"] == [on["date"]]
    assert {"commit", "python", "tokenizers", "numpy"} <= set(on["client"])


def test_a_reference_of_nemo_goes_on_and_has_no_manifest(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is not the served checkpoint that answers."""
    (job / "manifest.json").write_text("{}")
    (job / "m.nemo").touch()
    scored = []

    class Original:
        name, device, versions = "NeMo 1.0", "cpu", {"nemo_toolkit": "1.0"}

        def __init__(self, _path: Path) -> None:
            pass

        def score(self, rows: Any, _in_flight: int) -> Any:
            for row in rows:
                scored.append(row)
                if len(scored) == 2:
                    return  # without the others
                yield logits_after(row)

    monkeypatch.setattr(measure_reference, "NemoReference", Original)
    arguments = ["--settings", settings_file(job), "--checkpoint", str(job / "m.nemo")]
    arguments += ["--results-dir", str(job / "reference")]
    with pytest.raises(ValueError, match="zip"):
        measure_reference.main(arguments)
    assert measure_reference.main(arguments) == 0
    assert "lambada continues after 1 results" in capsys.readouterr().err
    assert len(scored) == 4
    section = json.loads((job / "reference" / "report.json").read_text())["tasks"]["lambada"]
    reasons = section["measured_on"]["digests"]["reasons"]
    assert reasons == {"manifest": "NeMo 1.0 was asked, not the served checkpoint"}
    assert [path.name for path in (job / "reference").iterdir() if path.is_dir()] == []
