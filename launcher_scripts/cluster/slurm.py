"""Slurm, the cluster type `bcm`: sbatch jobs whose steps run through srun, in pyxis containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher_scripts.cluster import slurm_queue
from launcher_scripts.cluster.cluster import Cluster, SubmissionEnvironment
from launcher_scripts.cluster.job import Job, Submitted
from launcher_scripts.cluster.record import JobRecord, JobState, wait_for, write_text
from launcher_scripts.cluster.slurm_script import SlurmOptions, option_name, slurm_script
from launcher_scripts.common.errors import ClusterError, LauncherError, Problems, problem

_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_FEATURE = re.compile(r"\w+")
_SHARED_PARTITIONS = ("FORCE", "YES")  # what jobs take of a node is not theirs alone there
_ALL = float("inf")


@dataclass(frozen=True)
class NodeShare:
    """A job's share of each of its nodes, or a node's resources; memory in megabytes."""

    cpus: float
    memory: float
    gpus: float

    def beside(self, other: NodeShare) -> NodeShare:
        return NodeShare(self.cpus + other.cpus, self.memory + other.memory, self.gpus + other.gpus)

    def within(self, node: NodeShare) -> bool:
        return self.cpus <= node.cpus and self.memory <= node.memory and self.gpus <= node.gpus


@dataclass(frozen=True)
class _Cluster:
    """The relevant part of Slurm's configuration. memory: whether it counts as a resource."""

    nodes: tuple[Mapping[str, str], ...]
    memory: bool
    default_memory: Mapping[str, str]


def check_capacity(job: Job, options: SlurmOptions, problems: Problems) -> None:
    """Add that `job` could never start while its server runs, where Slurm's nodes say so."""
    if job.server is None or job.server.service is None:
        return
    if options.constraint is not None and not _FEATURE.fullmatch(options.constraint):
        return  # which nodes it means is Slurm's to say
    if options.partition != _options_of(job.server, options).partition:
        return  # they may share no node
    cluster = _query_cluster()
    partitions = slurm_queue.partitions(options.partition)
    if not partitions or not cluster.nodes:
        return
    if any(_has_capacity(job, job.server, options, fields, cluster) for fields in partitions):
        return
    server, names = job.server, " or ".join(f["PartitionName"] for f in partitions)
    num_nodes = server.resources.nodes * max(1, server.replicas)
    counts = [len(_eligible(options, fields, cluster)) for fields in partitions]
    within = "evaluate.in_deploy_job=True (the client runs in the deployment's job), "
    problems.add(
        f"the {job.stage} job could never start beside the {server.stage} job, which takes "
        f"{num_nodes} "
        f"of the {max(counts)} node(s) that both may use in the partition {names} for itself",
        change=f"{within if job.service is None else ''}cluster.partition, or what the deployment "
        "takes of a node (cluster.exclusive=False with cluster.mem, cluster.cpus_per_task and "
        "cluster.gpus_per_node)",
    )


def _has_capacity(
    job: Job, server: Job, options: SlurmOptions, partition: Mapping[str, str], cluster: _Cluster
) -> bool:
    if partition.get("OverSubscribe", "").partition(":")[0] in _SHARED_PARTITIONS:
        return True
    is_exclusive = partition.get("OverSubscribe") == "EXCLUSIVE"
    used, requested = (
        _share(_options_of(one, options).sbatch(one), partition, cluster, exclusive=is_exclusive)
        for one in (server, job)
    )
    nodes = _eligible(options, partition, cluster)
    both = requested.beside(used)
    if sum(both.within(_node(node)) for node in nodes) >= job.resources.nodes:
        return True
    others = len(nodes) - server.resources.nodes * max(1, server.replicas)
    return others >= job.resources.nodes


def _options_of(job: Job, options: SlurmOptions) -> SlurmOptions:
    return job.options if isinstance(job.options, SlurmOptions) else options


def _share(
    parameters: Mapping[str, Any],
    partition: Mapping[str, str],
    cluster: _Cluster,
    *,
    exclusive: bool,
) -> NodeShare:
    """Return the share of a node that a job with these options of sbatch uses."""
    if exclusive or parameters["exclusive"] is True:
        return NodeShare(_ALL, _ALL, _ALL)
    cpus = parameters["ntasks_per_node"] * (parameters["cpus_per_task"] or 1)
    gpus = str(parameters["gpus_per_node"] or parameters["gpus_per_task"] or 0)
    memory = 0.0
    if cluster.memory:
        memory = _memory(parameters["mem"], cpus, (partition, cluster.default_memory))
    return NodeShare(cpus, memory, int(gpus.rpartition(":")[2]))


