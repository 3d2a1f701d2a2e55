"""The plan of one command line: which stages run where, checked before anything is started."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher_scripts.cluster import CLUSTERS
from launcher_scripts.cluster.cluster import Cluster
from launcher_scripts.cluster.job import Job, JobFolder, Submitted
from launcher_scripts.common.errors import (
    ClusterError,
    ConfigError,
    LauncherError,
    Problems,
    lookup,
    problem,
)
from launcher_scripts.common.packages import LATER_STEPS
from launcher_scripts.common.processes import SignalInterruption
from launcher_scripts.common.quantization import QUANTIZATIONS
from launcher_scripts.config.evaluation import LadderPrecision, LadderSettings, check_rungs
from launcher_scripts.config.options import build
from launcher_scripts.config.settings import AUTO
from stages import STAGES
from stages.checks import Checks
from stages.deploy import Deploy
from stages.evaluate import Evaluate
from stages.export import Export
from stages.stage import ClientRun, Launch, LauncherConfig, Stage

KEY = "evaluate.ladder"
TIME_LIMIT = "0:10:00"
_HALF_TYPES = ("fp16", "bf16")
_STAGES = ("export", "deploy", "gateway", "evaluate")


def configurations(config: DictConfig) -> Iterator[DictConfig]:
    """The configuration of every rung, in order; without a ladder the given one.

    A rung's evaluate.ladder names that rung alone. Raises ConfigError for wrong rungs.
    """
    names = config.evaluate.ladder
    if names is None:
        yield config
        return
    if OmegaConf.is_list(names):
        names = tuple(map(str, names))
    if not isinstance(names, tuple) or not names:
        raise ConfigError(problem("a ladder is a list of rungs", got=names, change=KEY))
    check_rungs(names)
    for name in names:
        yield _precision(copy.deepcopy(config), name)


def _precision(config: DictConfig, name: str) -> DictConfig:
    """The rung's precision, and names of its own for its folders and jobs."""
    model, serving = config.export.model, config.export.triton_deployment
    quantization = QUANTIZATIONS.get(name)
    data_type = str(serving.data_type) if quantization else name
    if data_type == AUTO:
        data_type = "bf16"
    if quantization and data_type not in _HALF_TYPES:
        key = "export.triton_deployment.data_type"
        message = f"the rung {name} computes in the configured half type"
        raise ConfigError(problem(message, got=data_type, choices=_HALF_TYPES, change=key))
    model.weight_data_type = serving.data_type = data_type
    serving.int8_mode, serving.quantization = 0, quantization
    model.reuse = not model.overwrite
    config.evaluate.ladder = [name]
    if quantization:
        config.export.run.config_summary = f"{config.export.run.config_summary}_{name}"
    for stage in _STAGES:
        config[stage].run.name = f"{config[stage].run.name}_{name}"
    return config


@dataclass(frozen=True)
class LadderBlock:
    """The part of the configuration of the other stages; see Ladder."""

    run: ClientRun


class Ladder(Stage):
    """The comparison of all rungs. Its checks are of the rungs together."""

    name = "ladder"
    block_type = LadderBlock
    modules = ("write_ladder",)
    caches = Evaluate.caches

    def __init__(self, rungs: Sequence[Launch]) -> None:
        first = Evaluate(rungs[0])
        base, model = rungs[0].config.base_results_dir, first.block.model_name
        run = {
            "name": f"ladder_{model}",
            "time_limit": TIME_LIMIT,
            "results_dir": f"{base}/{model}/ladder",
            "gpus_per_node": first.block.run.gpus_per_node,
        }
        checks = Checks(rungs[0].config.mounts())
        super().__init__(replace(rungs[0], blocks={self.name: {"run": run}}, checks=checks))
        self._rungs = [Evaluate(precision) for precision in rungs]

    @cached_property
    def settings(self) -> LadderSettings:
        rungs = tuple(_precision_of(evaluate) for evaluate in self._rungs)
        return LadderSettings(str(self.results_dir), self._rungs[0].block.model_name, rungs)

    def of_jobs(self, job: Job, rungs: Sequence[Sequence[Job]]) -> Job:
        """The job with the folders of the jobs that it compares."""
        precisions = tuple(
            replace(precision, jobs=tuple(str(job.folder.root) for job in jobs))
            for precision, jobs in zip(self.settings.rungs, rungs, strict=True)
        )
        return replace(job, settings=replace(self.settings, rungs=precisions))

    def paths(self) -> list[Path]:
        launches = [evaluate.launch for evaluate in self._rungs]
        stages = [kind(launch) for launch in launches for kind in (Export, Deploy, Evaluate)]
        weights = [precision.checkpoint_dir for precision in self.settings.rungs]
        return [*(stage.results_dir for stage in stages), *map(Path, filter(None, weights))]

    def check_stage(self) -> None:
        problems, stages = self.launch.checks.problems, self.launch.stages
        if not {"deploy", "evaluate"} <= {*stages}:
            problems.add(
                "a ladder serves and evaluates every rung",
                got=list(stages),
                change="'stages=[export,deploy,evaluate]'",
            )
        if not self._rungs[0].block.stop_server:
            problems.add(
                "the rungs of a ladder are served one after the other",
                got=False,
                change="evaluate.stop_server=True",
            )
        rungs = self.settings.rungs
        for key, folders in (
            ("evaluate.run.results_dir", [precision.report_dir for precision in rungs]),
            (
                "export.triton_deployment.triton_model_dir",
                [precision.checkpoint_dir for precision in rungs],
            ),
        ):
            if len(set(folders)) < len(folders):
                problems.add(
                    "two rungs of the ladder have the same folder",
                    got=folders,
                    change=f"{key} (with ${{export.run.config_summary}} in it)",
                )


