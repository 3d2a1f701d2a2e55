"""Values of `auto` keys, and of keys that a later command line leaves out.

They are filled in before the configuration is resolved: the names of folders depend on them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher_scripts.common.errors import CheckpointError, ConfigError, LauncherError, problem
from launcher_scripts.common.hosts import visible_gpus
from launcher_scripts.config.options import absolute
from launcher_scripts.config.settings import AUTO
from launcher_scripts.models import value_count
from launcher_scripts.models.family import ModelConfig
from stages.checks import Checks, Mount
from stages.export import read_sizes

TP_KEY = "export.model.tensor_model_parallel_size"
# Of a GPU's memory; the rest is for keys, values and intermediate results.
_WEIGHTS_SHARE = 0.75
# Of a cluster's GPU, which the login node cannot see.
_CLUSTER_GPU_BYTES = 80e9
_BYTES_PER_VALUE = {"fp32": 4}
_QUANTIZED_FILE_GROWTH = 4  # of a GGUF file of four bits that is served in sixteen


def fill_in(config: DictConfig) -> None:
    """Replace `auto` where the other keys, the checkpoint or this machine decide its value.

    Raises ConfigError if a later command line could mean several deployments.
    """
    stages = _stages(config)
    deployment = config.export.triton_deployment
    if deployment.decoupled == AUTO:
        deployment.decoupled = _has_gateway(config, stages)
    exports, model = "export" in stages, config.export.model
    summary = None if exports else _deployed_summary(config, stages)
    if summary is not None:
        config.export.run.config_summary = summary
    if model.tensor_model_parallel_size == AUTO:
        elsewhere = _gpus_of_a_cluster(config) or 1
        model.tensor_model_parallel_size = _parallel_size(config) if exports else elsewhere


def _stages(config: DictConfig) -> list[str]:
    return [str(name) for name in config.stages] if OmegaConf.is_list(config.stages) else []


def _has_gateway(config: DictConfig, stages: Sequence[str]) -> bool:
    """True if the command line starts a gateway for a model that generates."""
    starts = config.deploy.gateway.port is not None or "gateway" in stages
    return starts and config.export.run.model_type != "t5-encoder"


def _checks(config: DictConfig) -> Checks:
    """A view of the host's files by the paths of the jobs."""
    try:
        return Checks(Mount.parse(str(entry)) for entry in config.container_mounts if entry)
    except (LauncherError, TypeError, OmegaConfBaseException):
        return Checks()  # the plan names what is wrong with the mounts


def _value(config: DictConfig, key: str) -> Any:
    """The value of a key, or None if it cannot be resolved, which the plan reports."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _gpus_of_a_cluster(config: DictConfig) -> int | None:
    """GPUs of a node that the login node cannot see; None if the jobs run on this machine."""
    if config.cluster.type == "interactive":
        return None
    gpus = config.cluster.gpus_per_node
    count = str(gpus).rpartition(":")[2]  # `a100:8` names Slurm's type, too
    return int(count) if count.isdecimal() else 1


def _parallel_size(config: DictConfig) -> int:
    """The smallest size that divides the model and whose GPUs hold the weights.

    On a cluster, without a readable checkpoint, it is the number of a node's GPUs.
    """
    gpus, memory = _gpus_of_a_cluster(config), _CLUSTER_GPU_BYTES
    on_cluster = gpus is not None
    if gpus is None:
        here = () if config.deploy.server.device == "cpu" else visible_gpus()
        limit = config.cluster.gpus_per_node
        gpus = min(len(here), limit) if isinstance(limit, int) else len(here)
        memory = min((gpu.memory for gpu in here), default=0)
    if gpus <= 1 or config.export.format == "huggingface":
        return 1
    model, size = _model_and_bytes(config)
    if size is None:
        return gpus if on_cluster else 1
    pipelines = config.export.triton_deployment.pipeline_model_parallel_size
    capacity = _WEIGHTS_SHARE * memory * (pipelines if isinstance(pipelines, int) else 1)
    sizes: list[int] = (model.tp_sizes() if model is not None else None) or [1, 2, 4, 8, 16]
    sizes = [tp_size for tp_size in sizes if tp_size <= gpus] or [1]
    tp_size = next((tp_size for tp_size in sizes if size <= capacity * tp_size), max(sizes))
    if tp_size > 1:
        print(
            f"note: {TP_KEY} is {tp_size}: weights of about {size / 1e9:,.0f} GB, GPUs of "
            f"{memory / 1e9:,.0f} GB{' (assumed)' if on_cluster else ''}",
            file=sys.stderr,
        )
    return tp_size


def _model_and_bytes(config: DictConfig) -> tuple[Any, float | None]:
    """The sizes of the checkpoint's model, and the bytes of its weights on all GPUs.

    Each is None if the checkpoint does not tell it here.
    """
    path = _value(config, "export.model.checkpoint_path")
    if not isinstance(path, str):
        return None, None
    location = _checks(config).on_host(absolute(path))
    try:
        model = read_sizes(location)
    except (CheckpointError, OSError):
        return None, None  # the export's checks say what is wrong with it
    deployment = config.export.triton_deployment
    width = 1 if deployment.quantization or deployment.int8_mode else None
    if isinstance(model, ModelConfig):
        return model, value_count(model) * (width or _BYTES_PER_VALUE.get(deployment.data_type, 2))
    try:
        files = (
            [location] if location.is_file() else [f for f in location.rglob("*") if f.is_file()]
        )
        stored = sum(file.stat().st_size for file in files)
    except OSError:
        return model, None
    growth = _QUANTIZED_FILE_GROWTH if location.suffix == ".gguf" else 1
    return model, float(stored * growth * (width or 2) / 2) if stored else None


def _deployed_summary(config: DictConfig, stages: Sequence[str]) -> str | None:
    """The config_summary of the one deployment of this name, if the configured one is not there.

    Later command lines have no keys of the export. Raises ConfigError if there are several.
    """
    kind, key, pattern = _needed(stages)
    if not kind:
        return None
    checks, configured = _checks(config), _value(config, key)
    if isinstance(configured, str) and checks.on_host(absolute(configured)).exists():
        return None
    base = _value(config, "base_results_dir")
    name = _value(config, "export.run.model_train_name")
    folder = checks.on_host(absolute(str(base))) / str(name)
    tp_size = config.export.model.tensor_model_parallel_size
    start = f"{kind}_" if tp_size == AUTO else f"{kind}_tp{tp_size}_"
    files = sorted(folder.glob(f"{start}*/{pattern.format(name=name)}"))
    depth = pattern.count("/") + 1
    folders = sorted({file.parents[depth - 1] for file in files})
    if len(folders) > 1:
        raise ConfigError(
            problem(
                f"{name} has several {'servers' if kind == 'deploy' else 'exports'}",
                choices=[str(folder) for folder in folders],
                change=f"export.run.config_summary (what follows `{kind}_` in the folder's name)",
            )
        )
    if not folders:
        return None
    print(f"note: this is about {folders[0]}", file=sys.stderr)
    return folders[0].name.removeprefix(f"{kind}_")


def _needed(stages: Sequence[str]) -> tuple[str, str, str]:
    """Return the input of the first stage: kind of its folder, key that names it, files in the
    folder."""
    if "deploy" in stages:
        return "export", "deploy.model_repository", "model_repo/{name}/config.pbtxt"
    if "gateway" in stages:
        return "deploy", "deploy.run.results_dir", "ready*.json"
    if "evaluate" in stages:
        return "deploy", "evaluate.ready_file", "ready*.json"
    return "", "", ""
