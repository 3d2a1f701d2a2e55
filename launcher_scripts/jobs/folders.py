"""Finding jobs: every job folder below a folder of results, and those that a person names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.cluster import CLUSTERS
from launcher_scripts.cluster.cluster import Cluster
from launcher_scripts.cluster.record import ID_FILE, RECORD, JobRecord, read_index
from launcher_scripts.cluster.slurm_queue import jobs_of_script
from launcher_scripts.common.errors import LauncherError, lookup, problem

# How deep below the results job folders lie: <model>/<stage>/jobs/<run>, or less.
RESULTS = Path(__file__).resolve().parents[1] / "results"
_PATTERNS = tuple(f"{above}jobs/*/{RECORD}" for above in ("", "*/", "*/*/", "*/*/*/"))


class NoSuchJob(LauncherError):
    """Nobody knows a job of that name."""

    exit_code = 4


class NeverSubmitted(NoSuchJob):
    """The launcher was killed before the cluster had the job."""


def _find_id(folder: Path, record: JobRecord) -> str:
    """The id of a job whose launcher was killed before it could write it: the job's script does so,
    and the queue knows the script of one that has not started.
    """
    source = folder if record.within is None else Path(record.within)
    with contextlib.suppress(OSError):
        job_id = (source / ID_FILE).read_text(encoding="utf-8").strip()
        if job_id:
            return job_id
    ids = jobs_of_script(source / record.script)
    if not ids:
        raise NeverSubmitted(f"the job of {folder} was never submitted: {record.name}")
    return ids[-1]


@dataclass(frozen=True)
class JobEntry:
    """A job folder and its record. ids: those of the job's replicas that are meant."""

    folder: Path
    record: JobRecord
    ids: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> JobEntry:
        record = JobRecord.read(folder)
        if not record.job_id:
            record = record.with_id(_find_id(folder, record))
        lookup(CLUSTERS, record.cluster_type, f"cluster_type in {folder / RECORD}")
        return cls(folder, record, record.ids())

    @property
    def cluster(self) -> type[Cluster[Any]]:
        """The cluster that runs it."""
        return CLUSTERS[self.record.cluster_type]

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def run(self) -> str:
        """The number of the run, which is the job folder's name."""
        return self.folder.name


def find_jobs(results: Path | None) -> list[JobEntry]:
    """Every job below `results`, oldest first, without those whose records cannot be read.

    results: None: the default folders, and the user's index
    """
    return read_jobs(results)[0]


def default_folders() -> list[Path]:
    """The folders of results that need no name: ./results and the checkout's."""
    return [path for path in (Path("results"), RESULTS) if path.is_dir()]


def _job_folders(results: Path | None) -> set[Path]:
    """Job folders below `results`. Raises NoSuchJob where that does not exist."""
    if results is None:
        return {path.resolve() for path in read_index()}.union(
            *map(_job_folders, default_folders())
        )
    if not results.is_dir():
        raise NoSuchJob(
            problem(
                "there is no such folder of results",
                got=str(results),
                change="--results (base_results_dir of the jobs)",
            )
        )
    return {path.parent for pattern in _PATTERNS for path in results.resolve().glob(pattern)}


def read_jobs(results: Path | None) -> tuple[list[JobEntry], list[str]]:
    """The jobs of find_jobs, and what is wrong with the records that it leaves out."""
    jobs: list[JobEntry] = []
    damaged: list[str] = []
    for folder in _job_folders(results):
        try:
            jobs.append(JobEntry.read(folder))
        except NeverSubmitted:
            continue
        except LauncherError as error:
            damaged.append(str(error))
    jobs.sort(key=lambda job: (job.record.submitted, str(job.folder)))
    return jobs, sorted(damaged)


def choose_jobs(results: Path | None, names: Iterable[str]) -> list[JobEntry]:
    """The jobs that `names` name: a job folder or one that holds its runs, an id, one replica's id,
    a name (its latest run), name/run, or a model (the latest job of each stage). Raises NoSuchJob.

    results: None: a name means a job of the default folders before one of the user's index
    """
    positions = [results] if results is not None else [*default_folders(), None]
    jobs_of = functools.cache(find_jobs)
    selected: list[JobEntry] = []
    for name in names:
        path = Path(name).resolve()
        if (path / RECORD).exists():
            selected.append(JobEntry.read(path))
            continue
        named = (_named(jobs_of(index), name, path) for index in positions)
        jobs = next(filter(None, named), [])
        if not jobs:
            raise NoSuchJob(_unknown(name, jobs_of(positions[-1]), results))
        selected += jobs
    return list(dict.fromkeys(selected))


def _named(supported: list[JobEntry], name: str, path: Path) -> list[JobEntry]:
    below = [job for job in supported if path in job.folder.parents] or _below(path)
    return (
        below[-1:]
        or _by_id(supported, name)
        or _by_name(supported, name)
        or _by_model(supported, name)
    )


def _below(path: Path) -> list[JobEntry]:
    """The latest job below a folder."""
    return find_jobs(path)[-1:] if path.is_dir() else []


def _by_id(jobs: list[JobEntry], name: str) -> list[JobEntry]:
    exact = [job for job in jobs if job.record.job_id == name]
    one = [JobEntry(job.folder, job.record, (name,)) for job in jobs if name in job.ids]
    return exact or one


def _by_name(jobs: list[JobEntry], name: str) -> list[JobEntry]:
    """The latest run of that name, or the run that is named."""
    latest = [job for job in jobs if job.name == name]
    exact = [job for job in jobs if f"{job.name}/{job.run}" == name]
    return latest[-1:] or exact[-1:]


def _by_model(jobs: list[JobEntry], model: str) -> list[JobEntry]:
    """The latest job of each stage of a model, oldest first."""
    latest = {job.name: job for job in jobs if job.name == f"{job.record.stage}_{model}"}
    return [job for job in jobs if job in latest.values()]


def _unknown(name: str, jobs: list[JobEntry], results: Path | None) -> str:
    names = dict.fromkeys(job.name for job in reversed(jobs))
    return problem(
        "no such job" if results is None else f"no such job below {results}",
        got=name,
        choices=names or ("none: no job has been submitted from here",),
        change="the name, or --results (base_results_dir of the jobs)",
    )
