"""Both measuring steps as commands, against a server over real sockets."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.config.evaluation import BenchmarkSettings, TaskSettings
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.steps import judge, measure_accuracy, measure_speed
from tests.evaluation.fake_server import FakeServer
from tests.processes import read, wait_for, wait_until_gone

ROOT = Path(__file__).parents[2]


def settings_file(job, **changes):
    values = {
        "ready_file": str(job / "ready.json"),
        "results_dir": str(job / "results"),
        "model_name": "counting",
        "tokenizer_dir": str(job),
        "tasks": (TaskSettings("lambada", str(job / "items.jsonl"), batch_size=2),),
        "benchmark": BenchmarkSettings(batch_sizes=(1, 2), lengths=((4, 3),), requests=2, warmup=1),
        "ready_timeout": 5.0,
    }
    write_settings(EvaluateSettings(**(values | changes)), job / "settings.yaml")
    return str(job / "settings.yaml")


def announce(job, server):
    ready = {"http": server.address, "models": ["counting"], "versions": {}, "ranks": []}
    (job / "ready.json").write_text(json.dumps(ready))


def test_both_steps_fill_one_report(job, capsys):
    arguments = ["--settings", settings_file(job)]
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["lambada", "(3", "items)", "value", "95", "%", "interval"]
        assert lines[1].split()[:3] == ["accuracy", "66.7", "%"]
        assert lines[-1] == f"report: {job / 'results' / 'report.html'}"
        scored = [tensors["input_ids"].tolist() for tensors in server.received]
        assert sorted(scored) == [[[0, 1, 2]], [[1]], [[10]]]  # no token before the text's own
        assert measure_speed.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["1", "4", "3"], ["2", "4", "3"]]
    assert lines[-1] == f"report: {job / 'results' / 'report.html'}"
    report = json.loads((job / "results" / "report.json").read_text())
    assert [item["correct"] for item in report["tasks"]["lambada"]["items"]] == [True, False, True]
    assert len(report["speed"]["rows"]) == 2
    assert len(server.received) == 3 + 2 * 3


BOUND = "{{metrics: {{{task}: {{accuracy: {{min: {lower}}}}}}}}}"


@pytest.mark.parametrize(
    ("task", "least", "code", "verdict"),
    [
        ("lambada", 0.1, 0, "GO"),
        ("lambada", 1.0, 1, "NO-GO"),
        ("lambada", 0.9, 2, "INCONCLUSIVE"),
        ("squad", 0.1, 2, "INCONCLUSIVE"),
    ],
)
def test_the_last_step_exits_with_the_verdict(job, capsys, task, least, code, verdict):
    (job / "policy.yaml").write_text(BOUND.format(task=task, lower=least))
    arguments = ["--settings", settings_file(job, policy=str(job / "policy.yaml"))]
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == 0
        assert judge.main(arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"verdict: {job / 'results' / 'verdict.json'}"
    assert any(line.startswith(f"{verdict}: ") for line in lines)
    written = json.loads((job / "results" / "verdict.json").read_text())
    assert (written["verdict"], written["exit_code"]) == (verdict, code)


def test_the_launcher_itself_exits_with_the_verdict(job):
    """main.py, the job and every step are the real ones."""
    settings_file(job)
    arguments = [
        "stages=[evaluate]",
        "cluster_type=interactive",
        f"base_results_dir={job}",
        f"evaluate.run.results_dir={job / 'results'}",
        f"evaluate.ready_file={job / 'ready.json'}",
        f"evaluate.tokenizer_dir={job}",
        "evaluate.model_name=counting",
        "evaluate.benchmark=null",
        f"evaluate.tasks.lambada.data_file={job / 'items.jsonl'}",
        "evaluate.policy.metrics={lambada:{accuracy:{min:1}}}",
    ]
    with FakeServer() as server:
        announce(job, server)
        command = [sys.executable, str(ROOT / "main.py"), *arguments]
        ran = subprocess.run(command, cwd=job, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert "fail: lambada's accuracy is 66.67 % (95 % interval 20.77 % to 93.85 %" in ran.stdout
    assert ran.stderr.startswith("NO-GO: the end of the evaluate job ")


def test_a_step_that_breaks_leaves_no_verdict(job, capsys, monkeypatch):
    arguments = ["--settings", settings_file(job, policy=PolicySettings())]
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == 0
        assert judge.main(arguments) == 0
        assert (job / "results" / "verdict.json").exists()
        monkeypatch.setattr(measure_accuracy, "read_tokenizer", lambda _: 1 / 0)
        assert measure_accuracy.main(arguments) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert not (job / "results" / "verdict.json").exists()
    assert judge.main(["--settings", settings_file(job)]) == 3
    assert "no policy to judge by; change evaluate.policy" in capsys.readouterr().err


def test_progress_comes_in_tenths(capsys):
    progress = measure_accuracy.log_progress("lambada")
    for done in range(1, 201):
        progress(done, 200)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "lambada: 20 of 200 items" and lines[-1] == "lambada: 200 of 200 items"
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("step", "changes", "says"),
    [
        (measure_accuracy, {"ready_timeout": 0.0}, "ready.json is not there"),
        (measure_accuracy, {"tokenizer_dir": "/nowhere"}, "change evaluate.tokenizer_dir"),
        (measure_accuracy, {"tasks": ()}, "no task to measure; choices: lambada"),
        (measure_speed, {"benchmark": None}, "no speed to measure; change evaluate.benchmark"),
    ],
)
def test_errors_are_one_line_and_leave_no_report(job, capsys, step, changes, says):
    assert step.main(["--settings", settings_file(job, **changes)]) == 3
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert captured.out == "" and not (job / "results").exists()


def test_a_wrong_reference_is_found_before_anything_is_asked(job, capsys):
    task = TaskSettings("lambada", str(job / "items.jsonl"), reference=str(job / "items.jsonl"))
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(["--settings", settings_file(job, tasks=(task,))]) == 3
        assert server.received == []
    assert "items.jsonl is not a report: JSONDecodeError" in capsys.readouterr().err


def test_answers_are_kept_where_the_reference_is_of_other_items(job, capsys):
    metrics = {"accuracy": {"value": 1, "low": None, "high": None, "percent": True, "meaning": ""}}
    section = {"metrics": metrics, "items": [], "settings": {"limit": None}}
    other = {"schema": 1, "model": "m", "tasks": {"lambada": section}}
    (job / "other.json").write_text(json.dumps(other))
    task = TaskSettings("lambada", str(job / "items.jsonl"), reference=str(job / "other.json"))
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(["--settings", settings_file(job, tasks=(task,))]) == 3
    assert "does not have every item; got [0, 1, 2]" in capsys.readouterr().err
    report = json.loads((job / "results" / "report.json").read_text())
    assert len(report["tasks"]["lambada"]["items"]) == 3


def test_batches_that_the_model_does_not_take_are_refused_before_measuring(job, capsys):
    with FakeServer(max_batch_size=1) as server:
        announce(job, server)
        assert measure_speed.main(["--settings", settings_file(job)]) == 3
        assert server.received == []
    assert "takes at most 1 rows in one request; got [2]" in capsys.readouterr().err


def test_a_step_ends_with_the_script_of_its_job(job):
    """bash dies with the launcher and says nothing to the step that it waits for."""
    script = job / "job_submission.sh"
    step = f"{sys.executable} -m launcher_scripts.steps.measure_accuracy"
    settings = settings_file(job, ready_timeout=60.0)
    script.write_text(f"{step} --settings {settings}\ntrue\n")
    bash = subprocess.Popen(["bash", str(script)], cwd=ROOT)
    children = Path(f"/proc/{bash.pid}/task/{bash.pid}/children")
    try:
        pid = int(wait_for(lambda: children.read_text().split())[0])
        wait_for(lambda: handles(pid, signal.SIGTERM))
    finally:
        bash.kill()
        bash.wait()
    wait_until_gone([pid])


def handles(pid, number):
    """Whether a process has a handler of a signal."""
    caught = re.search(rb"SigCgt:\s*(\w+)", read(Path(f"/proc/{pid}/status")))
    return caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_waiting_step_at_once(job, number, status):
    command = [sys.executable, "-m", "launcher_scripts.steps.measure_accuracy", "--settings"]
    with FakeServer(delay=60) as server:
        announce(job, server)
        step = subprocess.Popen(
            [*command, settings_file(job)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        try:
            wait_for(lambda: len(server.received) >= 2)
            step.send_signal(number)
            _, errors = step.communicate(timeout=10)
        finally:
            step.kill()
            step.communicate()
    assert (step.returncode, errors) == (status, "")
    assert not (job / "results").exists()


def test_what_a_task_needs_is_asked_for_before_anything_else(job, monkeypatch, capsys):
    monkeypatch.setitem(measure_accuracy.TASK_PACKAGES, "lambada", ("absent_module",))
    with pytest.raises(SystemExit, match="3"):
        measure_accuracy.main(["--settings", settings_file(job)])
    says = r"the task lambada: .* does not have absent_module; name an interpreter that has them"
    assert re.search(says, capsys.readouterr().err)
