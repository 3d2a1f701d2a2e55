"""Evaluate: measure a served model's quality and speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher_scripts.cluster.job import Job, JobFolder, Resources
from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.load import LoadSettings
from launcher_scripts.config.options import values_of
from launcher_scripts.config.policy import BaselineBounds, PolicySettings, opened
from launcher_scripts.config.schema import build
from launcher_scripts.config.security import ClientTls
from launcher_scripts.config.settings import EvaluateOptions, EvaluateSettings
from launcher_scripts.config.tasks import TaskSettings
from launcher_scripts.config.twin import TwinSettings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.models.repository import ServedModel
from stages.deploy import Deploy
from stages.harness import check_harness, harness_paths, harness_settings
from stages.paths import absolute
from stages.stage import Launch, Stage


@dataclass(frozen=True)
class EvaluateRun:
    name: str
    time_limit: str
    results_dir: str
    gpus_per_node: int | None


@dataclass(frozen=True, kw_only=True)
class EvaluateBlock(EvaluateOptions):
    """The `evaluate` block of the configuration."""

    run: EvaluateRun
    in_deploy_job: bool
    stop_server: bool
    ladder: tuple[str, ...] | None
    ready_file: str
    model_name: str
    tokenizer_dir: str | None
    tasks: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.task_settings()

    def task_settings(self) -> tuple[TaskSettings, ...]:
        """Those of the tasks that are not null; raises ConfigError with every problem."""
        problems = Problems("the evaluation tasks")
        tasks = []
        for name, task in self.tasks.items():
            if task is None:
                continue
            with problems.collecting():
                tasks.append(_task(name, task))
        problems.raise_if_any(ConfigError)
        return tuple(tasks)


class Evaluate(Stage):
    name = "evaluate"
    block_type = EvaluateBlock
    modules = (
        "measure_accuracy",
        "measure_speed",
        "measure_twin",
        "run_harness",
        "measure_load",
        "judge",
    )

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.block: EvaluateBlock

    @cached_property
    def settings(self) -> EvaluateSettings:
        block = self.block
        return EvaluateSettings(
            ready_file=self._ready_file,
            results_dir=str(self.results_dir),
            model_name=block.model_name,
            tokenizer_dir=str(self.tokenizer_dir),
            tasks=block.task_settings(),
            **values_of(EvaluateOptions, block)
            | {
                "grpc_tls": self._tls(),
                "policy": self.policy,
                "harness": harness_settings(block.harness, self.launch),
                "load": self._load(),
                "twin": self._twin(),
            },
        )

    def _twin(self) -> TwinSettings | None:
        twin = self.block.twin
        if twin is None:
            return None
        paths = (twin.checkpoint and absolute(twin.checkpoint), twin.data_file)
        return replace(twin, checkpoint=paths[0], data_file=paths[1] and absolute(paths[1]))

    def _twin_files(self) -> dict[str, str]:
        twin = self._twin()
        files = {"checkpoint": twin.checkpoint, "data_file": twin.data_file} if twin else {}
        return {name: file for name, file in files.items() if file}

    def _load(self) -> LoadSettings | None:
        """The load test with absolute paths."""
        load = self.block.load
        if load is None:
            return None
        return load.with_files(
            {key: None if file is None else absolute(file) for key, file in load.files.items()}
        )

    @cached_property
    def policy(self) -> PolicySettings | None:
        """The policy with absolute paths."""
        policy = opened(self.block.policy)
        if policy is None:
            return None
        whole = replace(policy, baseline=_absolute(policy.baseline))
        inner = whole.if_measured
        if inner is None:
            return whole
        return replace(whole, if_measured=replace(inner, baseline=_absolute(inner.baseline)))

    def _baselines(self) -> Iterator[tuple[str, str]]:
        """(the path of a report, its key) of those that the policy compares with."""
        policy = self.policy
        for key, bounds in (("", policy), (".if_measured", policy and policy.if_measured)):
            if bounds is not None and bounds.baseline is not None:
                yield bounds.baseline.report, f"evaluate.policy{key}.baseline.report"

    @property
    def _ready_file(self) -> str:
        """That of a server of the same command line, which may be held back; or as configured."""
        given, deploy = absolute(self.block.ready_file), Deploy(self.launch)
        if not self._promotes or given != str(deploy.settings.ready_file):
            return given
        return str(deploy.settings.candidate_file)

    @property
    def _promotes(self) -> bool:
        return "deploy" in self.launch.stages and Deploy(self.launch).block.promote is not None

    def _tls(self) -> ClientTls | None:
        tls = self.block.grpc_tls
        if tls is None:
            return None
        own = (tls.certificate and absolute(tls.certificate), tls.key and absolute(tls.key))
        return ClientTls(absolute(tls.ca), *own)

    def _tls_files(self) -> dict[str, str]:
        tls = self._tls()
        files = (
            {} if tls is None else {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
        )
        return {name: file for name, file in files.items() if file}

    def job(self, folder: JobFolder, server: Job | None = None) -> Job:
        """With a server of the same command line, the job ends with it and may stop it."""
        server = server if self.uses(server) else None
        job = super().job(folder, server)
        promotes = server is not None and self._promotes
        return replace(job, stops_server=self.block.stop_server, promotes=promotes)

    def joins(self, server: Job) -> bool:
        return self.block.in_deploy_job and self.uses(server)

    def uses(self, server: Job | None) -> bool:
        """Whether it is this server's ready file that the evaluation waits for."""
        ready_file = server.service.first_file if server and server.service else None
        return ready_file == Path(self.settings.ready_file)

    def job_settings(self, folder: JobFolder, server: Job | None) -> EvaluateSettings:  # noqa: ARG002
        settings = replace(self.settings, steps=self.step_names())
        if server is None:
            return settings
        held_back = server.service is not None and server.service.candidate_file is not None
        return replace(
            settings,
            server_job_folder=str(server.folder.root),
            replicas=server.replicas,
            published_as=absolute(self.block.ready_file) if held_back else None,
        )

    @cached_property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer files: as configured, or beside the model's weights."""
        if self.block.tokenizer_dir is not None:
            return Path(absolute(self.block.tokenizer_dir))
        deploy, model = Deploy(self.launch), self.served_model
        if model is not None:
            return model.checkpoint_dir
        if deploy.remote:
            raise ConfigError(
                problem(
                    "the tokenizer of a model in a cloud storage must be named",
                    got=self.block.tokenizer_dir,
                    change="evaluate.tokenizer_dir",
                )
            )
        if not deploy.models:
            return deploy.repository / self.block.model_name / "1"
        raise ConfigError(
            problem(
                "the repository has no such model",
                got=self.block.model_name,
                choices=[model.name for model in deploy.models],
                change="evaluate.model_name",
            )
        )

    @cached_property
    def served_model(self) -> ServedModel | None:
        """The model that is asked, where the repository is known here."""
        models = Deploy(self.launch).models
        return next((model for model in models if model.name == self.block.model_name), None)

    def resources(self) -> Resources:
        """A client needs no GPU: it must not wait for those that its server holds."""
        run = self.block.run
        return Resources(time_limit=run.time_limit, gpus_per_node=run.gpus_per_node)

    def step_names(self) -> tuple[str, ...]:
        wanted = {
            "measure_accuracy": bool(self.settings.tasks),
            "measure_speed": self.settings.benchmark is not None,
            "measure_twin": self.settings.twin is not None,
            "run_harness": self.settings.harness is not None,
            "measure_load": self.settings.load is not None,
            "judge": self.settings.policy is not None,
        }
        return tuple(module for module in self.modules if wanted[module])

    def env(self) -> dict[str, str]:
        return {"MPLCONFIGDIR": str(self.cache("matplotlib"))} if self.in_container else {}

    def paths(self) -> list[Path]:
        settings = self.settings
        data = (Path(path) for _, path, _ in self._task_files())
        cache = [self.cache("matplotlib")] if self.in_container else []
        tls = map(Path, (*self._tls_files().values(), *self._twin_files().values()))
        baselines = (Path(path) for path, _ in self._baselines())
        harness = [] if settings.harness is None else harness_paths(settings.harness)
        own = [Path(settings.ready_file), Path(settings.tokenizer_dir)]
        return [*own, *data, *baselines, *harness, *tls, *cache]

    def _task_files(self) -> Iterator[tuple[str, str, str]]:
        """(what it is, its path, its key) of every file that the tasks read."""
        for task in self.settings.tasks:
            key = f"evaluate.tasks.{task.name}"
            yield f"the data of {task.name}", task.data_file, f"{key}.data_file"
            if task.generation.target_file is not None:
                what, name = f"the targets of {task.name}", "generation.target_file"
                yield what, task.generation.target_file, f"{key}.{name}"
            if task.reference is not None:
                yield f"the reference of {task.name}", task.reference, f"{key}.reference"
        for name, file in self.settings.load.files.items() if self.settings.load else ():
            if file is not None:
                yield f"the load test's {name}", file, f"evaluate.load.{name}"

    def check_own(self) -> None:
        checks, settings = self.launch.checks, self.settings
        gpus = self.block.run.gpus_per_node
        if gpus is not None and gpus < 0:
            key = "evaluate.run.gpus_per_node"
            checks.problems.add("gpus_per_node must be at least 0", got=gpus, change=key)
        self._check_tls()
        self._check_promotion()
        self._check_tasks()
        self._check_numbers()
        if settings.harness is not None:
            check_harness(settings.harness, self.launch)
        if "deploy" not in self.launch.stages:
            what = "the ready file of a running server (stages=[deploy,evaluate] starts one)"
            checks.exists(what, settings.ready_file, "evaluate.ready_file")
        if self.block.in_deploy_job:
            self._check_deploy_job()
        if "export" not in self.launch.stages:
            what = "the folder of tokenizer files"
            checks.exists(what, settings.tokenizer_dir, "evaluate.tokenizer_dir")
        for what, path, key in self._task_files():
            checks.exists(what, path, key)
        for path, key in self._baselines():
            checks.exists("the earlier report", path, key)
        for name, path in self._twin_files().items():
            checks.exists(f"the twin's {name}", path, f"evaluate.twin.{name}")

    def _check_promotion(self) -> None:
        """A server that is held back waits for the verdict of a job of its own."""
        problems, block = self.launch.checks.problems, self.block
        if not self._promotes:
            return
        if "judge" not in self.step_names():
            problems.add("deploy.promote waits for a verdict", change="evaluate.policy")
        if absolute(block.ready_file) != str(Deploy(self.launch).settings.ready_file):
            problems.add(
                "deploy.promote waits for the verdict on another server",
                got=block.ready_file,
                change="evaluate.ready_file or deploy.promote=null",
            )
        if block.in_deploy_job:
            problems.add(
                "the server that is promoted outlives its evaluation",
                got=True,
                change="evaluate.in_deploy_job=False or deploy.promote=null",
            )
        if block.ladder:
            problems.add(
                "the servers of a ladder are stopped",
                got=list(block.ladder),
                change="deploy.promote=null or evaluate.ladder=null",
            )

    def _check_tasks(self) -> None:
        """The model must be of a kind that can answer what it is asked."""
        model = self.served_model
        contract = CONTRACTS.get(model.model_type) if model is not None else None
        if model is None or contract is None:
            return
        others = set(self._asked_for) - {"encode"} or self.settings.harness is not None
        if contract.encoder_only and others:
            self.launch.checks.problems.add(
                f"{model.name} generates no tokens: it is an encoder, whose states encode measures",
                got=model.model_type,
                change="evaluate=t5/evaluate_t5_encoder",
            )
        elif "encode" in self._asked_for and not contract.encoder_only:
            self.launch.checks.problems.add(
                "encode measures hidden states, which an encoder alone gives",
                got=model.model_type,
                change="evaluate, or export.run.model_type=t5-encoder",
            )
        elif not contract.scores_prompts and "lambada" in self._asked_for:
            self.launch.checks.problems.add(
                "lambada scores prompts, which a decoder-only model alone can",
                got=model.model_type,
                choices=("evaluate=t5/translation", "evaluate=t5/summarization", "..."),
                change="evaluate, or evaluate.tasks.lambada=null",
            )

    def _check_numbers(self) -> None:
        """The replicas that an evaluation asks are those from 0 on."""
        first = Deploy(self.launch).block.first_replica
        if "deploy" in self.launch.stages and first is not None:
            self.launch.checks.problems.add(
                "replicas that join a deployment are not evaluated alone",
                got=list(self.launch.stages),
                change="stages, or deploy.first_replica",
            )

    @property
    def _asked_for(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.settings.tasks)

    def _check_tls(self) -> None:
        """A client speaks as the server of the same command line does."""
        checks, tls = self.launch.checks, self._tls()
        for name, file in self._tls_files().items():
            checks.exists(f"the client's {name}", file, f"evaluate.grpc_tls.{name}")
        server = Deploy(self.launch).security if "deploy" in self.launch.stages else None
        if server is None or server.grpc_tls is None:
            return
        if self.settings.protocol == "http" and not server.http_host and not self._beside_server:
            checks.problems.add(
                "Triton's HTTP has no TLS, so this server speaks it with its own node alone",
                got="http",
                choices=("grpc",),
                change="evaluate.protocol, or deploy.server.security.http_host",
            )
        elif self._asks_over_grpc and tls is None:
            checks.problems.add(
                "the server's gRPC speaks TLS",
                change="evaluate.grpc_tls={ca: FILE}, whose certificates the client trusts",
            )

    @property
    def _asks_over_grpc(self) -> bool:
        """Whether a step does; those of a model that streams do that with every protocol."""
        settings, model = self.settings, self.served_model
        streams = model is not None and model.decoupled
        generates = bool(settings.tasks or settings.benchmark or settings.twin)
        return settings.protocol == "grpc" or (streams and generates)

    @property
    def _beside_server(self) -> bool:
        return self.block.in_deploy_job and self.launch.cluster.hosts_clients

    def _check_deploy_job(self) -> None:
        if Deploy(self.launch).replicas:
            self.launch.checks.problems.add(
                "a client beside its server would measure one replica alone",
                got=Deploy(self.launch).replicas,
                change="evaluate.in_deploy_job, or deploy.replicas",
            )
        deploys = "deploy" in self.launch.stages
        if not deploys or str(Deploy(self.launch).settings.ready_file) != self.settings.ready_file:
            self.launch.checks.problems.add(
                "no deploy job of this command line to run in",
                got=list(self.launch.stages),
                change="evaluate.in_deploy_job, stages=[deploy,evaluate] or evaluate.ready_file",
            )


def _absolute(baseline: BaselineBounds | None) -> BaselineBounds | None:
    return baseline and replace(baseline, report=absolute(baseline.report))


def _task(name: str, block: Any) -> TaskSettings:
    """The settings of a task from its block, with absolute paths."""
    key = f"evaluate.tasks.{name}"
    values = {**block, "name": name} if isinstance(block, Mapping) else block
    task = build(TaskSettings, values, "the evaluation tasks", key=key)
    target, reference = task.generation.target_file, task.reference
    return replace(
        task,
        data_file=absolute(task.data_file),
        reference=reference and absolute(reference),
        generation=replace(task.generation, target_file=target and absolute(target)),
    )
