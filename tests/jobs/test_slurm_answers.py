"""Slurm's words: states, exit codes, times, limits of partitions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import Resources
from launcher_scripts.cluster.record import JobState
from launcher_scripts.cluster.slurm_queue import check_partition, slurm_job_state, slurm_seconds
from launcher_scripts.common.errors import Problems

SHOWN = """\
JobId=7 JobName=a b JobState=FAILED Restarts=9
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=0 Restarts=2 BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=1-00:00:05 TimeLimit=2-00:00:00 TimeMin=N/A
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   BatchHost=n1
   Comment=x JobState=CANCELLED Reason=y NodeList=n9 ExitCode=3:0 RunTime=00:00:01
   WorkDir=/tmp/JobState=TIMEOUT NodeList=n8

JobId=8 JobName=c
   JobState=TIMEOUT
"""


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let Slurm's commands answer with fixed texts."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answer(program: str, out: str = "", err: str = "", code: int = 0) -> None:
        (tmp_path / f"{program}.out").write_text(out)
        (tmp_path / f"{program}.err").write_text(err)
        path = tmp_path / program
        path.write_text(
            f'#!/bin/sh\ncat "{path}.out"\ncat "{path}.err" >&2\nexit {code}\n', encoding="utf-8"
        )
        path.chmod(0o755)

    return answer


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("RUNNING", "0:0", None),
        ("COMPLETED", "0:0", 0),
        ("FAILED", "7:0", 7),
        ("TIMEOUT", "0:0", 1),
        ("CANCELLED", "0:15", 143),
        ("NODE_FAIL", "1:0", 1),
    ],
)
def test_scontrol_is_asked_first(say, state: str, code: str, expected: int | None) -> None:
    say("scontrol", SHOWN.format(state=state, reason="None", code=code, nodes="n[1-2]"))
    assert slurm_job_state("7") == JobState(state, expected, "n[1-2]", "", 86405, 2)


def test_a_reason_to_wait(say) -> None:
    shown = SHOWN.format(state="PENDING", reason="PartitionTimeLimit", code="0:0", nodes="(null)")
    say("scontrol", shown)
    state = slurm_job_state("7")
    assert (state.waiting, state.reason, state.nodes) == (True, "PartitionTimeLimit", "")


def test_sacct_knows_what_scontrol_has_forgotten(say) -> None:
    say("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    say("sacct", "RUNNING|0:0|n1|00:00:01\nCANCELLED by 0|0:9|n1|01:02:03\n")
    assert slurm_job_state("7") == JobState("CANCELLED", 137, "n1", "by 0", 3723)


def test_a_job_that_nobody_knows_is_forgotten(say) -> None:
    say("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    say("sacct", err="Slurm accounting storage is disabled", code=1)
    assert slurm_job_state("7").name == "FORGOTTEN"


def test_a_controller_that_is_away_is_not_taken_for_a_lost_job(say) -> None:
    say("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    say("sacct", err="Slurm accounting storage is disabled", code=1)
    state = slurm_job_state("7")
    assert (state.name, state.finished) == ("UNKNOWN", False)
    assert "Unable to contact" in state.reason


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("5", 300), ("5:06", 306), ("1:02:03", 3723), ("2-3", 183600)),
        *(("1-02:03", 93780), ("1-02:03:04", 93784), ("0", 0)),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert slurm_seconds(text) == seconds


PARTITIONS = (
    "PartitionName=short Default=YES MaxNodes=1 MaxTime=01:00:00\n"
    "PartitionName=long Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED\n"
)


@pytest.mark.parametrize(
    ("partition", "resources", "says"),
    [
        (None, Resources(time_limit="1:00:00"), None),
        (None, Resources(time_limit="1-0"), "PartitionTimeLimit.*short.*01:00:00; got '1-0'"),
        ("short", Resources(nodes=2, time_limit="5"), "PartitionNodeLimit.*at most 1 nodes"),
        ("long", Resources(nodes=2, time_limit="9-0"), None),
        ("short,long", Resources(nodes=2, time_limit="9-0"), None),
        ("unheard", Resources(nodes=2, time_limit="9-0"), None),
    ],
)
def test_a_job_beyond_its_partition(say, partition, resources: Resources, says) -> None:
    say("scontrol", PARTITIONS)
    problems = Problems("the job")
    check_partition(partition, resources, problems, "deploy")
    if says is None:
        assert problems.messages == []
    else:
        (message,) = problems.messages
        assert re.search(says, message)