def _memory(requested: str | None, cpus: int, defaults: Iterable[Mapping[str, str]]) -> float:
    """Megabytes of a node; Slurm gives a job that does not ask all of it, or the default."""
    if requested is None:
        for fields in defaults:
            for name, times in (("DefMemPerNode", 1), ("DefMemPerCPU", cpus)):
                if fields.get(name, "").isdecimal() and int(fields[name]):
                    return float(fields[name]) * times
        return _ALL
    unit = requested[-1].upper()
    number = float(requested[:-1] if unit in _MEGABYTES else requested)
    return number * _MEGABYTES.get(unit, 1) or _ALL


def _eligible(
    options: SlurmOptions, partition: Mapping[str, str], cluster: _Cluster
) -> list[Mapping[str, str]]:
    """The nodes of the partition that the options leave to both jobs."""
    only, without = (slurm_queue.host_names(x) for x in (options.nodelist, options.exclude))
    name = partition["PartitionName"]
    return [
        node
        for node in cluster.nodes
        if name in node.get("Partitions", "").split(",")
        and (not only or node["NodeName"] in only)
        and node["NodeName"] not in without
        and (not options.constraint or options.constraint in node["ActiveFeatures"].split(","))
    ]


def _node(fields: Mapping[str, str]) -> NodeShare:
    gpus = sum(int(count) for count in _GPUS.findall(fields.get("Gres", "")))
    return NodeShare(int(fields["CPUTot"]), int(fields["RealMemory"]), gpus)


def _query_cluster() -> _Cluster:
    config = slurm_queue.slurm_configuration()
    return _Cluster(
        tuple(slurm_queue.nodes()),
        "MEMORY" in config.get("SelectTypeParameters", "").upper(),
        config,
    )


_CANCEL_SECONDS = 30.0


