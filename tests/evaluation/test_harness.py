"""lm_eval as a step: what it is asked, what its files say, and what is said when it cannot run.

A program that stands in for the interpreter of lm_eval writes files that lm_eval 0.4.13 wrote.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.common.packages import ERROR
from launcher_scripts.config.evaluation import HarnessSettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.evaluation import harness
from launcher_scripts.evaluation.lm_eval_program import MISSING, NO_DATA
from launcher_scripts.steps import run_harness
from tests.evaluation.fake_server import FakeServer

RECORDED = Path(__file__).parents[1] / "data" / "lm_eval"
KEY = "secret-key"
STAND_IN = f"""#!{sys.executable}
import json, os, shutil, sys
from pathlib import Path
here = Path(sys.argv[0]).parent
if sys.argv[2] == "version":
    print("lm_eval 0.4.13")
    with (here / "version_asked").open("a") as file:
        file.write("asked\\n")
    sys.exit(int((here / "version_exits").read_text()))
(here / "asked.json").write_text(json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]))
output = Path(sys.argv[sys.argv.index("--output_path") + 1]) / "counting"
answers = Path(sys.argv[sys.argv.index("--use_cache") + 1] + "_rank0.db")
with answers.open("a") as file:
    file.write("asked\\n")
(here / "answers").write_text(answers.read_text())
if (here / "writes").read_text():
    shutil.copytree("{RECORDED}", output)
