"""What an error quotes of a job's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.jobs.folders import JobEntry
from launcher_scripts.jobs.status import tail
from tests.jobs.test_folders import make_job

NOISE = [f"slurmstepd: error: pyxis:     created {n} files" for n in range(30)]


def said(results: Path, *lines: str) -> list[str]:
    job = JobEntry.read(make_job(results, "export", 1))
    (job.folder / "log-export_tiny_101.out").write_text("\n".join(lines) + "\n")
    return [line.removeprefix("  | ") for line in tail(job).splitlines()]


@pytest.mark.parametrize(
    "reason",
    [
        "pyxis: --container-mounts: source path does not exist: /x",
        "pyxis: failed to import docker image: nvcr.io#nvidia/nemo:23",
        "pyxis: couldn't chdir to /x: No such file or directory",
        "enroot-mount: failed to mount: /x at /y: No such file or directory",
        "[ERROR] No such file or directory: /x",
        "1: error: the checkpoint is damaged",
    ],
)
def test_the_reason_comes_before_what_followed_from_it(tmp_path: Path, reason: str) -> None:
    before = "" if reason.startswith("1: ") else "0: slurmstepd-n1: error: "
    head, shown, end, first, *_ = said(tmp_path, *[before + reason] * 2, *NOISE)
    assert head.startswith("lines of its log")
    assert shown == reason
    assert end.startswith("the end of its log")
    assert first == NOISE[10]


def test_a_reason_at_the_end_is_not_said_twice(tmp_path: Path) -> None:
    lines = said(tmp_path, *NOISE, "error: no space left", "srun: error: n1: task 0: Exited")
    assert lines[0].startswith("the end of its log")
    assert len(lines) == 21


def test_a_log_without_a_word(tmp_path: Path) -> None:
    assert said(tmp_path) == []
