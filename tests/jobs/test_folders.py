"""Finding jobs by folder, id, name and run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher_scripts.cluster import record
from launcher_scripts.cluster.record import (
    JobRecord,
    JobState,
    append_to_index,
    index_file,
    read_index,
    ready_of_run,
)
from launcher_scripts.common.errors import LauncherError
from launcher_scripts.jobs import folders
from launcher_scripts.jobs import status as job_status
from launcher_scripts.jobs import status as logs
from launcher_scripts.jobs.__main__ import main
from launcher_scripts.jobs.folders import JobEntry, NoSuchJob, choose_jobs, find_jobs, read_jobs
from launcher_scripts.jobs.status import query_statuses


def make_job(results: Path, stage: str, run: int, **fields: object) -> Path:
    """A job folder as the launcher leaves it."""
    folder = results / "tiny" / f"{stage}_tp1" / "jobs" / f"{run:03d}"
    folder.mkdir(parents=True)
    values = {
        "stage": stage,
        "name": f"{stage}_tiny",
        "cluster_type": "bcm",
        "job_id": str(100 + run),
        "after": None,
        "settings": "settings.yaml",
        "script": "script.sh",
        "log": f"log-{stage}_tiny_{100 + run}.out",
        "submitted": float(run),
        **fields,
    }
    JobRecord(**values).write(folder)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    make_job(tmp_path, "export", 1)
    make_job(tmp_path, "deploy", 2)
    make_job(tmp_path, "deploy", 3, job_id="500", log="log-deploy_tiny_500.out", replicas=2)
    return tmp_path


def test_all_jobs_are_found_in_the_order_of_their_submission(results: Path) -> None:
    assert [(job.name, job.run) for job in find_jobs(results)] == [
        ("export_tiny", "001"),
        ("deploy_tiny", "002"),
        ("deploy_tiny", "003"),
    ]


def test_a_job_has_many_names(results: Path) -> None:
    folder = results / "tiny" / "deploy_tp1"
    for name in ("deploy_tiny", "500", "deploy_tiny/003", str(folder), str(folder / "jobs/003")):
        (job,) = choose_jobs(results, [name])
        assert (job.run, job.ids) == ("003", ("500_0", "500_1"))
    (job,) = choose_jobs(results, ["500_1"])
    assert job.ids == ("500_1",)
    assert job.record.log_file(job.folder, "500_1").name == "log-deploy_tiny_500_1.out"
    (job,) = choose_jobs(results, ["deploy_tiny/002"])
    assert job.ids == ("102",)
    assert job.record.log_file(job.folder, "102").name == "log-deploy_tiny_102.out"


def test_a_model_names_the_latest_job_of_each_stage(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [job.folder.parts[-3:] for job in choose_jobs(results, ["tiny"])] == [
        ("export_tp1", "jobs", "001"),
        ("deploy_tp1", "jobs", "003"),
    ]
    for folder, log in (("export_tp1/jobs/001", "101"), ("deploy_tp1/jobs/003", "500_0")):
        stage = folder.partition("_")[0]
        (results / "tiny" / folder / f"log-{stage}_tiny_{log}.out").write_text(f"of {stage}\n")
    assert main(["logs", f"--results={results}", "--stage", "deploy", "tiny"]) == 0
    assert capsys.readouterr().out == "of deploy\n"
    assert main(["logs", f"--results={results}", "--stage", "evaluate", "tiny"]) == 4
    assert "got 'evaluate'; choices: export, deploy; change --stage" in capsys.readouterr().err


def test_a_log_is_followed_from_stage_to_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher on one machine submits a stage's job when the job before has ended."""

    def end(job: JobEntry, _job_id: str) -> JobState:
        if job.record.stage == "export":
            folder = tmp_path / "tiny/deploy_tp1/jobs/002"
            if not folder.exists():
                make_job(tmp_path, "deploy", 2)
                (folder / "log-deploy_tiny_102.out").write_text("serving\n")
        return JobState("COMPLETED", 0)

    monkeypatch.setattr(logs, "read_job_state", end)
    monkeypatch.setattr(logs, "_STATE_SECONDS", 0)
    (make_job(tmp_path, "export", 1) / "log-export_tiny_101.out").write_text("converting\n")
    assert main(["logs", "-f", f"--results={tmp_path}", "tiny"]) == 0
    log = tmp_path / "tiny/deploy_tp1/jobs/002/log-deploy_tiny_102.out"
    assert capsys.readouterr().out == f"converting\n==> {log} <==\nserving\n"


