"""What the evaluate stage knows of lm_eval: its settings, its files, and the gateway it asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher_scripts.config.harness import KEY, HarnessSettings
from stages.deploy import Deploy
from stages.gateway import Gateway
from stages.paths import absolute
from stages.stage import Launch


def harness_settings(block: HarnessSettings | None, launch: Launch) -> HarnessSettings | None:
    """With absolute paths, and the gateway's job of the same command line; None: not asked."""
    if block is None or not block.tasks:
        return None
    gateway = block.gateway
    if gateway is None and "gateway" in (*launch.stages, *_brought(launch)):
        gateway = str(Gateway(launch).settings.ready_file)
    elif gateway is not None and block.gateway_is_file:
        gateway = absolute(gateway)
    return replace(
        block,
        data=block.data and absolute(block.data),
        api_keys=block.api_keys and absolute(block.api_keys),
        gateway=gateway,
    )


def harness_paths(settings: HarnessSettings) -> list[Path]:
    """What lm_eval's job reads."""
    files = [settings.data, settings.api_keys]
    files += [settings.gateway] if settings.gateway_is_file else []
    return [Path(file) for file in files if file is not None]


def check_harness(settings: HarnessSettings, launch: Launch) -> None:
    """Its files are there, and so will be a gateway that it can ask."""
    checks = launch.checks
    checks.exists("the folder of lm_eval's data sets", str(settings.data), f"{KEY}.data")
    if settings.api_keys is not None:
        checks.private("the file of API keys", settings.api_keys, f"{KEY}.api_keys")
    if settings.gateway is None and "deploy" in launch.stages and Deploy(launch).gateway is None:
        checks.problems.add(
            "lm_eval asks a gateway, and this command line starts none",
            got=list(settings.tasks),
            change=f"deploy.gateway.port=0 (a free one), or {KEY}.gateway=http://host:port/v1",
        )


def _brought(launch: Launch) -> tuple[str, ...]:
    return Deploy(launch).brings if "deploy" in launch.stages else ()
