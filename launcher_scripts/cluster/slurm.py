"""Slurm, the cluster type `bcm`: sbatch jobs whose steps run through srun, in pyxis containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from submitit.core import utils
from submitit.helpers import clean_env
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher_scripts.cluster.job import Job, Submitted
from launcher_scripts.errors import ClusterError, ConfigError, Problems, problem
from launcher_scripts.render import render
from launcher_scripts.schema import build

_OWN_KEYS = ("type", "job_name_prefix", "mpi", "srun_args", "python", "requeue")
_MPI_TYPES = ("pmix", "pmi2", "none")


@dataclass(frozen=True)
class SlurmOptions:
    """conf/cluster/bcm.yaml: sbatch's options by their names, and our own keys.

    mpi:       how the tasks of a server find each other (srun --mpi)
    srun_args: further arguments of every srun
    python:    interpreter that runs the steps, as seen in the container
    requeue:   whether Slurm may run the job again after a node failure or preemption
    """

    type: str = "bcm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    comment: str | None = None
    exclusive: bool = True
    overcommit: bool = False
    gpus_per_task: int | None = None
    gpus_per_node: int | None = 8
    cpus_per_task: int | None = None
    mem: str | None = "0"
    job_name_prefix: str = "nemo-megatron-"
    mpi: str = "pmix"
    srun_args: tuple[str, ...] = ()
    python: str = "python3"
    requeue: bool = False

    def __post_init__(self) -> None:
        problems = Problems("the Slurm options")
        if not self.mpi.startswith(_MPI_TYPES):
            problems.add("unknown mpi", got=self.mpi, choices=_MPI_TYPES, change="cluster.mpi")
        for name, value in asdict(self).items():
            if not str(value).isprintable():
                problems.add("not on one line", got=value, change=f"cluster.{name}")
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            problems.add(
                "gpus_per_node must be at least 1, or null for a cluster without GPUs",
                got=self.gpus_per_node,
                change="cluster.gpus_per_node",
            )
        problems.raise_if_any(ConfigError)

    def sbatch(self, job: Job) -> dict[str, Any]:
        """The parameters of the submission, in submitit's spelling."""
        own = {key: value for key, value in asdict(self).items() if key not in _OWN_KEYS}
        log = str(job.folder.root).replace("%", "%%") + f"/log-{job.name.replace('%', '%%')}_%j.out"
        return {
            "job_name": self.job_name_prefix + job.name,
            "nodes": job.resources.nodes,
            "ntasks_per_node": job.resources.tasks_per_node,
            "time": job.resources.time_limit,
            **own,
            "output": log,
            "open-mode": "append",
            "requeue" if self.requeue else "no-requeue": True,
        }


class ScriptExecutor(SlurmExecutor):
    """submitit's Slurm executor with a script of our own in place of a pickled function."""

    job_class = SlurmJob

    def __init__(self, job: Job, options: SlurmOptions) -> None:
        super().__init__(folder=job.folder.root)
        self.job = job
        self.options = options
        self.dependency: str | None = None
        parameters = {k: v for k, v in options.sbatch(job).items() if v not in (None, False)}
        known = self._valid_parameters() & parameters.keys()
        self.update_parameters(
            **{name: parameters[name] for name in known},
            additional_parameters={k: v for k, v in parameters.items() if k not in known},
        )

    @classmethod
    def affinity(cls) -> int:
        """Scripts can be rendered on a machine without Slurm; SlurmCluster.check looks for it."""
        return 1

    def script(self) -> str:
        """The text that sbatch is given."""
        return self._make_submission_file_text("", "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        parameters = dict(self.parameters)
        parameters.update(parameters.pop("additional_parameters"))
        flags = {name.replace("_", "-"): value for name, value in parameters.items()}
        return render(
            "slurm.sh.j2",
            job=self.job,
            sbatch=dict(sorted(flags.items())),
            mpi=self.options.mpi,
            srun_args=self.options.srun_args,
        )

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        dependency = []
        if self.dependency is not None:
            dependency = [f"--dependency={self.dependency}", "--kill-on-invalid-dep=yes"]
        return ["sbatch", *dependency, str(submission_file_path)]

    def submit_script(self) -> str:
        """Submit the script in the job folder; returns the job id.

        Variables of a job in which this process may run are kept from the new one; SLURM_CONF is
        none of them: it says which cluster this is.
        """
        command = self._make_submission_command(self.job.folder.script)
        conf = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        with clean_env():
            environment = {**os.environ, **conf}
        output = utils.CommandFunction(command, verbose=False, env=environment)()
        return self._get_job_id_from_submission_command(output)


class SlurmCluster:
    """Queues jobs; they run after this process has ended."""

    type: ClassVar[str] = "bcm"
    in_container: ClassVar[bool] = True
    max_nodes: ClassVar[int | None] = None

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> SlurmCluster:
        return cls(build(SlurmOptions, values, "the cluster's configuration", key="cluster"))

    @property
    def gpus_per_node(self) -> int | None:
        return self.options.gpus_per_node

    @property
    def python(self) -> str:
        return self.options.python

    def check(self, problems: Problems) -> None:
        if shutil.which("sbatch") is None:
            problems.add(
                "sbatch is not on the PATH of this machine: run on a login node of the cluster",
                change="cluster_type (interactive runs the job here)",
            )

    def render(self, job: Job) -> str:
        return ScriptExecutor(job, self.options).script()

    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        executor = ScriptExecutor(job, self.options)
        job.write(executor.script())
        executor.dependency = _dependency(after)
        try:
            submitted = Submitted(job, executor.submit_script(), after)
        except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
            raise ClusterError(
                problem(
                    f"sbatch refused the {job.stage} job: {str(error).strip()}; its script is "
                    f"{job.folder.script}",
                    change="cluster.*",
                )
            ) from error
        submitted.write_record(self.type)
        print(f"{job.stage}: submitted {job.name} as Slurm job {submitted.job_id}")
        print(f"  log: {submitted.log}", flush=True)
        return submitted

    def finish(self) -> None:
        """Nothing to wait for: the queue has the jobs."""

    def close(self) -> None:
        """Nothing runs on this machine."""


def _dependency(after: Submitted | None) -> str | None:
    """What sbatch --dependency says: finished jobs must have worked, a service must have started.

    A cancelled job counts as started for Slurm, so what a service waits for is waited for as well.
    """
    conditions = []
    while after is not None:
        conditions.append(f"{'after' if after.job.service else 'afterok'}:{after.job_id}")
        after = after.after if after.job.service else None
    return ",".join(conditions) or None
