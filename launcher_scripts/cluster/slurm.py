"""Slurm, the cluster type `bcm`: sbatch jobs whose steps run through srun, in pyxis containers."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from submitit.core import utils
from submitit.helpers import clean_env
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher_scripts.cluster.enroot import EnrootImage, check_enroot, enroot_mount
from launcher_scripts.cluster.job import Job, Submitted
from launcher_scripts.cluster.slurm_options import SlurmOptions, file_pattern
from launcher_scripts.errors import ClusterError, Problems, problem
from launcher_scripts.render import render
from launcher_scripts.schema import build

# How often a client's job asks for the state of its server's job.
_CHECK_SECONDS = 10


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
            runtime=self.options.container_runtime,
            remove_containers=self.options.container_scope == "global"
            and self.options.container_runtime == "pyxis",
            server_log=file_pattern(self.job.folder.server_log_stem),
            enroot=self._enroot(),
            beside=self._beside(),
        )

    def _enroot(self) -> str:
        """The functions of the script that run a step in a container without pyxis."""
        container = self.job.container
        if container is None or self.options.container_runtime != "enroot":
            return ""
        check_enroot(self.job)
        mounts = container.mounts
        if self.job.client is not None and self.job.client.container is not None:
            mounts = tuple(dict.fromkeys([*mounts, *self.job.client.container.mounts]))
        return render(
            "enroot.sh.j2",
            image=EnrootImage.find(container.image, self.options.image_cache),
            mounts=[enroot_mount(mount) for mount in mounts],
            env=tuple(self.job.env),
            workdir=self.job.folder.root,
        )

    def _beside(self) -> str:
        """The functions of the script that run a client as long as its server runs."""
        server = self.job if self.job.client is not None else self.job.server
        if server is None or server.service is None:
            return ""
        return render(
            "beside_server.sh.j2",
            job=self.job,
            server_log_stem=self.job.folder.server_log_stem,
            check_seconds=1 if self.job.client is not None else _CHECK_SECONDS,
            stop_seconds=math.ceil(server.service.stop_timeout),
            remove_containers=self.options.container_scope == "global"
            and self.options.container_runtime == "pyxis",
        )

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        dependency = []
        if self.dependency is not None:
            dependency = [f"--dependency={self.dependency}", "--kill-on-invalid-dep=yes"]
        return ["sbatch", *dependency, str(submission_file_path)]

    def submit_script(self) -> str:
        """Submit the script in the job folder; returns the job id."""
        command = self._make_submission_command(self.job.folder.script)
        output = utils.CommandFunction(command, verbose=False, env=submission_environment())()
        return self._get_job_id_from_submission_command(output)


class SlurmCluster:
    """Queues jobs; they run after this process has ended."""

    type: ClassVar[str] = "bcm"
    max_nodes: ClassVar[int | None] = None
    hosts_clients: ClassVar[bool] = True

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> SlurmCluster:
        return cls(build(SlurmOptions, values, "the cluster's configuration", key="cluster"))

    @property
    def in_container(self) -> bool:
        return self.options.container_runtime != "none"

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

    def test(self, job: Job) -> str | None:
        """What sbatch says to the script without queueing it; None where no Slurm answers.

        Raises ClusterError when it refuses the script.
        """
        if not _slurm_answers():
            return None
        tried = subprocess.run(
            ["sbatch", "--test-only"],
            input=self.render(job),
            capture_output=True,
            text=True,
            check=False,
            env=submission_environment(),
        )
        said = (tried.stderr or tried.stdout).strip()
        if tried.returncode:
            raise ClusterError(
                problem(f"sbatch would refuse the {job.stage} job: {said}", change="cluster.*")
            )
        return said

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


def _slurm_answers() -> bool:
    """Whether this machine has Slurm's commands and its controller can be reached."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return False
    asked = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and " UP" in asked.stdout


def submission_environment() -> dict[str, str]:
    """The environment of sbatch.

    Variables of a job in which this process may run are kept from the new one; SLURM_CONF is none
    of them: it says which cluster this is.
    """
    conf = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with clean_env():
        return {**os.environ, **conf}


def _dependency(after: Submitted | None) -> str | None:
    """What sbatch --dependency says: finished jobs must have worked, a service must have started.

    A cancelled job counts as started for Slurm, so what a service waits for is waited for as well.
    """
    conditions = []
    while after is not None:
        conditions.append(f"{'after' if after.job.service else 'afterok'}:{after.job_id}")
        after = after.after if after.job.service else None
    return ",".join(conditions) or None
