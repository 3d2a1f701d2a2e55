"""Deploy: a server for a model repository, until it is stopped.

Gateway: OpenAI's interface before servers that run already, until it is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from hydra.core.config_store import ConfigStore

from launcher_scripts.cluster.job import Resources, Service
from launcher_scripts.common.errors import CheckpointError, ConfigError
from launcher_scripts.common.packages import CLOSED_PACKAGES
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.gateway import DeployedGateway, GatewayJobSettings
from launcher_scripts.config.options import absolute, is_same_path, values_of, with_absolute_paths
from launcher_scripts.config.security import LOOPBACK, VERIFY_SIGNATURE, TrustedSigner
from launcher_scripts.config.settings import AUTO, DeploySettings, ServerOptions
from launcher_scripts.models.repository import (
    BACKEND_MODEL_TYPES,
    RepositoryModel,
    is_remote,
    served_models,
    serving_options,
)
from stages.checks import SECURITY_KEY, check_gateway
from stages.export import Export
from stages.stage import ClientRun, ServiceStage, StageRun

SERVING_KEY = "export.triton_deployment"
# Options for which the export chooses a value.
_SET_BY_EXPORT = ("data_type", "decoupled", "enable_prefix_caching")
RESTARTS = 3  # of a server that serves others


@dataclass(frozen=True)
class DeployRun(StageRun):
    nodes: int | None


@dataclass(frozen=True)
class DeployBlock:
    """The `deploy` block of the configuration."""

    run: DeployRun
    model_repository: str
    replicas: int
    first_replica: int | None
    restarts: int | None
    idle_timeout: float | None
    promote: str | None
    verify_signature: TrustedSigner | None
    gateway: DeployedGateway
    server: ServerOptions


class Deploy(ServiceStage):
    name = "deploy"
    block_type = DeployBlock
    modules = ("start_server",)
    mpi = True
    caches: ClassVar[Mapping[str, str]] = {"TRITON_CACHE_DIR": "triton_cache"}

    block: DeployBlock

    @cached_property
    def settings(self) -> DeploySettings:
        server = values_of(ServerOptions, self.block.server)
        if server["host"] is None and not self.cluster.serves_others:
            server["host"] = LOOPBACK
        if self.block.promote is not None:
            server |= dict.fromkeys(self.block.server.ports, 0)
        settings = DeploySettings(
            model_repository=self.block.model_repository if self.remote else str(self.repository),
            results_dir=str(self.results_dir),
            replica=None if self.replicas else self.block.first_replica,
            restarts=self.restarts,
            idle_timeout=self.block.idle_timeout,
            gateway=self._gateway(),
            promote=self.block.promote,
            closed=self.block.gateway.api_keys is not None,
            verify_signature=self.block.verify_signature,
            **server,
        )
        return with_absolute_paths(settings)

    @property
    def restarts(self) -> int:
        if self.block.restarts is not None:
            return self.block.restarts
        return RESTARTS if self.cluster.serves_others else 0

    @property
    def brings(self) -> tuple[str, ...]:
        """Replicas share a gateway; those that join them later find it there."""
        has_gateway = self.block.gateway.port is not None and self.block.first_replica is None
        return ("gateway",) if has_gateway and self.replicas else ()

    def _gateway(self) -> DeployedGateway | None:
        """The gateway beside the server; None: there is none, or one in a job of its own."""
        block, is_single = (
            self.block.gateway,
            not self.replicas and self.block.first_replica is None,
        )
        if block.port is None or not is_single or "gateway" in self.launch.stages:
            return None
        return block if self.block.promote is None else replace(block, port=0)

    @property
    def remote(self) -> bool:
        """Return whether the repository is in a cloud storage, where nobody looks before it is
        served."""
        return is_remote(self.block.model_repository)

    @property
    def repository(self) -> Path:
        """The folder of the models, where it is one."""
        return Path(absolute(self.block.model_repository))

    @cached_property
    def models(self) -> list[RepositoryModel]:
        """The models that will be served; empty where that cannot be known here.

        A repository that the export of the same run is about to write does not exist yet, so its
        model is the one that the export stage announces.
        """
        if self.remote:
            return []
        if "export" in self.launch.stages:
            export = Export(self.launch)
            if is_same_path(export.settings.model_repository, self.repository):
                export_settings = export.settings
                served_as = BACKEND_MODEL_TYPES.get(
                    export_settings.model_type, export_settings.model_type
                )
                return [
                    RepositoryModel(
                        export_settings.model_name,
                        served_as,
                        export_settings.parallelism,
                        export_settings.checkpoint_dir,
                        export_settings.decoupled,
                    )
                ]
        try:
            return served_models(self.launch.checks.on_host(self.repository))
        except (CheckpointError, ConfigError) as error:
            self.launch.checks.problems.add(str(error), change="deploy.model_repository")
            return []

    @cached_property
    def parallelism(self) -> Parallelism:
        """The sizes of the model with the most ranks; models share the GPUs."""
        sizes = [model.parallelism for model in self.models]
        return max(sizes, key=lambda size: size.world_size, default=Parallelism())

    @property
    def replicas(self) -> int:
        """Number of tasks of the array of jobs; 0: no array."""
        return self.block.replicas if self.block.replicas > 1 else 0

    @property
    def first_replica(self) -> int:
        return self.block.first_replica or 0

    def resources(self) -> Resources:
        """One server per node, on as many nodes as hold every rank."""
        gpus = self.cluster.gpus_per_node
        nodes = self.block.run.nodes or (1 if gpus is None else self.parallelism.nodes(gpus))
        # One for each rank on the node, and one for Triton and the gateway.
        cpus = None if self.remote else max(1, self.parallelism.world_size // max(1, nodes)) + 1
        return Resources(nodes=nodes, time_limit=self.block.run.time_limit, cpus_per_task=cpus)

    def service(self) -> Service:
        return replace(super().service(), candidate_file=self.settings.candidate_file)

    def env(self) -> dict[str, str]:
        """Hide the GPUs of a node that no rank needs: a server takes all that it sees."""
        needed, env = self.step_gpus(), {}
        if needed is not None and not self.cluster.limits_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(needed)))
        return {**env, **super().env()}

    def step_gpus(self) -> int | None:
        """One GPU of a node for every rank on it, where that is less than the node has."""
        gpus = self.cluster.gpus_per_node
        ranks = self.parallelism.world_size // self.resources().nodes
        if gpus is None or self.remote or ranks >= gpus or self.settings.device == "cpu":
            return None
        return ranks

    def packages(self) -> tuple[str, ...]:
        """Return those of the gateway beside the server, too."""
        gateway = ("start_gateway",) if self.settings.gateway is not None else ()
        closed = CLOSED_PACKAGES if self.settings.is_closed else ()
        return (*super().packages(), *gateway, *closed)

    def paths(self) -> list[Path]:
        paths = [] if self.remote else [self.repository]
        return [*paths, *super().paths()]

    def check_stage(self) -> None:
        checks, cluster, settings = self.launch.checks, self.cluster, self.settings
        nodes = self.block.run.nodes
        if nodes is not None and nodes < 1:
            checks.problems.add("nodes must be at least 1", got=nodes, change="deploy.run.nodes")
            return
        self._check_replicas()
        self._check_promotion()
        self._check_ports()
        checks.paths("{} of the server", settings.security, SECURITY_KEY)
        checks.paths("{} of the signer", settings.verify_signature, VERIFY_SIGNATURE)
        if settings.gateway is not None:
            check_gateway(checks, settings.gateway, settings.security, DeployedGateway.key)
        if self.remote:
            self._check_remote()
        elif not self.models:
            self._check_repository()
        elif "export" not in self.launch.stages:
            self._check_serving_options()
        checks.ranks(
            self.parallelism.world_size,
            self.resources().nodes,
            cluster.gpus_per_node,
            cluster.max_nodes,
        )
        if settings.tritonserver is not None and not self.in_container:
            checks.exists("the server", settings.tritonserver, "deploy.server.tritonserver")
        if settings.numpy_dir is not None and not self.in_container:
            checks.exists("the folder with numpy", settings.numpy_dir, "deploy.server.numpy_dir")

    def _check_serving_options(self) -> None:
        """Serving options of the command line that differ from those of the exported model."""
        checks, export = self.launch.checks, self.launch.blocks["export"]
        names = {model.name for model in self.models}
        if len(names) > 1:
            names &= {export["run"]["model_train_name"]}
        for model in names:
            config = self.repository / model / "config.pbtxt"
            served = serving_options(checks.on_host(config))
            for key, text in self.launch.overrides.items():
                name = key.removeprefix(f"{SERVING_KEY}.")
                value = export["triton_deployment"].get(name)
                if name == "draft_model_dir" and value is not None:
                    value = absolute(value)
                is_default = name in _SET_BY_EXPORT and text in (AUTO, "null")
                if name == key or name not in served or is_default or served[name] == value:
                    continue
                checks.problems.add(
                    f"{key} has no effect without the stage export: {config} has {served[name]}",
                    got=value,
                    change="'stages=[export,deploy]', which writes config.pbtxt again and keeps "
                    f"the weights; or leave {key} out",
                )

    def _check_replicas(self) -> None:
        checks, limit, key = self.launch.checks, self.cluster.max_replicas, "deploy.replicas"
        count, first, server = self.block.replicas, self.block.first_replica, self.block.server
        if first is not None and first < 0:
            change = "deploy.first_replica"
            checks.problems.add("replicas are numbered from 0", got=first, change=change)
        if count < 1:
            checks.problems.add("replicas must be at least 1", got=count, change=key)
        elif limit is not None and count > limit:
            checks.problems.add(
                "replicas are an array of Slurm jobs, which this cluster type does not have",
                got=count,
                change=f"{key} or cluster_type",
            )
            return
        ports = tuple(server.ports.values())
        if count > 1 and any(ports) and not self.cluster.whole_nodes:
            checks.problems.add(
                "replicas that share a node need ports of their own",
                got=ports,
                change="deploy.server.*_port (0: a free one), or cluster.exclusive",
            )

    def _check_ports(self) -> None:
        """Check that the ports are free before anything is exported, if the server runs on this
        machine."""
        settings, checks = self.settings, self.launch.checks
        if self.launch.cluster.serves_others:
            return
        for kind, host in settings.hosts.items():
            name = f"{kind}_port"
            checks.port(host, settings.ports[name], f"deploy.server.{name}")
        if settings.gateway is not None and settings.gateway.port is not None:
            host = settings.gateway.host or settings.hosts["grpc"]
            checks.port(host, settings.gateway.port, f"{DeployedGateway.key}.port")

    def _check_promotion(self) -> None:
        """A server that is held back needs somebody to judge it, and nobody who announces it."""
        problems, stages = self.launch.checks.problems, self.launch.stages
        if self.block.promote is None:
            return
        if "evaluate" not in stages:
            problems.add(
                "nobody judges the server that deploy.promote holds back",
                got=list(stages),
                change="'stages=[deploy,evaluate]', or deploy.promote=null",
            )
        if "gateway" in {*stages, *self.brings}:
            problems.add(
                "a gateway's job of the same command line waits for a server that is held back",
                got=list(stages),
                change="'stages=[gateway]' on a command line of its own, which follows the "
                "published servers; deploy.gateway.port=null",
            )

    def _check_remote(self) -> None:
        checks, credentials = self.launch.checks, self.settings.cloud_credentials
        if self.resources().nodes > 1:
            checks.problems.add(
                "a model repository in a cloud storage is served on one node: each would fetch "
                "a copy of its own",
                got=self.resources().nodes,
                change="deploy.run.nodes or deploy.model_repository",
            )
        if credentials is not None:
            key = "deploy.server.cloud_credentials"
            checks.private("the file of keys", credentials, key)

    def _check_repository(self) -> None:
        checks, key = self.launch.checks, "deploy.model_repository"
        message = "the model repository ('stages=[export,deploy]' writes it first)"
        if checks.exists(message, self.repository, key) and not checks.problems.messages:
            checks.problems.add(
                "no model of the repository names the fastertransformer backend",
                got=str(self.repository),
                change=key,
            )


@dataclass(frozen=True, kw_only=True)
class GatewayBlock(DeployedGateway):
    """The `gateway` block of the configuration."""

    key: ClassVar[str] = "gateway"

    run: ClientRun
    ready: tuple[str, ...]
    ready_timeout: float
    stop_timeout: float
    public_host: str | None
    tokenizer_dir: str | None


def register_deployed_gateway() -> None:
    """Register the options that conf/gateway/gateway.yaml takes over: every option of the
    deployment's gateway."""
    names = [item.name for item in fields(DeployedGateway)]
    options = {name: f"${{{DeployedGateway.key}.{name}}}" for name in names}
    ConfigStore.instance().store("deployed_gateway", options)