def test_jobs_of_the_index_need_no_folder_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name means a job of ./results first. Folders that have gone are skipped."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(folders, "RESULTS", tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    here = make_job(tmp_path / "results", "deploy", 1)
    there = make_job(tmp_path / "a\nfar place", "deploy", 2)
    other = make_job(tmp_path / "a\nfar place", "export", 3)
    for folder in (there, other, there, tmp_path / "gone"):
        append_to_index(folder)
    with index_file().open("a") as index:
        index.write("no path\n[1]\n\n")
    assert [job.folder for job in find_jobs(None)] == [here, there, other]
    assert [job.folder for job in choose_jobs(None, ["deploy_tiny", "export_tiny", "102"])] == [
        here,
        other,
        there,
    ]
    with pytest.raises(NoSuchJob, match="no such job; got 'x'; choices: export_tiny, deploy_tiny"):
        choose_jobs(None, ["x"])
    monkeypatch.setattr(record, "_MAX_INDEX_BYTES", 10)
    append_to_index(here)
    assert read_index() == [there, other, here]
    assert len(index_file().read_text().splitlines()) == 3
    index_file().unlink()
    index_file().mkdir()
    append_to_index(here)  # a job runs without it
    assert read_index() == []


def test_the_tunnel_of_a_ready_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_status, "read_job_state", lambda *_: JobState("RUNNING"))
    ready = tmp_path / "ready.json"
    folder = make_job(tmp_path, "deploy", 1, ready_file=str(ready))
    line = ["tunnel", f"--results={tmp_path}", "deploy_tiny", "--via=me@login"]
    assert main(line) == 3
    assert "deploy_tiny is STARTING: it has no address yet" in capsys.readouterr().err
    facts = {"job": {"folder": str(folder)}, "grpc": "n1:8001", "http": "n1:8000"}
    ready.write_text(json.dumps(facts))
    assert main(line) == 0
    assert capsys.readouterr().out == (
        "ssh -N -L 8000:n1:8000 me@login\nthen: http://127.0.0.1:8000\n"
    )
    ready.write_text(json.dumps({**facts, "openai": "https://[fd00::1]:9000/v1"}))
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" > arguments; exit 7\n')
    ssh.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*line, "--port=8080", "--open"]) == 7
    assert (tmp_path / "arguments").read_text() == "-N -L 8080:[fd00::1]:9000 me@login\n"
    said = capsys.readouterr().out
    assert said.endswith("then: https://127.0.0.1:8080/v1\n")


def test_an_unknown_name_is_answered_with_the_known_ones(results: Path) -> None:
    with pytest.raises(NoSuchJob, match="got 'deploy'; choices: deploy_tiny, export_tiny") as error:
        choose_jobs(results, ["deploy"])
    assert error.value.exit_code == 4
    (results / "empty").mkdir()
    with pytest.raises(NoSuchJob, match="no job has been submitted"):
        choose_jobs(results / "empty", ["x"])


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_folder_that_is_missing_has_no_jobs(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, f"--results={tmp_path / 'nothing'}"]) == 4
    assert "there is no such folder of results; got " in capsys.readouterr().err
    assert main([command, f"--results={tmp_path}"]) == 0


