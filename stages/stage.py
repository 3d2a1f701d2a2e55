"""A stage turns its block of the configuration into settings, and these into a job."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from launcher_scripts.cluster.cluster import Cluster
from launcher_scripts.cluster.job import Container, Job, JobFolder, Resources, Service, Step
from launcher_scripts.cluster.slurm_script import image_problem, is_file, registry_name
from launcher_scripts.common.packages import FILE_NAME, STEP_PACKAGES, remedy
from launcher_scripts.config.options import absolute, build, paths_in
from stages.checks import Checks, Mount, check_variables, missing_packages, mounts_for

CLEANUP_SECONDS = 20.0


@dataclass(frozen=True)
class LauncherConfig:
    """The keys of conf/config.yaml, without the blocks of cluster and stages."""

    stages: tuple[str, ...]
    cluster_type: str
    launcher_scripts_path: str
    data_dir: str
    base_results_dir: str
    container: str | None
    container_mounts: tuple[str | None, ...]
    env_vars: Mapping[str, Any]
    dry_run: bool

    @property
    def checkout(self) -> Path:
        """The folder that holds launcher_scripts, for the jobs' PYTHONPATH."""
        return Path(absolute(self.launcher_scripts_path)).parent

    def mounts(self) -> list[Mount]:
        return [Mount.parse(entry) for entry in self.container_mounts if entry]


@dataclass(frozen=True)
class Launch:
    """State that the stages of one command line share.

    blocks:    the configuration of every stage, also of those that do not run
    stages:    the names of those that run, in order
    arguments: the `key=value` of the command line
    """

    config: LauncherConfig
    cluster: Cluster[Any]
    blocks: Mapping[str, Any]
    stages: tuple[str, ...]
    checks: Checks
    arguments: tuple[str, ...] = ()

    @property
    def overrides(self) -> dict[str, str]:
        """Key -> text of its value on the command line."""
        pairs = (argument.partition("=") for argument in self.arguments)
        return {key.lstrip("+"): text for key, _, text in pairs}


@dataclass(frozen=True)
class StageRun:
    """The block `run` of every stage: how its job is called, and where its results go."""

    name: str
    time_limit: str
    results_dir: str

    def resources(self) -> Resources:
        return Resources(time_limit=self.time_limit)


@dataclass(frozen=True)
class ClientRun(StageRun):
    """The options of a job that needs no GPU: it must not wait for those that its servers hold."""

    gpus_per_node: int | None

    def resources(self) -> Resources:
        return Resources(time_limit=self.time_limit, gpus_per_node=self.gpus_per_node)


