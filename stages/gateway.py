"""Gateway: OpenAI's interface before servers that run already, until it is stopped."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from hydra.core.config_store import ConfigStore

from launcher_scripts.config.gateway import DeployedGateway, GatewayJobSettings
from launcher_scripts.config.options import values_of, with_absolute_paths
from launcher_scripts.config.security import LOOPBACK
from stages.checks import check_gateway
from stages.deploy import Deploy
from stages.stage import ClientRun, ServiceStage


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
