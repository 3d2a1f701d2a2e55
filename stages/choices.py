"""The command line's part of conf/: its choices, its keys, readable values, values of `auto` keys,
and of keys that a later command line leaves out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from launcher_scripts.common.errors import (
    CheckpointError,
    ConfigError,
    LauncherError,
    Problems,
    problem,
)
from launcher_scripts.common.hosts import visible_gpus
from launcher_scripts.common.quantization import BYTES_PER_WEIGHT, QUANTIZATIONS
from launcher_scripts.config.evaluation import RENAMED_TASKS
from launcher_scripts.config.options import absolute
from launcher_scripts.config.settings import AUTO
from launcher_scripts.models import value_count
from launcher_scripts.models.family import ModelConfig
from stages import STAGES
from stages.checks import Checks, Mount
from stages.export import checkpoint_sizes

_CHOICE = re.compile(r"(?P<group>\w+)(?:@[\w.]+)?=(?P<choice>[\w.\-/]*)")
_WITHOUT_VALUE = ("-m", "--multirun", "--resolve", "-h", "--help", "--hydra-help")
_KEY = re.compile(r"(?P<key>[\w.]+)=.*", re.DOTALL)
# Words for cluster types that users of other launchers know.
CLUSTER_ALIASES = {"slurm": "bcm", "local": "interactive"}
_VARIABLES = "env_vars"
_OPEN_BLOCKS = (_VARIABLES,)  # that take any key


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's reader of YAML files, for which the text of a value counts where YAML changes it.

    YAML reads `on` as True, `010` as 8 and `1:30` as 90. Environment variables are always text;
    elsewhere integers stay text if they are not written as Python prints them.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        if not path.is_file():
            return super().load_config(config_path)  # raises
        header, values, texts = _parsed(path, path.stat().st_mtime_ns)
        config = OmegaConf.create({} if values is None else values)
        if isinstance(config, DictConfig):
            _restore_texts(config, texts, in_variables=False)
        source = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, source, config, dict(header))


@cache
def _parsed(path: Path, _changed: int) -> tuple[dict[str, str | None], Any, Any]:
    """The header of a YAML file for Hydra, the file's values, and their texts.

    Hydra composes every configuration twice, and parsing takes half of a launcher's time.
    """
    text = path.read_text(encoding="utf-8")
    header = ConfigSource._get_header_dict(text[:512])
    texts = yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return header, yaml.load(text, get_yaml_loader()), texts


def register_file_source() -> None:
    """Have Hydra read files with FileConfigSource; it keeps a source of the same name."""
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource


def _restore_texts(config: Any, texts: Any, *, in_variables: bool) -> None:
    """Put the texts of a file in place of the values that YAML has made of them."""
    names: Iterable[Any] = range(len(config))
    if isinstance(config, DictConfig):
        names = [name for name in config if str(name) in texts]
    for name in names:
        value = config._get_node(name)
        text = texts[str(name) if isinstance(config, DictConfig) else name]
        if OmegaConf.is_config(value) and isinstance(text, (dict, list)):
            _restore_texts(value, text, in_variables=in_variables or name == _VARIABLES)
            continue
        plain = value._value()
        kinds = (int, float, bool) if in_variables else (int,)
        if type(plain) in kinds and isinstance(text, str) and str(plain) != text:
            config[name] = text


def with_stage_options(arguments: Iterable[str]) -> list[str]:
    """The arguments with a plus before `<stage>.cluster.<key>`: any key of the cluster can be
    there, and conf/ lists none.
    """
    key = re.compile(rf"\+{{0,2}}(({'|'.join(STAGES)})\.cluster(\.\w+)?=)")
    return [
        key.sub(r"++\1", argument, count=1) if key.match(argument) else argument
        for argument in arguments
    ]


def with_texts_of_variables(arguments: Iterable[str]) -> list[str]:
    """The arguments with quotes around the values of env_vars that Hydra would read as numbers or
    truth values. Raises ConfigError for a mapping with such values.
    """
    problems, result = Problems("the command line"), []
    for argument in arguments:
        key, _, text = argument.partition("=")
        name = key.lstrip("+")
        if name.split(".")[0] == _VARIABLES:
            value = _value_of(argument)
            if isinstance(value, (bool, int, float)) and str(value) != text:
                argument = f'{key}="{text.strip()}"'
            elif isinstance(value, dict):
                changed = [item for item in value.values() if _is_changed(item, text)]
                if changed:
                    problems.add(
                        "Hydra reads values of env_vars as numbers or truth values",
                        got=changed,
                        change=f"{argument}: put each in quotes",
                    )
        result.append(argument)
    problems.raise_if_any(ConfigError)
    return result


def _value_of(argument: str) -> Any:
    """The value that Hydra reads; None for an argument that it cannot read."""
    try:
        return OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return None


def _is_changed(value: Any, text: str) -> bool:
    return isinstance(value, (bool, int, float)) and str(value) not in re.findall(r"[\w.+-]+", text)


def normalized_arguments(arguments: Iterable[str]) -> list[str]:
    """The arguments as Hydra reads them: lists in one piece, and names of the configuration.

    `stages=export,deploy`, lists with spaces, other names of cluster types and former names of
    tasks are accepted.
    """
    choices = []
    for argument in _joined(arguments):
        key, _, value = argument.partition("=")
        if key == "stages" and not value.startswith(("[", "'", '"', "$")) and value:
            names = re.split(r"[,\s]+", value.strip())
            argument = f"stages=[{','.join(names)}]"
        elif key == "cluster_type":
            argument = f"cluster_type={CLUSTER_ALIASES.get(value, value)}"
        choices.append(argument)
    return _with_renamed_tasks(choices)


def _joined(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments, where a shell has split a list at its spaces (`stages=[export, deploy]`)."""
    open_list = ""
    for argument in arguments:
        open_list = f"{open_list} {argument}" if open_list else argument
        value = open_list.partition("=")[2]
        if value.startswith(("[", "{")) and value.count("[") + value.count("{") > (
            value.count("]") + value.count("}")
        ):
            continue
        yield open_list
        open_list = ""
    if open_list:
        yield open_list


