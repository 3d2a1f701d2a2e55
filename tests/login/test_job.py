"""Job folders: every path of a job in one place, a new place for every run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import Job, JobFolder
from launcher_scripts.common.errors import ClusterError, ConfigError


def test_next_creates_nothing_and_reserve_what_it_says(tmp_path: Path) -> None:
    announced = JobFolder.next(tmp_path / "results", "job")
    assert list(tmp_path.iterdir()) == []
    assert JobFolder.reserve(tmp_path / "results", "job") == announced
    assert announced.root == tmp_path / "results" / "jobs" / "001"
    assert announced.root.is_dir()


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: JobFolder.reserve(tmp_path, "job"), range(32)))
    assert len({folder.root for folder in folders}) == 32
    assert JobFolder.next(tmp_path, "job").root.name == "033"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(ClusterError, match=r"cannot create .*; change base_results_dir"):
        JobFolder.reserve(tmp_path / "results", "job")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a\nb", "a\0b"])
def test_names_that_make_no_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        JobFolder(Path("/results"), name)


def test_the_names_of_the_files() -> None:
    folder = JobFolder(Path("/r/jobs/001"), "export_gpt3 5b")
    assert folder.settings == Path("/r/jobs/001/export_gpt3 5b_hydra.yaml")
    assert folder.script == Path("/r/jobs/001/export_gpt3 5b_submission.sh")
    assert folder.log("17") == Path("/r/jobs/001/log-export_gpt3 5b_17.out")


@pytest.mark.parametrize(("name", "value"), [("A B", "x"), ("1A", "x"), ("", "x"), ("A", "\0")])
def test_environments_that_no_process_can_have(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="env_vars"):
        Job("export", JobFolder(Path("/r"), "job"), None, (), env={name: value})
