"""Evaluate: measure a served model's quality and speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from launcher_scripts.cluster.job import Job, JobFolder
from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.common.packages import TASK_PACKAGES
from launcher_scripts.config.evaluation import KEY as HARNESS
from launcher_scripts.config.evaluation import HarnessSettings, TaskSettings
from launcher_scripts.config.options import (
    absolute,
    build,
    is_same_path,
    paths_in,
    values_of,
    with_absolute_paths,
)
from launcher_scripts.config.policy import open_policy
from launcher_scripts.config.settings import EvaluateOptions, EvaluateSettings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.models.repository import RepositoryModel
from stages.deploy import Deploy, Gateway
from stages.stage import ClientRun, Stage

MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class EvaluateBlock(EvaluateOptions):
    """The `evaluate` block of the configuration."""

    run: ClientRun
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
        """Settings of the tasks that are not null; raises ConfigError with every problem."""
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
    caches: ClassVar[Mapping[str, str]] = {"MPLCONFIGDIR": "matplotlib_cache"}

    block: EvaluateBlock

    @cached_property
    def _deploy(self) -> Deploy:
        """The stage of the server, which may be of another command line."""
        return Deploy(self.launch)

    @cached_property
    def settings(self) -> EvaluateSettings:
        block = self.block
        settings = EvaluateSettings(
            ready_file=self._ready_file,
            results_dir=str(self.results_dir),
            model_name=block.model_name,
            tokenizer_dir=str(self.tokenizer_dir),
            tasks=block.task_settings(),
            **values_of(EvaluateOptions, block)
            | {"policy": open_policy(block.policy), "harness": self._harness()},
        )
        return with_absolute_paths(settings)

    def _harness(self) -> HarnessSettings | None:
        """With the gateway that lm_eval asks: that of the same command line; None: not asked."""
        harness = self.block.harness
        if harness is None or not harness.tasks:
            return None
        gateway = harness.gateway
        if harness.gateway_is_file:
            gateway = absolute(str(gateway))
        elif gateway is None and self._brings_gateway:
            gateway = str(Gateway(self.launch).settings.ready_file)
        return replace(harness, gateway=gateway)

    @property
    def _brings_gateway(self) -> bool:
        """Return whether a gateway's job is of the same command line."""
        stages = self.launch.stages
        brought = self._deploy.brings if "deploy" in stages else ()
        return "gateway" in (*stages, *brought)

    @property
    def _ready_file(self) -> str:
        """Return the ready file of a server of the same command line, which may be held back; or as
        configured."""
        ready, deploy = absolute(self.block.ready_file), self._deploy
        if not self._promotes or not is_same_path(ready, deploy.settings.ready_file):
            return ready
        return str(deploy.settings.candidate_file)

    @property
    def _promotes(self) -> bool:
        return "deploy" in self.launch.stages and self._deploy.block.promote is not None

    def job(self, folder: JobFolder, server: Job | None = None) -> Job:
        """With a server of the same command line, the job ends with it and may stop it."""
        server = server if self.uses(server) else None
        job = super().job(folder, server)
        promotes = server is not None and self._promotes
        return replace(job, stops_server=self.block.stop_server, promotes=promotes)

    def joins(self, server: Job) -> bool:
        return self.block.in_deploy_job and self.uses(server)

    def stops(self, server: Job) -> bool:
        return self.block.stop_server and self.uses(server)

    def uses(self, server: Job | None) -> bool:
        """Return whether it is this server's ready file that the evaluation waits for."""
        ready_file = server.service.first_file if server and server.service else None
        return ready_file is not None and is_same_path(ready_file, self.settings.ready_file)

    def job_settings(self, folder: JobFolder, server: Job | None) -> EvaluateSettings:  # noqa: ARG002
        settings = replace(self.settings, steps=self.step_names())
        if server is None:
            return settings
        is_pending = server.service is not None and server.service.candidate_file is not None
        return replace(
            settings,
            server_job_folder=str(server.folder.root),
            replicas=server.replicas,
            published_as=absolute(self.block.ready_file) if is_pending else None,
        )

    @cached_property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer files: as configured, or beside the model's weights."""
        if self.block.tokenizer_dir is not None:
            return Path(absolute(self.block.tokenizer_dir))
        deploy, model = self._deploy, self.served_model
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
    def served_model(self) -> RepositoryModel | None:
        """The model that is asked, where the repository is known here."""
        models = self._deploy.models
        return next((model for model in models if model.name == self.block.model_name), None)

    def step_names(self) -> tuple[str, ...]:
        steps = {
            "measure_accuracy": bool(self.settings.tasks),
            "measure_speed": self.settings.benchmark is not None,
            "measure_twin": self.settings.twin is not None,
            "run_harness": self.settings.harness is not None,
            "measure_load": self.settings.load is not None,
            "judge": self.settings.policy is not None,
        }
        return tuple(module for module in self.modules if steps[module])

    def packages(self) -> tuple[str, ...]:
        """Return those of tasks and exports, too."""
        tasks = (TASK_PACKAGES.get(task.name, ()) for task in self.settings.tasks)
        return (
            *super().packages(),
            *(name for names in tasks for name in names),
            *self.block.export,
        )

    def paths(self) -> list[Path]:
        harness = self.settings.harness
        paths = [Path(str(harness.gateway))] if harness and harness.gateway_is_file else []
        return [*super().paths(), *paths]

    def check_stage(self) -> None:
        checks, settings = self.launch.checks, self.settings
        self._check_tls()
        self._check_promotion()
        self._check_tasks()
        self._check_numbers()
        if settings.harness is not None:
            self._check_harness(settings.harness)
        if "deploy" not in self.launch.stages:
            message = "the ready file of a running server ('stages=[deploy,evaluate]' starts one)"
            checks.exists(message, settings.ready_file, "evaluate.ready_file", self._ready_files())
        if self.block.in_deploy_job:
            self._check_deploy_job()
        if "export" not in self.launch.stages:
            message = "the folder of tokenizer files"
            checks.exists(message, settings.tokenizer_dir, "evaluate.tokenizer_dir")
        for task in settings.tasks:
            checks.paths(f"{{}} of the task {task.name}", task, f"evaluate.tasks.{task.name}")
        checks.paths("the load test's {}", settings.load, "evaluate.load")
        checks.paths("the earlier report", settings.policy, "evaluate.policy")
        checks.paths("the twin's {}", settings.twin, "evaluate.twin")

    def _ready_files(self) -> str:
        """The ready files below base_results_dir, for the error of one that is not there."""
        folder = self.launch.checks.on_host(absolute(self.launch.config.base_results_dir))
        files = sorted(map(str, folder.glob("*/deploy*/ready*.json")))[:MAX_LISTED]
        return f"; there are {', '.join(files)}" if files else ""

    def _check_promotion(self) -> None:
        """A server that is held back waits for the verdict of a job of its own."""
        problems, block = self.launch.checks.problems, self.block
        if not self._promotes:
            return
        if "judge" not in self.step_names():
            problems.add("deploy.promote waits for a verdict", change="evaluate.policy")
        if not is_same_path(absolute(block.ready_file), self._deploy.settings.ready_file):
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
        task_names = {task.name for task in self.settings.tasks}
        others = task_names - {"encode"} or self.settings.harness is not None
        if contract.encoder_only and others:
            self.launch.checks.problems.add(
                f"{model.name} generates no tokens: it is an encoder, whose states encode measures",
                got=model.model_type,
                change="evaluate=t5/evaluate_t5_encoder",
            )
        elif "encode" in task_names and not contract.encoder_only:
            self.launch.checks.problems.add(
                "encode measures hidden states, which an encoder alone gives",
                got=model.model_type,
                change="evaluate, or export.run.model_type=t5-encoder",
            )
        elif not contract.scores_prompts and "lambada" in task_names:
            self.launch.checks.problems.add(
                "lambada scores prompts, which a decoder-only model alone can",
                got=model.model_type,
                choices=("evaluate=t5/translation", "evaluate=t5/summarization", "..."),
                change="evaluate, or evaluate.tasks.lambada=null",
            )

    def _check_numbers(self) -> None:
        """The replicas that an evaluation asks are those from 0 on."""
        first = self._deploy.block.first_replica
        if "deploy" in self.launch.stages and first is not None:
            self.launch.checks.problems.add(
                "replicas that join a deployment are not evaluated alone",
                got=list(self.launch.stages),
                change="stages, or deploy.first_replica",
            )

    def _check_tls(self) -> None:
        """A client speaks as the server of the same command line does."""
        checks, tls = self.launch.checks, self.settings.grpc_tls
        for file in paths_in(tls):
            checks.exists(f"the client's {file.name}", file.path, f"evaluate.grpc_tls.{file.name}")
        served = "deploy" in self.launch.stages
        server = self._deploy.settings.security if served else None
        if server is None or server.grpc_tls is None:
            return
        if self.settings.protocol == "http" and not server.http_host and not self._next_to_server:
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

    def _check_harness(self, settings: HarnessSettings) -> None:
        """Its files are there, and so will be a gateway that it can ask."""
        checks, launch = self.launch.checks, self.launch
        checks.exists("the folder of lm_eval's data sets", str(settings.data), f"{HARNESS}.data")
        if settings.api_keys is not None:
            checks.private("the file of API keys", settings.api_keys, f"{HARNESS}.api_keys")
        served = "deploy" in launch.stages
        if settings.gateway is None and served and self._deploy.settings.gateway is None:
            checks.problems.add(
                "lm_eval asks a gateway, and this command line starts none",
                got=list(settings.tasks),
                change=f"deploy.gateway.port=0 (a free one), or {HARNESS}.gateway=http://host:port/v1",
            )

    @property
    def _asks_over_grpc(self) -> bool:
        """Return whether a step does; those of a model that streams do that with every protocol."""
        settings, model = self.settings, self.served_model
        streams = model is not None and model.decoupled
        generates = bool(settings.tasks or settings.benchmark or settings.twin)
        return settings.protocol == "grpc" or (streams and generates)

    @property
    def _next_to_server(self) -> bool:
        return self.block.in_deploy_job and self.cluster.hosts_clients

    def _check_deploy_job(self) -> None:
        if self.cluster is not self.launch.cluster:
            self.launch.checks.problems.add(
                "a client in its server's job has that job's options of the cluster",
                change="evaluate.in_deploy_job=False, or deploy.cluster.* for both",
            )
        if self._deploy.replicas:
            self.launch.checks.problems.add(
                "a client beside its server would measure one replica alone",
                got=self._deploy.replicas,
                change="evaluate.in_deploy_job, or deploy.replicas",
            )
        deploys = "deploy" in self.launch.stages
        if not deploys or not is_same_path(
            self._deploy.settings.ready_file, self.settings.ready_file
        ):
            self.launch.checks.problems.add(
                "no deploy job of this command line to run in",
                got=list(self.launch.stages),
                change="evaluate.in_deploy_job, 'stages=[deploy,evaluate]' or evaluate.ready_file",
            )


def _task(name: str, block: Any) -> TaskSettings:
    """The settings of a task from its block."""
    values = {**block, "name": name} if isinstance(block, Mapping) else block
    return build(TaskSettings, values, "the evaluation tasks", key=f"evaluate.tasks.{name}")