class Gateway(ServiceStage):
    name = "gateway"
    block_type = GatewayBlock
    modules = ("run_gateway",)

    block: GatewayBlock

    @cached_property
    def _deploy(self) -> Deploy:
        """The stage of the servers, which may be of another command line."""
        return Deploy(self.launch)

    @cached_property
    def settings(self) -> GatewayJobSettings:
        block = self.block
        settings = GatewayJobSettings(
            ready=block.ready,
            results_dir=str(self.results_dir),
            gateway=DeployedGateway(**values_of(DeployedGateway, block)),
            host=block.host or self._deploy.settings.host,
            public_host=block.public_host,
            tokenizer_dir=block.tokenizer_dir,
            ready_timeout=block.ready_timeout,
            stop_timeout=block.stop_timeout,
            restarts=self._deploy.restarts,
            idle_timeout=self._deploy.settings.idle_timeout,
        )
        return with_absolute_paths(settings)

    def paths(self) -> list[Path]:
        """With the model repository, where the gateway finds the tokenizer."""
        deploy = self._deploy
        return [*super().paths(), *([] if deploy.remote else [deploy.repository])]

    def check_stage(self) -> None:
        checks, settings, deploy = self.launch.checks, self.settings, self._deploy
        check_gateway(checks, settings.gateway, deploy.settings.security, self.name)
        if not self.launch.cluster.serves_others:
            port = settings.gateway.port or 0
            checks.port(settings.host or LOOPBACK, port, f"{self.name}.port")
        if settings.tokenizer_dir is not None:
            message = "the folder of tokenizer files"
            checks.exists(message, settings.tokenizer_dir, "gateway.tokenizer_dir")
        if "deploy" not in self.launch.stages:
            start = "'stages=[deploy,gateway]' starts one"
            message = f"a server's ready file, or their folder ({start})"
            for ready in settings.ready:
                checks.exists(message, ready, "gateway.ready")
