"""Options of sbatch, srun and pyxis, and the script of a Slurm job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.cluster.job import ClusterOptions, Job, Service, Step
from launcher_scripts.cluster.record import RUNNING, WAITING
from launcher_scripts.cluster.slurm_queue import slurm_seconds
from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.common.packages import ERROR, VERDICT_FILE, VERDICTS
from launcher_scripts.common.rendering import render
from launcher_scripts.config.options import check_options, option

# Characters that a mount cannot have, and why.
_REJECTED = {
    # Mounts stand between double quotes in a script that a shell on the node runs.
    "pyxis": (re.compile(r"[\"$`\\]"), 'pyxis has a shell read mounts: no ", $, ` or \\ in them'),
    # Mounts are fields of a line with escapes.
    "enroot": (re.compile(r"[\s\\]"), "enroot takes no mount with a space or a backslash"),
}
# enroot's notation of an image: [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST].
_NAME = re.compile(
    r"([\w.!~*'()%;:&=+$,-]+@)?([^#/@\s]+#)?[a-z0-9/._-]+(:[\w.:-]+)?(@sha256:[0-9a-fA-F]+)?",
    re.ASCII,
)
_LOCAL_NAME = re.compile(r"(dockerd|podman)://[\w/.:-]+", re.ASCII)
_SQUASHFS = b"hsqs"
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_ENROOT_MOUNT_FLAGS = "none:x-create=auto,rbind"


def is_file(image: str) -> bool:
    """Return whether an image is given as a path; anything else is a name in a registry."""
    named = image.endswith((".sqsh", ".squashfs")) and "://" not in image
    return named or image.startswith(("/", ".", "~"))


def registry_name(image: str) -> str:
    """[USER@][REGISTRY#]IMAGE[:TAG], which every version of pyxis takes, from docker's spelling.

    A registry that is joined to the image with a slash would be looked up in Docker Hub, and not
    every pyxis knows the prefix docker://.
    """
    name = image.removeprefix("docker://")
    host, slash, path = name.partition("/")
    user, at, registry = host.rpartition("@")
    if "://" in name or "#" in name or not slash:
        return name
    if registry in _DOCKER_HUB:
        return user + at + path
    if "." in registry or ":" in registry or registry == "localhost":
        return f"{user}{at}{registry}#{path}"
    return name


def image_problem(image: str) -> str | None:
    """Why no container can come of an image that is there, or of one with such a name."""
    if not is_file(image):
        name = registry_name(image)
        if _NAME.fullmatch(name) or _LOCAL_NAME.fullmatch(name):
            return None
        return "not a name of an image: [USER@][REGISTRY/]IMAGE[:TAG], with IMAGE in lower case"
    try:
        with Path(image).open("rb") as file:
            magic = file.read(len(_SQUASHFS))
    except IsADirectoryError:
        magic = b""
    except OSError:  # not for this user, or not on this machine
        return None
    return None if magic == _SQUASHFS else "the container image is not a squashfs file (.sqsh)"


def check_mounts(job: Job, runtime: str) -> None:
    """Refuse the mounts, of a job or its client, that `runtime` would take for something else."""
    if runtime not in _REJECTED:
        return
    pattern, reason = _REJECTED[runtime]
    problems = Problems(f"the {job.stage} job's container")
    containers = (owner.container for owner in (job, job.client) if owner is not None)
    mounts = (mount for container in containers if container for mount in container.mounts)
    for mount in dict.fromkeys(mounts):
        if pattern.search(mount):
            change = "container_mounts, or the key that holds the path"
            problems.add(reason, got=mount, change=change)
    problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class EnrootImage:
    """The image's file; one from a registry (`uri`) is fetched into it, through `partial`."""

    file: Path
    uri: str | None = None

    @property
    def partial(self) -> Path:
        return self.file.with_name(self.file.name + ".partial")

    @property
    def lock(self) -> Path:
        return self.file.with_name(self.file.name + ".lock")

    @classmethod
    def find(cls, image: str, cache: str | None) -> EnrootImage:
        """An absolute path is a file, anything else pyxis' name of an image in a registry."""
        if is_file(image):
            return cls(Path(image))
        if cache is None or not Path(cache).is_absolute():
            raise ConfigError(
                problem(
                    "an image of a registry needs an absolute folder to be kept in",
                    got=cache,
                    change="cluster.image_cache, or container (the path of a .sqsh file)",
                )
            )
        name = registry_name(image)
        uri = name if "://" in name else f"docker://{name}"
        stem = re.sub(r"[^A-Za-z0-9._-]", "+", uri.removeprefix("docker://"))
        return cls(Path(cache) / f"{stem}.sqsh", uri)


def enroot_mount(mount: str) -> str:
    """`source:target[:flag+flag]` as enroot's fields of an fstab."""
    source, target, *flags = mount.split(":")
    return ":".join(
        [source, target, ",".join([_ENROOT_MOUNT_FLAGS, *"+".join(flags).split("+")]).rstrip(",")]
    )


_LAUNCHER_KEYS = (
    *("type", "job_name_prefix", "mpi", "srun_args", "python", "requeue"),
    *("container_runtime", "image_cache", "overlay", "setup", "sbatch_args"),
    *("ssh", "ssh_python"),
)
# Options of sbatch that the launcher sets itself, or that would end its dialogue with sbatch.
_REJECTED_ARGS = (
    *("array", "job-name", "nodes", "ntasks-per-node", "open-mode", "output", "error", "parsable"),
    *("signal", "test-only", "time", "wait", "wrap"),
)
_GPUS = re.compile(r"(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>[1-9]\d*)")
_GPUS_OF_GRES = re.compile(r"(?:^|,)(?:gres[/:])?gpu(?::[A-Za-z][\w.-]*)?:(\d+)(?=,|$|\()")
_MPI = re.compile(r"pmix(_v\d+)?|pmi2|none")
_MPI_TYPES = ("pmix", "pmix_v<version>", "pmi2", "none")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_EXCLUSIVE = ("True", "False", "user", "mcs")
_RUNTIMES = ("pyxis", "enroot", "none")
# Slurm may send the signal before a time limit up to a minute early, but never late.
_SIGNAL_MARGIN = 10
_EARLY_SECONDS = 60
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """conf/cluster/bcm.yaml: sbatch's options by their names, and our own keys.

    mpi:       how the tasks of a server find each other (srun --mpi)
    srun_args: further arguments of every srun
    sbatch_args: further options of sbatch: [--wckey=x]
    gpus_per_node: a number, or with Slurm's type before it: a100:8
    requeue:   whether Slurm may run the job again after a node failure or preemption; null: as
               the cluster is set up
    container_runtime: what starts the container: pyxis (srun's options), enroot (its commands
               in the script), or none: the steps run on the host
    ssh, ssh_python: the login node that submits, and its interpreter; see common/hosts.py
    image_cache: folder that all nodes see, for images that enroot fetches from a registry
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
    exclusive: bool | str | None = True
    overcommit: bool | None = False
    gpus_per_task: int | None = option(
        None, "instead of gpus_per_node; a node runs one task", lower=1
    )
    gpus_per_node: int | str | None = 8
    gres: str | None = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    cpus_per_task: int | None = option(None, "CPUs of every task", lower=1)
    mem: str | None = "0"
    job_name_prefix: str = "nemo-megatron-"
    mpi: str = "pmix"
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    requeue: bool | None = False
    container_runtime: str = option("pyxis", "what starts the container", choices=_RUNTIMES)
    image_cache: str | None = None
    ssh: str | None = None
    ssh_python: str = "python3"

    def _check(self, problems: Problems) -> None:
        super()._check(problems)
        check_options(self, problems, "cluster.{}".format)
        self._check_words(problems)
        self._check_arguments(problems)
        if not _MPI.fullmatch(self.mpi):
            problems.add("unknown mpi", got=self.mpi, choices=_MPI_TYPES, change="cluster.mpi")
        if self.exclusive is not None:
            exclusive = str(self.exclusive)
            problems.check_choice("exclusive", exclusive, _EXCLUSIVE, "cluster.exclusive")
        if self.mem is not None and not _MEMORY.fullmatch(self.mem):
            notations = ("0 (all of a node)", "megabytes", "a number with K, M, G or T")
            problems.add("no size of memory", got=self.mem, choices=notations, change="cluster.mem")

    def _check_words(self, problems: Problems) -> None:
        """An empty value would make an option of its own, or of the next one."""
        for name, value in asdict(self).items():
            words = value if isinstance(value, tuple) else (value,)
            if name != "job_name_prefix" and "" in words:
                problems.add(
                    f"{name} is empty",
                    got=value,
                    change=f"cluster.{name} (null leaves the option out)",
                )

    def _check_arguments(self, problems: Problems) -> None:
        for argument in self.sbatch_args:
            name = option_name(argument)
            if not argument.startswith("--") or name in _REJECTED_ARGS:
                problems.add(
                    "an option of sbatch that the launcher sets itself"
                    if name in _REJECTED_ARGS
                    else "an option of sbatch is one word: --NAME or --NAME=VALUE",
                    got=argument,
                    change="cluster.sbatch_args",
                )

    @property
    def num_gpus(self) -> int | None:
        """The number of `gpus_per_node`, or that of the GPUs in `gres`."""
        if self.gpus_per_node is not None:
            match = _GPUS.fullmatch(str(self.gpus_per_node))
            return int(match["count"]) if match else 0
        counts = [int(count) for count in _GPUS_OF_GRES.findall(self.gres or "")]
        return sum(counts) or None

    @property
    def gpu_type(self) -> str:
        """Slurm's type of the GPUs with a colon, for srun's options; empty if none is named."""
        match = _GPUS.fullmatch(str(self.gpus_per_node or ""))
        return f"{match['type']}:" if match and match["type"] else ""

    def cpus_of(self, job: Job) -> int | None:
        """CPUs of a task: as configured, or on shared nodes as many as it needs."""
        if self.cpus_per_task is not None or self.exclusive is True:
            return self.cpus_per_task
        return job.resources.cpus_per_task

    @property
    def node_gpus(self) -> int | None:
        """GPUs that a job gets on every node, where a node runs one task."""
        return self.num_gpus if self.gpus_per_task is None else self.gpus_per_task

    def sbatch(self, job: Job) -> dict[str, Any]:
        """The parameters of the submission, in submitit's spelling."""
        options = {key: value for key, value in asdict(self).items() if key not in _LAUNCHER_KEYS}
        if self.gpus_per_task is not None:
            # With both, Slurm wants as many tasks on a node as the one divided by the other.
            options["gpus_per_node"] = None
        if job.resources.gpus_per_node is not None:
            options |= {"gpus_per_node": job.resources.gpus_per_node or None, "gpus_per_task": None}
        if job.resources.gpus_per_node == 0:
            options |= {
                "exclusive": None,
                "mem": None if self.mem == "0" else self.mem,
                "gres": None,
            }
        signal = None
        if job.service is not None:
            signal = f"B:USR1@{_warning_seconds(job, job.service)}"
        first, last = job.first_replica, job.first_replica + job.replicas - 1
        return {
            "job_name": self.job_name_prefix + job.name,
            "nodes": job.resources.nodes,
            "ntasks_per_node": job.resources.tasks_per_node,
            "time": job.resources.time_limit,
            **options,
            "cpus_per_task": self.cpus_of(job),
            "array": f"{first}-{last}" if job.replicas else None,
            "output": file_pattern(job.folder.log_stem, array=job.replicas > 0),
            "signal": signal,
            "open-mode": "append",
            "requeue": self.requeue or None,
            "no-requeue": self.requeue is False or None,
        }


def option_name(argument: str) -> str:
    """The long name of an option of sbatch."""
    return argument.lstrip("-").partition("=")[0]


def _warning_seconds(job: Job, service: Service) -> int:
    """Seconds before the time limit at which a server is told to end.

    Raises ConfigError for a limit that leaves no time before.
    """
    warning = math.ceil(service.stop_timeout) + _SIGNAL_MARGIN
    text = job.resources.time_limit
    limit = slurm_seconds(text) if _TIME.fullmatch(text) else 0  # 0: none
    if 0 < limit <= warning + _EARLY_SECONDS:
        raise ConfigError(
            problem(
                f"the time limit leaves no time to serve: {warning} s before it the server is told "
                f"to end, and Slurm may do so {_EARLY_SECONDS} s early",
                got=job.resources.time_limit,
                change=f"{job.stage}.run.time_limit, or the server's stop_timeout",
            )
        )
    return warning


def file_pattern(stem: str, *, array: bool = False) -> str:
    """Slurm's file name pattern of `<stem>_<job id>.out`; ids of an array's tasks are `1_0`."""
    if "\\" in stem:
        raise ConfigError(
            problem(
                "Slurm puts no job id into the name of a log whose path has a backslash",
                got=stem,
                change="run.results_dir, base_results_dir or run.name of the stage",
            )
        )
    return stem.replace("%", "%%") + ("_%A_%a.out" if array else "_%j.out")


# They would change how the script finds Slurm's programs, and neither enroot nor pyxis takes
# them over from a job.
_OF_THE_NODE = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
# enroot keeps variables as lines of a file, and takes quotes around a value off.
_NO_LINE = re.compile(r"|.*\n.*|[\"'].*[\"']\s*", re.DOTALL)


@dataclass(frozen=True)
class Variables:
    """exported: for all of a script; given: in front of a step's command, as arguments of env."""

    exported: Mapping[str, str]
    given: Mapping[str, str]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Variables:
        values = {
            name: value
            for name, value in env.items()
            if name in _OF_THE_NODE or _NO_LINE.fullmatch(value)
        }
        return cls({name: env[name] for name in env if name not in values}, values)


# Seconds between two queries of a client's job about its server's, and of a server's about its
# client's.
_CHECK_SECONDS = 5
_WATCH_SECONDS = 20
_LIVING = "|".join(sorted(RUNNING | WAITING))


def slurm_script(job: Job, options: SlurmOptions, sbatch: Mapping[str, Any]) -> str:
    """The text that sbatch is given; `sbatch` are the options in its head, by their long names."""
    env = {**(job.client.env if job.client is not None else {}), **job.env}
    exported = Variables.of(env).exported
    check_mounts(job, options.container_runtime)
    return render(
        "slurm.sh.j2",
        job=job,
        env=exported,
        variables_of=Variables.of,
        sbatch=dict(sorted(sbatch.items())),
        options=options,
        starts=_starts,
        server_log=file_pattern(job.folder.server_log_stem),
        error_code=ERROR,
        living=_LIVING,
        watch_seconds=_WATCH_SECONDS,
        enroot=_enroot(job, options, exported),
        beside=_overlapping(job),
    )


def _starts(job: Job) -> list[tuple[Step, ...]]:
    """The steps as srun starts them: in a container together, so that it is unpacked once.

    pyxis removes a container without a name with its step, however that ends.
    """
    return [job.steps] if job.container is not None else [(step,) for step in job.steps]


def _enroot(job: Job, options: SlurmOptions, env: Mapping[str, str]) -> str:
    """The functions of the script that run a step in a container without pyxis."""
    container = job.container
    if container is None or options.container_runtime != "enroot":
        return ""
    mounts = container.mounts
    if job.client is not None and job.client.container is not None:
        mounts = tuple(dict.fromkeys([*mounts, *job.client.container.mounts]))
    return render(
        "enroot.sh.j2",
        image=EnrootImage.find(container.image, options.image_cache),
        mounts=[enroot_mount(mount) for mount in mounts],
        env=tuple(env),
    )


def _overlapping(job: Job) -> str:
    """The functions of the script that run a client as long as its server runs."""
    server = job if job.client is not None else job.server
    if server is None or server.service is None:
        return ""
    return render(
        "beside_server.sh.j2",
        error_code=ERROR,
        verdicts=VERDICTS,
        verdict_file=(job.client or job).folder.results_dir / VERDICT_FILE,
        living=_LIVING,
        job=job,
        server_log_stem=job.folder.server_log_stem,
        check_seconds=1 if job.client is not None else _CHECK_SECONDS,
        stop_seconds=math.ceil(server.service.stop_timeout),
    )