class ScriptExecutor(SlurmExecutor):
    """submitit's Slurm executor with a script of our own in place of a pickled function."""

    job_class = SlurmJob

    def __init__(self, job: Job, options: SlurmOptions) -> None:
        super().__init__(folder=job.folder.root)
        self.job = job
        self.options = options
        self.dependency: str | None = None
        parameters = {k: v for k, v in options.sbatch(job).items() if v not in (None, False)}
        supported = self._valid_parameters() & parameters.keys()
        self.update_parameters(
            **{name: parameters[name] for name in supported},
            additional_parameters={k: v for k, v in parameters.items() if k not in supported},
        )

    @classmethod
    def affinity(cls) -> int:
        """Scripts can be rendered on a machine without Slurm; SlurmCluster.check looks for it."""
        return 1

    def flags(self) -> dict[str, Any]:
        """The options in the script's head, by their long names."""
        parameters = dict(self.parameters)
        parameters.update(parameters.pop("additional_parameters"))
        return {name.replace("_", "-"): value for name, value in parameters.items()}

    def environment(self) -> SubmissionEnvironment:
        further = map(option_name, self.options.sbatch_args)
        return SubmissionEnvironment.of(os.environ, {*self.flags(), *further})

    def script(self) -> str:
        """The text that sbatch is given."""
        return self._make_submission_file_text("", "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        return slurm_script(self.job, self.options, self.flags())

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        dependency = []
        if self.dependency is not None:
            dependency = [f"--dependency={self.dependency}"]
        if self.dependency is not None or self.options.dependency is not None:
            dependency.append("--kill-on-invalid-dep=yes")
        return ["sbatch", *dependency, str(submission_file_path)]

    def submit_script(self) -> str:
        """Submit the script in the job folder; returns the job id."""
        command = self._make_submission_command(self.job.folder.script)
        output = utils.CommandFunction(
            command, verbose=False, env=dict(self.environment().variables)
        )()
        return self._get_job_id_from_submission_command(output)


class SlurmCluster(Cluster[SlurmOptions]):
    """Queues jobs; they run after this process has ended."""

    type: ClassVar[str] = "bcm"
    options_type = SlurmOptions
    hosts_clients: ClassVar[bool] = True
    limits_gpus: ClassVar[bool] = True
    removal_seconds: ClassVar[float] = 60.0

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options)
        self._submitted: list[Submitted] = []
        self._handing_over: Job | None = None
        self._printed_notes: set[str] = set()

    @property
    def whole_nodes(self) -> bool:
        return self.options.exclusive is True

    @property
    def in_container(self) -> bool:
        return self.options.container_runtime != "none"

    @property
    def gpus_per_node(self) -> int | None:
        return self.options.node_gpus

    def check(self, problems: Problems) -> None:
        if shutil.which("sbatch") is None:
            problems.add(
                "sbatch is not on the PATH of this machine: run on a login node of the cluster",
                change="cluster_type (interactive runs the job here)",
            )

    def render(self, job: Job) -> str:
        return ScriptExecutor(job, self.options_of(job)).script()

    def test(self, job: Job) -> str | None:
        """Return sbatch's answer to the script without queueing it; None if Slurm is unreachable.

        Raises ClusterError when it refuses the script, or would queue it indefinitely.
        """
        if not slurm_queue.is_answering():
            return None
        executor = ScriptExecutor(job, self.options_of(job))
        environment = executor.environment()
        tried = subprocess.run(
            ["sbatch", "--test-only"],
            input=executor.script(),
            capture_output=True,
            text=True,
            check=False,
            env=environment.variables,
        )
        output = (tried.stderr or tried.stdout).strip()
        problems = Problems(f"the {job.stage} job")
        if tried.returncode:
            key = slurm_queue.rejected_key(output)
            problems.add(f"sbatch would refuse the {job.stage} job: {output}", change=key)
        else:
            options = _with_defaults(executor.options, environment)
            if options.qos is None:  # a quality of service can lift the partition's limits
                slurm_queue.check_partition(options.partition, job.resources, problems, job.stage)
            check_capacity(job, options, problems)
            self._check_mpi(job, options, problems)
        problems.raise_if_any(ClusterError)
        return "\n# ".join([output, *self._notes(job)])

    def _check_mpi(self, job: Job, options: SlurmOptions, problems: Problems) -> None:
        """Tasks on several nodes find each other through a plugin of srun."""
        types = slurm_queue.mpi_types()
        if job.resources.nodes > 1 and any(step.mpi for step in job.steps) and types:
            problems.check_choice("mpi type of this srun", options.mpi, types, "cluster.mpi")

    def _notes(self, job: Job) -> list[str]:
        """Return notes for the user about the submission."""
        options, needed = self.options_of(job), job.resources.cpus_per_task
        notes = ScriptExecutor(job, options).environment().notes()
        if needed is not None and options.cpus_per_task and options.cpus_per_task < needed:
            notes.append(
                f"cluster.cpus_per_task={options.cpus_per_task} is fewer than the {needed} CPUs "
                f"that the {job.stage} job needs: one for each rank on a node and one more"
            )
        return notes

    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        executor = ScriptExecutor(job, self.options_of(job))
        for note in self._notes(job):
            if note not in self._printed_notes:
                print(f"note: {note}")
                self._printed_notes.add(note)
        job.write(executor.script())
        executor.dependency = _dependency(job, after)
        self._handing_over = job
        # Found with its id by `jobs`, also if this process is killed before it has the id.
        unnumbered = Submitted(job, "", after)
        unnumbered.write_record(self.type)
        try:
            submitted = Submitted(job, _hand_over(executor), after)
        except ClusterError:
            unnumbered.remove_record()
            raise
        self._submitted.append(submitted)
        self._handing_over = None
        submitted.write_record(self.type)
        if job.stops_server and job.server is not None:
            for service in filter(None, (job.server, job.server.gateway)):
                write_text(service.folder.client_file, f"{submitted.job_id}\n")
        _check_reason(submitted)
        print(f"{job.stage}: submitted {job.name} as Slurm job {submitted.job_id}")
        print(f"  job folder: {job.folder.root}")
        print(f"  log: {submitted.log}", flush=True)
        if job.client is not None:
            print(f"{job.client.stage}: {job.client.name} is a step of that job", flush=True)
        return submitted

    def goes_on(self, error: LauncherError) -> bool:  # noqa: ARG002
        """No: what it raises is a refusal, and all jobs are taken back."""
        return False

    def abort(self) -> None:
        """Take jobs back whose successors could not be submitted, and one just handed over."""
        if self._handing_over is not None:
            for job_id in slurm_queue.jobs_of_script(self._handing_over.folder.script) or ():
                self._submitted.append(Submitted(self._handing_over, job_id))
        self._handing_over = None
        for submitted in reversed(self._submitted):
            output = slurm_queue.signal_job(submitted.job_id)
            done = f"could not cancel ({output})" if output else "cancelled"
            print(f"{submitted.job.stage}: {done} Slurm job {submitted.job_id}", flush=True)
        self._submitted.clear()

    def finish(self) -> None:
        """Nothing to wait for: the queue has the jobs."""

    def close(self) -> None:
        """Nothing runs on this machine."""

    @classmethod
    def state(cls, folder: Path, record: JobRecord, job_id: str) -> JobState:  # noqa: ARG003
        return slurm_queue.slurm_job_state(job_id)

    @classmethod
    def stop(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        """A running server is asked through its script; any other job is cancelled."""
        state = cls.state(folder, record, job_id)
        if record.ready_file is None or not state.running:
            cls.cancel(folder, record, job_id)
            return
        _complain(slurm_queue.signal_job(job_id, "--batch", "--signal=TERM"))
        timeout = record.stop_timeout + _CANCEL_SECONDS
        if not wait_for(lambda: cls.state(folder, record, job_id).finished, timeout):
            cls.cancel(folder, record, job_id)

    @classmethod
    def cancel(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        _complain(slurm_queue.signal_job(job_id))
        wait_for(lambda: cls.state(folder, record, job_id).finished, _CANCEL_SECONDS)


def _with_defaults(options: SlurmOptions, environment: SubmissionEnvironment) -> SlurmOptions:
    """The options with the defaults of the user's shell."""
    names = {"partition", "qos", "constraint"} & environment.defaults.keys()
    values: dict[str, Any] = {
        name: environment.variables[environment.defaults[name]] or None for name in names
    }
    return replace(options, **values)


def _hand_over(executor: ScriptExecutor) -> str:
    """The id of the job, which Slurm may also have queued when its answer came too late."""
    job = executor.job
    try:
        return executor.submit_script()
    except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
        queued = slurm_queue.jobs_of_script(job.folder.script)
        if queued:
            return queued[0]
        message = f"sbatch refused the {job.stage} job: {str(error).strip()}"
        if queued is None and shutil.which("squeue") is not None:
            message += "; squeue does not answer whether it is queued all the same"
        message += f"; its script is {job.folder.script}"
        raise ClusterError(problem(message, change=slurm_queue.rejected_key(str(error)))) from error


def _complain(output: str) -> None:
    if output:
        raise ClusterError(output)


def _check_reason(submitted: Submitted) -> None:
    """Raise when Slurm has queued a job that it can never start.

    One whose predecessor has failed meanwhile is taken out of the queue by Slurm itself.
    """
    if not slurm_queue.is_answering():
        return
    time.sleep(0.1)  # the reason is noted when the job is first considered
    reason = slurm_queue.slurm_job_state(submitted.job_id).reason
    if reason in slurm_queue.BLOCKING_REASONS and reason != slurm_queue.FAILED_PREDECESSOR:
        raise ClusterError(
            problem(
                f"Slurm would keep the {submitted.job.stage} job {submitted.job_id} waiting for "
                f"ever ({reason}): {slurm_queue.BLOCKING_REASONS[reason]}"
            )
        )


def _dependency(job: Job, after: Submitted | None) -> str | None:
    """Return the value of sbatch --dependency: finished jobs must have succeeded, a service must
    have started.

    Of an array all tasks must, but for a gateway, which serves with the first of them: the others
    may find no room. A cancelled job counts as started for Slurm, so what a service waits for is
    waited for as well.
    """
    if job.after_any:
        return _after_any(after)
    conditions = []
    while after is not None:
        first = f"_{after.job.first_replica}" if after.job.replicas and job.service else ""
        conditions.append(f"{'after' if after.job.service else 'afterok'}:{after.job_id}{first}")
        after = after.after if after.job.service and not after.job.after_any else None
    return ",".join(conditions) or None


def _after_any(after: Submitted | None) -> str | None:
    """Return the dependency on the end of the jobs before, down to the last one that waited in this
    way itself."""
    ids: list[str] = []
    while after is not None:
        ids.insert(0, after.job_id)
        after = None if after.job.after_any else after.after
    return f"afterany:{':'.join(ids)}" if ids else None