sys.exit(int((here / "run_exits").read_text()))
"""


@pytest.fixture
def gateway() -> Iterator[str]:
    """The address of something that lists the model `counting` to those who have the key."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            keyed = self.headers["Authorization"] == f"Bearer {KEY}"
            self.send_response(200 if keyed else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "counting", "max_model_len": 64}]}')

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with the stand-in, a file of keys and one of data sets."""
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    for name, content in (("version_exits", "0"), ("run_exits", "0"), ("writes", "yes")):
        (tmp_path / name).write_text(content)
    (tmp_path / "keys").write_text(f"first={KEY}\nsecond=other\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "data").mkdir()
    return tmp_path


def asked(job: Path, **changes: Any) -> HarnessSettings:
    values: dict[str, Any] = {
        "tasks": ("lambada_openai", "boolq"),
        "data": str(job / "data"),
        "limit": 5,
        "api_keys": str(job / "keys"),
        "python": str(job / "python"),
    }
    return HarnessSettings(**values | changes)


def run(job: Path, server: FakeServer, *, resume: bool = True, **changes: Any) -> int:
    """The step's exit status. openai: what the server's ready file says of its gateway."""
    openai = changes.pop("openai", None)
    ready = {"http": server.address, "models": ["counting"], "versions": {}, "ranks": []}
    (job / "ready.json").write_text(json.dumps(ready | ({"openai": openai} if openai else {})))
    settings = EvaluateSettings(
        ready_file=str(job / "ready.json"),
        results_dir=str(job / "results"),
        model_name="counting",
        tokenizer_dir=str(job),
        harness=asked(job, **changes),
        ready_timeout=0.5,
        resume=resume,
    )
    write_settings(settings, job / "settings.yaml")
    return run_harness.main(["--settings", str(job / "settings.yaml")])


def test_lm_eval_is_asked_and_its_figures_are_reported(
    job: Path, gateway: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/job")
    (job / "results" / "harness").mkdir(parents=True)
    (job / "results" / "harness" / "results_earlier.json").touch()
    with FakeServer() as server:
        assert run(job, server, openai=gateway, num_fewshot=2) == 0
    assert (job / "version_asked").read_text() == "asked\n"  # starting an interpreter takes time
    argv, env, folder = json.loads((job / "asked.json").read_text())
    model = json.loads(argv[argv.index("--model_args") + 1])
    assert model["base_url"] == f"{gateway}/completions"
    assert (model["model"], model["max_length"], model["num_concurrent"]) == ("counting", 64, 8)
    assert argv[argv.index("--tasks") + 1 :][:2] == ["lambada_openai", "boolq"]
    assert argv[-6:-2] == ["--limit", "5", "--num_fewshot", "2"]
    # Nothing is downloaded, the key is not on the command line, and packages do not mix.
    assert folder == str(job / "data")
    assert (env["HF_DATASETS_OFFLINE"], env["HF_HUB_OFFLINE"]) == ("1", "1")
    assert env["OPENAI_API_KEY"] == KEY and KEY not in " ".join(argv)
    assert "PYTHONPATH" not in env

    report = json.loads((job / "results" / "report.json").read_text())
    section = report["harness"]
    assert section["version"] == "0.4.13" and KEY not in json.dumps(report)
    boolq, lambada = section["tasks"]["boolq"], section["tasks"]["lambada_openai"]
    assert (boolq["items"], boolq["version"], lambada["version"]) == (5, 2.0, 1.0)
    assert set(lambada["metrics"]) == {"acc", "perplexity"}
    assert boolq["metrics"]["acc"] == {
        "value": 0.6,
        "low": pytest.approx(0.6 - 1.959964 * 0.244949, abs=1e-5),
        "high": 1.0,
        "percent": True,
        "meaning": "lm_eval's acc",
    }
    files = {path.name for path in (job / "results" / "harness").rglob("*.json*")}
    assert files == {Path(name).name for name in section["files"]}
    assert len(files) == 3
    for name in ("boolq", "lambada_openai"):
        samples = job / "results" / "harness" / section["tasks"][name]["samples"]
        assert json.loads(samples.read_text().splitlines()[0])["doc_id"] == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["lm_eval", "0.4.13", "items", "value", "95", "%", "interval"]
    assert ["boolq", "acc", "5", "60.0", "%"] in [line.split()[:5] for line in lines]


def test_lm_eval_keeps_its_answers_until_the_evaluation_is_done(job: Path, gateway: str) -> None:
    """Of the same weights alone, and not where all is to be asked anew."""
    journals, answers = job / "results" / "journal", job / "answers"
    (job / "manifest.json").write_text("{}")
    (job / "run_exits").write_text("1")
    with FakeServer() as server:

        def asked_before(**options: bool) -> int:
            """How often lm_eval had these answers already, in a run that fails."""
            assert run(job, server, openai=gateway, **options) == ERROR
            return len(answers.read_text().splitlines()) - 1

        assert [asked_before(), asked_before()] == [0, 1]
        (job / "manifest.json").write_text('{"other": "weights"}')
        assert [asked_before(), asked_before()] == [0, 1]
        assert asked_before(resume=False) == 0
        (job / "run_exits").write_text("0")
        assert run(job, server, openai=gateway) == 0
    assert len(answers.read_text().splitlines()) == 2
    assert not journals.exists()


def task_of(values: dict[str, Any], folder: Path) -> harness.HarnessTask:
    """What is read of the results of one task."""
    (folder / "results_now.json").write_text(json.dumps({"results": {"t": values}}))
    return harness.read_results(folder, "0.4.13").tasks["t"]


def test_the_interval_of_a_perplexity_is_that_of_its_logarithm(tmp_path: Path) -> None:
    metric = task_of({"perplexity,none": 10.0, "perplexity_stderr,none": 5.0}, tmp_path).metrics[
        "perplexity"
    ]
    assert metric.low is not None and metric.high is not None
    assert metric.low > 0 and metric.low * metric.high == pytest.approx(100.0)
    assert metric.high == pytest.approx(10 * 2.664408, rel=1e-5)


def test_filters_and_figures_without_an_error(tmp_path: Path) -> None:
    values = {
        "alias": " - t",
        "exact_match,strict-match": 0.5,
        "exact_match_stderr,strict-match": "N/A",
        "bleu,none": 12.0,
        "bleu_stderr,none": 1.0,
        "f1,none": 0.25,
        "f1_stderr,none": math.nan,
    }
    task = task_of(values, tmp_path)
    assert set(task.metrics) == {"exact_match,strict-match", "bleu", "f1"}
    assert (task.metrics["f1"].value, task.metrics["f1"].low) == (0.25, None)
    exact = task.metrics["exact_match,strict-match"]
    assert (exact.low, exact.percent) == (None, True)
    assert exact.meaning == "lm_eval's exact_match, filter strict-match"
    bleu = task.metrics["bleu"]
    assert (bleu.percent, bleu.high) == (False, pytest.approx(13.959964))


@pytest.mark.parametrize(
    ("files", "changes", "says"),
    [
        ({"version_exits": str(MISSING)}, {}, "python -m pip install -r requirements/harness.txt"),
        ({}, {"python": "/nowhere/python"}, "cannot run /nowhere/python"),
        ({}, {"python": "/bin/true"}, "/bin/true does not have lm_eval; run: /bin/true -m pip"),
        (
            {},
            {"openai": None},
            "has no gateway, and lm_eval asks one; change deploy.gateway.port=0",
        ),
        ({}, {"api_keys": None}, "wants an API key; change evaluate.harness.api_keys"),
        ({"keys": "a=wrong\n"}, {}, "wants an API key, and another one"),
        ({"run_exits": str(NO_DATA)}, {}, "does not have a data set of the tasks"),
        ({"run_exits": "1"}, {}, "lm_eval ended with exit status 1"),
        ({"writes": ""}, {}, "lm_eval wrote no file of results"),
    ],
)
def test_what_cannot_work_is_one_line_and_no_report(
    job: Path,
    gateway: str,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, str],
    changes: dict[str, Any],
    says: str,
) -> None:
    for name, content in files.items():
        (job / name).write_text(content)
    with FakeServer() as server:
        assert run(job, server, **{"openai": gateway, **changes}) == ERROR
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert not (job / "results" / "report.json").exists()
    assert not (job / "results" / "harness").exists()


def test_a_gateway_of_its_own_is_waited_for(job: Path, gateway: str) -> None:
    file = job / "gateway.json"
    settings = EvaluateSettings("", "", "counting", "", harness=asked(job), ready_timeout=60.0)
    timer = threading.Timer(0.3, lambda: file.write_text(json.dumps({"openai": gateway})))
    timer.start()
    found = harness.find_gateway(settings, asked(job, gateway=str(file)), {"openai": "http://no"})
    timer.join()
    assert found == harness.HarnessGateway(gateway, "counting", 64, KEY)


def test_a_gateway_of_other_models_is_refused(job: Path, gateway: str) -> None:
    settings = EvaluateSettings("", "", "tiny", "", harness=asked(job))
    with pytest.raises(ConfigError, match="does not serve the model; got 'tiny'; choices: count"):
        harness.find_gateway(settings, asked(job, gateway=gateway), {})


def test_results_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results_1.json").write_text('{"results": []}')
    with pytest.raises(ServerError, match=r"results_1.json is not a file of lm_eval's results"):
        harness.read_results(tmp_path, "0.4.13")
    (tmp_path / "results_1.json").unlink()
    with pytest.raises(ServerError, match=r"perplexity,none of t is nan"):
        task_of({"perplexity,none": math.nan}, tmp_path)