def _precision_of(evaluate: Evaluate) -> LadderPrecision:
    (name,) = evaluate.block.ladder or ("",)
    model = evaluate.served_model
    folder = None if model is None else str(model.checkpoint_dir)
    return LadderPrecision(name, str(evaluate.results_dir), folder)


@dataclass(frozen=True)
class DeploymentPlan:
    """Checked stages, in order.

    runs:   of every rung of a ladder, then of the comparison; without a ladder there is one run
    absent: what a dry run found to be missing on this machine
    """

    runs: tuple[tuple[Stage, ...], ...]
    cluster: Cluster[Any]
    dry_run: bool
    absent: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of all runs."""
        return tuple(stage for run in self.runs for stage in run)

    def jobs(self, folder_of: Callable[[Stage], JobFolder]) -> Iterator[Job]:
        """The jobs in order, each made when it is asked for."""
        return (job for run in self.jobs_of_runs(folder_of) for job in run)

    def jobs_of_runs(self, folder_of: Callable[[Stage], JobFolder]) -> Iterator[Iterator[Job]]:
        """The jobs of every run. A run begins when the one before it has ended or was given up."""
        done: list[list[Job]] = []
        for stages in self.runs:
            jobs: list[Job] = []
            yield self._jobs_of_run(stages, folder_of, done, jobs)
            done.append(jobs)

    def _jobs_of_run(
        self,
        run: tuple[Stage, ...],
        folder_of: Callable[[Stage], JobFolder],
        done: Sequence[Sequence[Job]],
        jobs: list[Job],
    ) -> Iterator[Job]:
        """The jobs of one run after those of others, `done`; they are also put into `jobs`."""
        server: Job | None = None
        stages = list(run)
        while stages:
            stage = stages.pop(0)
            job = stage.job(folder_of(stage), server)
            if isinstance(stage, Ladder):
                job = stage.of_jobs(job, done)
            if stages and not jobs and (later := _later_packages(stage, stages)):
                job = replace(job, env={**job.env, LATER_STEPS: ",".join(later)})
            if done and not jobs:
                job = replace(job, after_any=True)
            if job.service is not None:
                client = next((stage for stage in stages if stage.joins(job)), None)
                if client is not None and self.cluster.hosts_clients:
                    stages.remove(client)
                    job = replace(job, client=client.job(folder_of(client), job))
                first = server or job
                job = replace(job, ends_with_client=any(stage.stops(first) for stage in stages))
                server = job if server is None else replace(server, gateway=job)
            jobs.append(job)
            yield job

    def preview(self) -> str:
        """Every file that the jobs would be started with; nothing is written or started."""
        parts = [
            _preview(job, self.cluster.render(job)) + self._surroundings(job)
            for job in self.jobs(_next_folder)
        ]
        if self.absent:
            notes = "\n".join(f"- {note}" for note in self.absent)
            parts.append(
                f"# Not found on this machine; without a dry run this is an error:\n{notes}\n"
            )
        return "\n".join(parts)

    def ask_scheduler(self) -> str:
        """Return the scheduler's answers to every job, if there is a scheduler; nothing is queued.

        Raises ClusterError with everything that it would refuse.
        """
        problems = Problems("the scheduler's answers")
        answers = []
        for job in self.jobs(_next_folder):
            with problems.collecting():
                reply = self.cluster.test(job)
                answers += [f"# The scheduler on {job.name}: {reply}"] if reply is not None else []
        problems.raise_if_any(ClusterError)
        return "\n".join(answers)

    def _submit_runs(self, interruption: SignalInterruption) -> None:
        previous: Submitted | None = None
        for number, jobs in enumerate(self.jobs_of_runs(_reserved_folder), 1):
            try:
                for job in jobs:
                    interruption.check()
                    previous = self.cluster.submit(job, previous)
            except LauncherError as error:
                if number == len(self.runs) or not self.cluster.goes_on(error):
                    raise
                print(f"error: {error}\nthe ladder goes on with its next rung", flush=True)

    def _surroundings(self, job: Job) -> str:
        """The container, the mounts and the variables of a job, and where they come from."""
        stage = next(stage for stage in self.stages if stage.name == job.stage)
        lines = [f"# ---- surroundings of {job.name}"]
        if job.container is not None:
            lines.append(f"container {job.container.image}")
            mounts = job.container.mounts
            lines += [f"mount {mount}  # {stage.mount_origin(mount)}" for mount in mounts]
        env = job.env.items()
        lines += [f"env {name}={value!r}  # {stage.env_origin(name)}" for name, value in env]
        return "\n" + "\n".join(lines) + "\n"

    def submit(self) -> None:
        """Hand over the jobs in order; what runs on this machine ends with this call.

        Either all of them are handed over or none: the scheduler is asked about every job before,
        and what it took nevertheless is taken back when it refuses a later one, or when a person
        interrupts. Where jobs run here, a run of which one fails is given up, and the next begins.
        """
        self.ask_scheduler()
        interruption = SignalInterruption()
        with interruption.listening():
            try:
                self._submit_runs(interruption)
                interruption.check()
                self.cluster.finish()
            except (ClusterError, KeyboardInterrupt, SystemExit):
                self.cluster.abort()
                raise
            finally:
                self.cluster.close()


def make_plan(*configurations: Mapping[str, Any], overrides: Sequence[str] = ()) -> DeploymentPlan:
    """The plan of a resolved configuration, or of the configurations of a ladder's rungs.

    overrides: the `key=value` of the command line
    Raises ConfigError with everything that cannot work, found by all stages together.
    """
    launches = [replace(_read(values), arguments=tuple(overrides)) for values in configurations]
    runs = [_checked_stages(launch) for launch in launches]
    checks, first = [launch.checks for launch in launches], launches[0]
    problems = Problems("the configuration")
    if (first.blocks["evaluate"] or {}).get("ladder"):
        with problems.collecting():
            ladder = Ladder(launches)
            _check(ladder)
            runs.append((ladder,))
            checks.append(ladder.launch.checks)
    first.cluster.check(checks[0].absent)
    absent = tuple(dict.fromkeys(text for check in checks for text in check.absent.messages))
    messages = (text for check in checks for text in check.problems.messages)
    problems.messages.extend(dict.fromkeys([*messages, *(() if first.config.dry_run else absent)]))
    problems.raise_if_any(ConfigError)
    return DeploymentPlan(tuple(runs), first.cluster, first.config.dry_run, absent)


def _read(values: Mapping[str, Any]) -> Launch:
    """The configuration as typed objects; the blocks of the stages are read by the stages."""
    blocks = {name: values.get(name) for name in STAGES}
    general = {name: value for name, value in values.items() if name not in {*STAGES, "cluster"}}
    problems = Problems("the configuration")
    config: LauncherConfig | None = None
    cluster: Cluster[Any] | None = None
    with problems.collecting():
        kind = lookup(CLUSTERS, str(values.get("cluster_type")), "cluster_type")
        cluster = kind.from_config(values.get("cluster") or {})
    with problems.collecting():
        config = build(LauncherConfig, general, "the configuration")
        order, mounts = _in_order(config.stages), config.mounts()
    if cluster is None or config is None or problems.messages:
        raise problems.error(ConfigError)
    return Launch(config, cluster, blocks, order, Checks(mounts))


def _in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    problems = Problems("the stages")
    if not names:
        problems.add("no stages", choices=STAGES, change="'stages=[...]'")
    for name in names:
        with problems.collecting():
            lookup(STAGES, name, "stages")
    problems.raise_if_any(ConfigError)
    return tuple(name for name in STAGES if name in names)


def _checked_stages(launch: Launch) -> tuple[Stage, ...]:
    """The stages of this run; what they find goes to launch.checks, as far as each of them got."""
    stages, remaining = [], {*launch.stages}
    for name, kind in STAGES.items():
        if name not in remaining:
            continue
        with launch.checks.problems.collecting():
            stage = kind(launch)
            remaining.update(stage.brings)
            _check(stage)
            stages.append(stage)
    return tuple(stages)


def _check(stage: Stage) -> None:
    """Add a stage's problem to its launch's checks, or raise it."""
    stage.check()
    stage.cluster.render(stage.job(_next_folder(stage)))


def _later_packages(first: Stage, stages: Sequence[Stage]) -> list[str]:
    """What later stages need of the image and the Python that they share with the first one, which
    looks for it, because nobody here can.
    """
    if not first.in_container:
        return []
    same = [
        x
        for x in stages
        if x.in_container and (x.python, x.overlay) == (first.python, first.overlay)
    ]
    return sorted({name for stage in same for name in stage.packages()} - {*first.packages()})


def _next_folder(stage: Stage) -> JobFolder:
    return JobFolder.next(stage.results_dir, stage.block.run.name)


def _reserved_folder(stage: Stage) -> JobFolder:
    return JobFolder.reserve(stage.results_dir, stage.block.run.name)


def _preview(job: Job, script: str) -> str:
    files = {**job.settings_files(), job.folder.script: script}
    head = f"# {job.stage}: {job.name}, job folder {job.folder.root}\n"
    return head + "".join(f"\n# ---- {path}\n{text}" for path, text in files.items())