class Stage(ABC):
    """One phase of a deployment.

    name:  in STAGES and in the configuration
    block_type: the dataclass of `block`, the stage's block in the configuration
    modules: launcher_scripts.steps.<module> of the commands that the job may run
    mpi: whether the tasks of a step find each other through the cluster's process manager
    caches: variables of what programs keep below the home directory -> folders of results_dir
    """

    name: ClassVar[str]
    block_type: ClassVar[type]
    modules: ClassVar[tuple[str, ...]]
    mpi: ClassVar[bool] = False
    caches: ClassVar[Mapping[str, str]] = {}

    block: Any
    cluster: Cluster[Any]

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        block = dict(launch.blocks[self.name] or {})
        cluster = block.pop("cluster", None) or {}
        self.cluster = (
            launch.cluster.for_stage(cluster, f"{self.name}.cluster") if cluster else launch.cluster
        )
        self.block = build(self.block_type, block, f"the {self.name} stage", key=self.name)

    @cached_property
    @abstractmethod
    def settings(self) -> Any:
        """Settings that the steps of the job read."""

    @property
    def brings(self) -> tuple[str, ...]:
        """Names of later stages that this one cannot do without."""
        return ()

    def joins(self, server: Job) -> bool:  # noqa: ARG002
        """Return whether the stage's steps run in the job of this server."""
        return False

    def stops(self, server: Job) -> bool:  # noqa: ARG002
        """Return whether the stage's job stops this server at its end."""
        return False

    def job_settings(self, folder: JobFolder, server: Job | None) -> Any:  # noqa: ARG002
        """The settings with what is only known of a certain job."""
        return self.settings

    @abstractmethod
    def check_stage(self) -> None:
        """Find what cannot work with this stage's settings."""

    def paths(self) -> list[Path]:
        """The paths that the job reads or writes, besides its job folder."""
        return [Path(named.path) for named in paths_in(self.settings)]

    def step_names(self) -> tuple[str, ...]:
        """Steps of `modules` that this job runs, in order."""
        return self.modules

    def resources(self) -> Resources:
        run: StageRun = self.block.run
        return run.resources()

    def service(self) -> Service | None:
        """The service of a job that does not end by itself; None for others."""
        return None

    @property
    def replicas(self) -> int:
        """Number of tasks of the array of jobs; 0: no array."""
        return 0

    @property
    def first_replica(self) -> int:
        """The number of the first task of the array."""
        return 0

    def step_gpus(self) -> int | None:
        """Number of GPUs of a node that the steps need; None: all that the job has."""
        return None

    def env(self) -> dict[str, str]:
        """Variables of this stage alone."""
        return {name: str(folder) for name, folder in self._cache_folders().items()}

    def _cache_folders(self) -> dict[str, Path]:
        """The folders of `caches`, which outlive the job, by their variables.

        In a container there is no home directory, and what is there cannot be written to. The
        folder above exists as soon as there is a job folder, so it can be mounted.
        """
        if not self.in_container:
            return {}
        return {variable: self.results_dir / name for variable, name in self.caches.items()}

    @property
    def in_container(self) -> bool:
        return self.cluster.in_container and self.launch.config.container is not None

    @property
    def python(self) -> str:
        """The interpreter of the steps; on the host the one that plans the job."""
        return self.cluster.python or ("python3" if self.in_container else sys.executable)

    @property
    def overlay(self) -> Path | None:
        """The folder of Python packages that the jobs' interpreter lacks."""
        overlay = self.cluster.overlay
        return None if overlay is None else Path(absolute(overlay))

    @property
    def results_dir(self) -> Path:
        return Path(absolute(self.block.run.results_dir))

    def check(self) -> None:
        """Find what cannot work; findings go to launch.checks, unusable settings are raised."""
        checks, config = self.launch.checks, self.launch.config
        run: StageRun = self.block.run
        checks.time_limit(run.time_limit, f"{self.name}.run.time_limit")
        gpus, key = run.resources().gpus_per_node, f"{self.name}.run.gpus_per_node"
        checks.problems.check_minimum("gpus_per_node", gpus or 0, 0, key)
        self._check_files(checks, config)
        names = (name for name, value in config.env_vars.items() if value is not None)
        check_variables(checks, names)
        self.check_stage()

    def _check_files(self, checks: Checks, config: LauncherConfig) -> None:
        steps = Path(absolute(config.launcher_scripts_path)) / "steps"
        for module in self.step_names():
            value = f"the step {module} of the launcher"
            checks.exists(value, steps / f"{module}.py", "launcher_scripts_path")
        if self.in_container:
            self._check_image(checks)
        if self.overlay is not None:
            value = "what requirements/overlay.py leaves in its folder"
            checks.exists(value, self.overlay / FILE_NAME, "cluster.overlay")
        self._check_packages(checks, config)

    def packages(self) -> tuple[str, ...]:
        """Steps of STEP_PACKAGES, and further modules, that the job's Python needs."""
        return self.step_names()

    def _check_packages(self, checks: Checks, config: LauncherConfig) -> None:
        """The job's Python has all packages, if that can be known on this machine."""
        if self.in_container or self.cluster.options.setup:
            return
        needed = {module for name in self.packages() for module in STEP_PACKAGES.get(name, (name,))}
        env = self._env()["PYTHONPATH"]
        is_this = self.python == sys.executable and env == str(config.checkout)
        missing = missing_packages(self.python, None if is_this else env, tuple(sorted(needed)))
        if missing:
            version = "{}.{}".format(*sys.version_info[:2]) if is_this else "X.Y"
            checks.absent.add(
                f"the Python of the {self.name} stage does not have {', '.join(missing)}",
                got=self.python,
                change=remedy(version, torch="torch" in missing),
            )

    def _check_image(self, checks: Checks) -> None:
        image = self._image()
        if is_file(image) and not Path(image).exists():
            checks.absent.add("the container image is not there", got=image, change="container")
        elif (reason := image_problem(image)) is not None:
            checks.problems.add(reason, got=image, change="container")

    def _image(self) -> str:
        """The configured image: an absolute path, or pyxis' name of one in a registry."""
        image = str(self.launch.config.container)
        return absolute(image) if is_file(image) else registry_name(image)

    def job(self, folder: JobFolder, server: Job | None = None) -> Job:
        """The job that does the stage's work, with its files in `folder`.

        server: the job of the server that the same command line starts before
        """
        resources = self.resources()
        return Job(
            stage=self.name,
            folder=folder,
            settings=self.job_settings(folder, server),
            steps=tuple(self._step(module, folder, resources) for module in self.step_names()),
            resources=resources,
            env=self._env(),
            container=self._container(folder),
            service=self.service(),
            server=server,
            options=self.cluster.options,
            replicas=self.replicas,
            first_replica=self.first_replica,
        )

    def _step(self, module: str, folder: JobFolder, resources: Resources) -> Step:
        command = (self.python, "-m", f"launcher_scripts.steps.{module}")
        return Step(
            name=module,
            argv=(*command, "--settings", str(folder.settings)),
            nodes=resources.nodes,
            tasks_per_node=resources.tasks_per_node,
            mpi=self.mpi,
            gpus=self.step_gpus(),
        )

    def env_origin(self, name: str) -> str:
        """Return the origin of a variable of the job."""
        is_set = self.launch.config.env_vars.get(name) is not None
        if name == "PYTHONPATH":
            overlay = ", cluster.overlay" if self.overlay else ""
            return f"launcher_scripts_path{overlay}" + (", env_vars" if is_set else "")
        if is_set:
            return "env_vars"
        return f"the {self.name} stage" if name in self.env() else "the launcher"

    def mount_origin(self, mount: str) -> str:
        """Return the origin of a mount: configured, or needed for paths below it."""
        mounts = [str(mount) for mount in self.launch.config.mounts()]
        return "container_mounts" if mount in mounts else f"paths of the {self.name} stage"

    def _env(self) -> dict[str, str]:
        """The stage's variables, and over them the user's; the launcher is always importable."""
        config = self.launch.config
        variables = {
            name: str(value) for name, value in config.env_vars.items() if value is not None
        }
        path = [config.checkout, self.overlay, variables.pop("PYTHONPATH", None)]
        env = {"PYTHONPATH": ":".join(map(str, filter(None, path))), "PYTHONUNBUFFERED": "1"}
        return {**env, **self.env(), **variables}

    def _container(self, folder: JobFolder) -> Container | None:
        config = self.launch.config
        if not self.in_container:
            return None
        folders = [
            config.checkout,
            *map(Path, (absolute(config.base_results_dir), absolute(config.data_dir))),
        ]
        paths = [config.checkout / "launcher_scripts", folder.root, *self.paths()]
        paths += self._cache_folders().values()
        if self.overlay is not None:
            paths.append(self.overlay / FILE_NAME)
        mounts = mounts_for(paths, folders, config.mounts())
        return Container(self._image(), tuple(str(mount) for mount in mounts))


class ServiceStage(Stage):
    """One whose job runs until it is stopped; its settings have the ready file and the times."""

    def job_settings(self, folder: JobFolder, server: Job | None) -> Any:  # noqa: ARG002
        return replace(self.settings, job_folder=str(folder.root))

    def service(self) -> Service:
        """It ends its requests within the settings' stop_timeout; then its processes are put away,
        and its container.
        """
        settings = self.settings
        stop_timeout = settings.stop_timeout + CLEANUP_SECONDS
        if self.in_container:
            stop_timeout += self.cluster.removal_seconds
        return Service(settings.ready_file, settings.ready_timeout, stop_timeout)