def _with_renamed_tasks(arguments: Iterable[str]) -> list[str]:
    """The arguments with the tasks that they call by a former name renamed, which a note says."""
    result = list(arguments)
    for old, new in RENAMED_TASKS.items():
        name = re.compile(rf"(\+*evaluate\.tasks\.|evaluate=[\w/]*\b){old}(?=[.=]|$)")
        renamed = [name.sub(rf"\g<1>{new}", argument) for argument in result]
        if renamed != result:
            print(f"note: the task {old} is called {new} (docs/evaluation.md)", file=sys.stderr)
        result = renamed
    return result


def check_choices(arguments: Iterable[str], conf: Path) -> None:
    """Raises ConfigError for every `group=choice` that `conf` has no file of.

    Whatever is not a plain choice, or may come from another folder, is left to Hydra.
    """
    arguments = list(arguments)
    if any(argument.startswith(("--config-dir", "-cd")) for argument in arguments):
        return
    problems = Problems("the command line")
    for argument in arguments:
        match = _CHOICE.fullmatch(argument)
        if match is None or not (conf / match["group"]).is_dir():
            continue
        folder, choice = conf / match["group"], match["choice"].removesuffix(".yaml")
        files = (path.relative_to(folder) for path in sorted(folder.rglob("*.yaml")))
        choices = [path.with_suffix("").as_posix() for path in files]
        problems.check_choice(match["group"], choice, choices, match["group"])
    problems.raise_if_any(ConfigError)


def check_grammar(arguments: Iterable[str]) -> None:
    """Raises ConfigError for every `key=value` that Hydra's grammar cannot read.

    A value with ~, =, brackets or other letters than English ones needs quotes that Hydra sees.
    """
    problems, parser = Problems("the command line"), OverridesParser.create()
    before = ""
    for argument in arguments:
        key, equal, value = argument.partition("=")
        of_an_option = before.startswith("-") and before not in _WITHOUT_VALUE and "=" not in before
        if equal and not argument.startswith("-") and not of_an_option:
            try:
                readable = bool(parser.parse_override(argument).key_or_group)
            except HydraException:
                readable = False
            if not readable:
                quoted = f"it to {_quoted(key, value)}" if key else "the key"
                if value.startswith(("[", "{")) and value.count("[") != value.count("]"):
                    quoted = f"it to '{key}=[A,B]', with every bracket closed"
                problems.add("Hydra cannot read this as key=value", got=argument, change=quoted)
        before = argument
    problems.raise_if_any(ConfigError)


def _quoted(key: str, value: str) -> str:
    """The argument as a shell passes it and Hydra reads it, with the value as text."""
    inner = value[1:-1] if value[:1] + value[-1:] == "[]" else None
    if inner is None or "[" in inner:
        return shlex.quote(f"{key}={_text(value)}")
    members = (member.strip() for member in inner.split(","))
    return shlex.quote(f"{key}=[{','.join(map(_text, members))}]")


def _text(value: str) -> str:
    """A text in quotes as Hydra's grammar has them: a backslash counts before a quote alone."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value
    escaped = re.sub(r'(\\*)(")', r"\1\1\\\2", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{escaped[len(escaped) - trailing :]}"'


def check_keys(arguments: Iterable[str], conf: Path) -> None:
    """Raises ConfigError for every `key=value` that the configuration has no key for.

    For a command line that Hydra has refused: the configuration is composed once more.
    """
    arguments = list(arguments)
    groups = [item for item in arguments if (conf / item.partition("=")[0].strip("+")).is_dir()]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            config = OmegaConf.to_container(compose("config", groups))
    except HydraException:
        return  # it is the choices that are wrong
    problems = Problems("the command line")
    for argument in arguments:
        match = _KEY.fullmatch(argument)
        if match is not None and argument not in groups:
            _find(config, match["key"], problems)
    problems.raise_if_any(ConfigError)


def _find(config: Any, key: str, problems: Problems) -> None:
    """Add the key where a block of the configuration does not have it."""
    above: list[str] = []
    for name in key.split("."):
        if not isinstance(config, dict) or above == ["hydra"]:
            return
        if name not in config and name != "hydra":
            block = ".".join(above) or "the configuration"
            problems.add(
                f"{block} has no key {name}",
                got=key,
                choices=sorted(map(str, config)),
                change=f"it to +{key}=... for a new one" if block in _OPEN_BLOCKS else None,
            )
            return
        config = config.get(name)
        above.append(name)


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
        model = checkpoint_sizes(location)
    except (CheckpointError, OSError):
        return None, None  # the export's checks say what is wrong with it
    deployment = config.export.triton_deployment
    quantization = QUANTIZATIONS.get(deployment.quantization)
    width = BYTES_PER_WEIGHT[quantization] if quantization else None
    if deployment.int8_mode:
        width = 1
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