def other_names(folder: Path, link: Path) -> dict[str, str]:
    """Paths that lead to the folder."""
    link.symlink_to(folder)
    return {
        "absolute": str(folder),
        "relative": os.path.relpath(folder),
        "link": str(link),
        "dots": f"{folder}/../{folder.name}",
        "slash": f"{folder}/",
    }


@pytest.mark.parametrize("name", ["absolute", "relative", "link", "dots", "slash"])
@pytest.mark.parametrize("stored", ["absolute", "link"])
def test_a_folder_has_many_paths(
    results: Path, tmp_path_factory: pytest.TempPathFactory, name: str, stored: str
) -> None:
    """A run of a server is known by its folder, whatever the paths are."""
    names = other_names(results, tmp_path_factory.mktemp("links") / "link")
    folder = Path("tiny", "deploy_tp1", "jobs", "002")
    ready = results / "tiny" / "deploy_tp1" / "ready.json"
    ready.write_text(json.dumps({"job": {"folder": str(Path(names[stored]) / folder)}}))
    asked = Path(names[name])
    for job in (choose_jobs(asked, ["102"]), choose_jobs(asked, [f"{names[name]}/{folder}"])):
        assert [item.folder for item in job] == [(results / folder).resolve()]
        assert ready_of_run(ready, job[0].folder) is not None
        assert ready_of_run(ready, job[0].folder.parent) is None


def records_of_others() -> dict[str, bytes]:
    """Content of job.json that is not a job's, by what is wrong with it."""
    record = {"stage": "a", "name": "a", "cluster_type": "bcm", "job_id": "1", "after": None}
    record |= {"settings": "a", "script": "a", "log": "a"}
    wrong = {"submitted": "now", "replicas": "x", "cluster_type": "kube", "name": None}
    texts = {name: json.dumps({**record, name: value}) for name, value in wrong.items()}
    texts |= {"incomplete": '{"stage": "export"}', "no mapping": "[]", "no JSON": "{", "empty": ""}
    return {**{name: text.encode() for name, text in texts.items()}, "no text": b"\xff\xfe"}


@pytest.mark.parametrize("content", records_of_others().values(), ids=records_of_others())
def test_a_damaged_record_hides_no_other_job(results: Path, content: bytes) -> None:
    path = results / "tiny" / "export_tp1" / "jobs" / "001" / "job.json"
    path.write_bytes(content)
    assert [job.run for job in find_jobs(results)] == ["002", "003"]
    (said,) = read_jobs(results)[1]
    assert str(path) in said
    with pytest.raises(LauncherError, match="export_tp1"):
        choose_jobs(results, [str(path.parent)])


@pytest.mark.parametrize("name", ["end_101.json", "process.json"])
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"name": null, "pid": "x"}'])
def test_a_damaged_job_folder_leaves_its_state_unknown(results: Path, name: str, text: str) -> None:
    folder = make_job(results, "evaluate", 1, cluster_type="interactive")
    (folder / name).write_text(text)
    (status,) = query_statuses(choose_jobs(results, ["evaluate_tiny"]))
    assert (status.state.name, status.exit_code) == ("UNKNOWN", 5)
    assert name in status.reason


def test_a_job_whose_launcher_was_killed_at_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has written the id, or the queue knows the script; or there is no job."""
    started = make_job(tmp_path, "export", 1, job_id="", log="log-export_tiny_.out")
    (started / "job_id").write_text("77\n")
    queued = make_job(tmp_path, "deploy", 1, job_id="", log="log-deploy_tiny_.out")
    make_job(tmp_path, "gateway", 1, job_id="", log="log-gateway_tiny_.out")
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '78 {queued}/script.sh'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = {job.name: job.record for job in find_jobs(tmp_path)}
    assert {name: record.job_id for name, record in found.items()} == {
        "export_tiny": "77",
        "deploy_tiny": "78",
    }
    assert found["export_tiny"].log == "log-export_tiny_77.out"
    with pytest.raises(NoSuchJob):
        choose_jobs(tmp_path, ["gateway_tiny"])
