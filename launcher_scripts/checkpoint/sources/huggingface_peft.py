"""Adapters of Hugging Face PEFT: `adapter_config.json` and `adapter_model.safetensors` or `.bin`.

The tensors are named as the modules of transformers that they are for
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from launcher_scripts.checkpoint.formats import source_tensor, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, float32
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    SourceCheckpoint,
    renamed,
    unwrapped,
)
from launcher_scripts.checkpoint.layout.tasks import source_of
from launcher_scripts.checkpoint.sources.huggingface import read_mapping, without_prefix
from launcher_scripts.checkpoint.sources.huggingface_architectures import ARCHITECTURES
from launcher_scripts.checkpoint.sources.huggingface_raw import text_name, unknown_keys
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import (
    BY_LAYER,
    expert_pairs,
    is_stacked,
    stacked_name,
    unnested,
)
from launcher_scripts.checkpoint.sources.merging import (
    Added,
    LearnedAdapter,
    LowRank,
    Replaced,
    Update,
)
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models import family_of
from launcher_scripts.models.family import Partition
from launcher_scripts.models.gpt_dialects import DIALECTS

CONFIG_NAME = "adapter_config.json"
_TABLES_NOTE = (
    "{}: its tables of the vocabulary take the place of the base's; if its training added tokens, "
    "name its tokenizer in export.model.tokenizer"
)
Value = TypeVar("Value")
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_LORA = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.default)?(?:\.(?P<kind>weight|bias))?"
)
_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta")
_REPLACED = re.compile(
    r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)"
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)
# Without a part in what the trained model computes. fan_in_fan_out follows the module's class.
_IRRELEVANT = frozenset(
    {
        "auto_mapping",
        *("base_model_name_or_path", "corda_config"),
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        *("lora_dropout", "lora_ga_config"),
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
# Those that leave the base as it is; the others take something out of it first.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class _Settings:
    """adapter_config.json."""

    raw: Mapping[str, Any]
    problems: Problems

    def reject_unknown(self) -> None:
        """Note what would change the model in ways that merging does not know."""
        for key, value, choices in (
            ("peft_type", self.raw.get("peft_type"), ("LORA",)),
            ("bias", self.raw.get("bias", "none"), ("none", "all", "lora_only")),
            ("init_lora_weights", self.raw.get("init_lora_weights", True), _INITIALISATIONS),
        ):
            if value not in choices:
                self.problems.add(f"{key} is not supported", got=value, choices=choices)
        for key in unknown_keys(self.raw, _READ | _IRRELEVANT):
            self.problems.add(f"{key} is not supported", got=self.raw[key], choices=[None])

    def check_types(self) -> None:
        """Note names and patterns that are none."""
        for key in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            value = self.raw.get(key) or []
            patterns = [value] if isinstance(value, str) else value
            if not isinstance(patterns, list) or not all(map(_is_pattern, patterns)):
                self.problems.add(f"{key} must be a pattern, or a list of names", got=value)
        parameters = self.raw.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(type(name) is str for name in parameters):
            self.problems.add("target_parameters must be a list of names", got=parameters)
        for key in ("rank_pattern", "alpha_pattern"):
            value = self.raw.get(key) or {}
            if not isinstance(value, Mapping) or not all(map(_is_pattern, value)):
                self.problems.add(f"{key} must be a mapping of patterns", got=value)
        layers = self.raw.get("layers_to_transform")
        value = layers if isinstance(layers, list) else [layers]
        if layers is not None and not all(type(number) is int for number in value):
            self.problems.add("layers_to_transform must be numbers of layers", got=layers)

    def check_parameters(self, names: Iterable[str]) -> None:
        """Note parameters that the configuration names, and none of these modules has."""
        parameters = [parameter for name in names for parameter in (name, f"{name}.weight")]
        for target in self.raw.get("target_parameters") or []:
            if not any(_is_named(parameter, [target]) for parameter in parameters):
                message = f"target_parameters names {target}: LoRA of it is not in the file"
                self.problems.add(message)

    def check_saved(self, parts: _Parts, has_biases: bool) -> None:
        """Note what the configuration says was trained, and the file does not hold.

        has_biases: the base has such biases as may have been trained
        """
        for name in self.raw.get("modules_to_save") or []:
            if not any(re.match(rf"(^|.*\.){name}(\..*)", tensor) for tensor in parts.full):
                self.problems.add(f"modules_to_save names {name}, which is not in the file")
        if self.raw.get("trainable_token_indices") and not parts.tokens:
            self.problems.add("trainable_token_indices: the tokens' rows are not in the file")
        bias = self.raw.get("bias", "none")
        if bias != "none" and has_biases and not any(name.endswith(".bias") for name in parts.full):
            message = "the biases were trained and are not in the file"
            self.problems.add(message, got=f"bias: {bias}")

    def number(self, value: Any, name: str) -> float:
        if type(value) in (int, float) and value > 0:
            return float(value)
        self.problems.add(f"{name} must be a positive number", got=value)
        return 1.0

    def patterned(self, name: str, default: str, module: str) -> float:
        """Return the value of the first pattern that matches a module; else the default."""
        for pattern, value in (self.raw.get(name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return self.number(value, f"{name} of {pattern}")
        return self.number(self.raw.get(default, 8), default)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of LoRA for a module with matrices of this rank."""
        raw = self.patterned("rank_pattern", "r", module)
        if raw != rank:
            self.problems.add(f"LoRA of {module} has another rank", got=rank, choices=[raw])
        alpha = self.patterned("alpha_pattern", "lora_alpha", module)
        return alpha / (math.sqrt(raw) if self.raw.get("use_rslora") else raw)

    def targets(self, module: str, linear: bool) -> bool | None:
        """Return whether LoRA was learned for a module, by its whole name."""
        targets = self.raw.get("target_modules")
        if self.targets_parameter(f"{module}.weight"):
            return True
        if targets is None and self.raw.get("target_parameters"):
            return False
        excluded = self.raw.get("exclude_modules")
        saved = self.raw.get("modules_to_save") or []
        if targets is None:
            return None
        if excluded and _is_named(module, excluded):
            return False
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in saved):
            return False
        if targets == "all-linear":
            return linear and "relative_attention_bias" not in module
        return _is_named(module, targets) and (
            isinstance(targets, str) or module in targets or self._selects_layer(module)
        )

    def targets_parameter(self, name: str) -> bool:
        """True if LoRA was learned for a parameter without regard to its module's class."""
        return _is_named(name, self.raw.get("target_parameters") or [])

    @property
    def reads_inputs(self) -> bool:
        """True if A of a weight of all experts has its inputs for sure: since PEFT 0.20. Before, it
        has what PEFT took for them."""
        version = re.match(r"(\d+)\.(\d+)", str(self.raw.get("peft_version")))
        return version is not None and (int(version[1]), int(version[2])) >= (0, 20)

    def _selects_layer(self, module: str) -> bool:
        layers = self.raw.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self.raw.get("layers_pattern") or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            match = re.match(rf".*?\.{pattern}\.(\d+)\.", module)
            if match:
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False

    def token_rows(self, module: str) -> tuple[int, ...]:
        """The tokens whose rows of a table were trained, in the order of the rows."""
        value = self.raw.get("trainable_token_indices")
        if isinstance(value, Mapping):
            value = next((rows for name, rows in value.items() if _is_named(module, [name])), None)
        if not isinstance(value, list) or not all(type(row) is int for row in value):
            self.problems.add("trainable_token_indices must be a list of token ids", got=value)
            return ()
        return tuple(value)


def _is_named(module: str, names: Any) -> bool:
    """As PEFT compares: a text is a pattern of the whole name, a list holds its last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


@dataclass
class _Parts:
    """Of the tensors of one file: module -> part of LoRA -> tensor; what was trained whole."""

    loras: dict[str, dict[str, SourceTensor]] = field(default_factory=dict)
    tokens: dict[str, SourceTensor] = field(default_factory=dict)
    full: dict[str, SourceTensor] = field(default_factory=dict)

    @staticmethod
    def put(
        table: dict[str, SourceTensor],
        key: str,
        tensor: SourceTensor,
        name: str,
        problems: Problems,
    ) -> None:
        if key in table:
            problems.add(f"{name} and another tensor are both {key}")
        table[key] = tensor


def matches(path: Path) -> bool:
    """Return whether a folder is an adapter of PEFT."""
    return (path / CONFIG_NAME).is_file()


def read_peft(path: Path, base: SourceCheckpoint) -> LearnedAdapter:
    """The adapter, for `base`, of whose modules it may have those that transformers names.

    Raises CheckpointError for what is damaged or not supported, all of it at once.
    """
    archive = Archive(path)
    problems = Problems(f"the adapter {path}")
    settings = _Settings(read_mapping(archive, CONFIG_NAME), problems)
    settings.reject_unknown()
    settings.check_types()
    if (base.config_json() or {}).get(BY_LAYER) is True:
        problems.add(f"LoRA of a GPT-2 with {BY_LAYER} is not supported")
    problems.raise_if_any(CheckpointError)
    parts = _sorted(_read_tensors(archive), problems)
    updates: dict[str, tuple[Update, ...]] = {}
    modules: dict[str, str] = {}
    for name, tensor in _plain_names(parts.full, archive).items():
        updates[name] = (Replaced(tensor),)
    for stem, (module, tensor) in _plain_names(_with_names(parts.tokens), archive).items():
        name, rows = f"{stem}.weight", settings.token_rows(module)
        updates[name] = (*updates.get(name, ()), Replaced(tensor, rows))
    loras = _plain_names(_with_names(parts.loras), archive)
    for stem, (module, sides) in unnested(loras, settings.targets_parameter, problems).items():
        modules[stem] = module
        learned = (
            _lora_of_experts(stem, module, sides, settings, base.config)
            if is_stacked(stem)
            else _lora(stem, module, sides, settings)
        )
        for name, value in learned.items():
            updates[name] = (*updates.get(name, ()), value)
    for name in [name for name in updates if ".self_attn.k_proj." in name]:
        other = name.replace("k_proj", "v_proj")
        if other not in updates and _makes_values(base, name):
            updates[other] = updates[name]
            if (stem := name.removesuffix(".weight")) in modules:
                modules[stem.replace("k_proj", "v_proj")] = modules[stem]
    settings.check_parameters(modules.values())
    settings.check_saved(parts, _biases(base, modules, settings.raw.get("bias")))
    copies = _drop_copies(updates, base)
    ties = bool(settings.raw.get("ensure_weight_tying")) or copies
    problems.raise_if_any(CheckpointError)
    tables = _replaced_tables(updates, base, ties)
    prefixes = {full.removesuffix(name) for name, full in modules.items()}
    has_experts = any(map(stacked_name, modules))

    def targets(module: str, linear: bool) -> bool | None:
        stacked = None if has_experts else stacked_name(module)
        if stacked is not None:  # transformers 5 has no module of one expert
            return any(settings.targets_parameter(prefix + stacked) for prefix in prefixes)
        names = [modules[module]] if module in modules else [p + module for p in prefixes]
        results = [settings.targets(name, linear) for name in names]
        return None if None in results else any(results)

    notes = (_TABLES_NOTE.format(path.name),) if tables else ()
    return LearnedAdapter(path, updates, _dialects(base), targets, ties, notes, tables)


def _makes_values(base: SourceCheckpoint, name: str) -> bool:
    """True if a projection of keys makes values, too; see tensors_of_layers."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer is None or (base.config_json() or {}).get("attention_k_eq_v") is not True:
        return False
    return not base.config.window(int(layer[1]))


def _biases(base: SourceCheckpoint, modules: Mapping[str, str], kind: Any) -> bool:
    """True if the base has biases of the kind that was trained: of modules with LoRA, or all."""
    names = base.names()
    if kind == "lora_only" and any(f"{module}.weight" in names for module in modules):
        return any(f"{module}.bias" in names for module in modules)
    return any(name.endswith("bias") for name in names)


def _replaced_tables(
    updates: dict[str, tuple[Update, ...]], base: SourceCheckpoint, ties: bool
) -> dict[str, SourceTensor]:
    """Take from the updates the tables of the vocabulary that the base cannot hold: of other rows,
    or one of two that it ties, trained on its own.

    Returns them by the rows of the weight table.
    """
    tied = bool(getattr(base.config, "tied_embeddings", False))
    config = dataclasses.replace(base.config, tied_embeddings=False) if tied else base.config
    rows: dict[str, set[str]] = {}
    for dialects in _dialects(base):
        for spec in family_of(config).weights(config):
            source = source_of(spec, dialects)
            if source is None or source.layout != "as_is" or len(source.keys) > 1:
                continue
            if spec.partition is Partition.VOCAB_PARALLEL and len(spec.shape) == 2:
                rows.setdefault(source.keys[0], set()).add(spec.name)
    tables = {
        name: values[0].values
        for name, values in updates.items()
        if name in rows and isinstance(values[0], Replaced) and values[0].rows is None
    }
    resized = any(table.shape[:1] != (config.vocab_size,) for table in tables.values())
    if not resized and (ties or not tied):
        return {}
    for name in tables:
        updates[name] = updates[name][1:]
        if not updates[name]:
            del updates[name]
    return {row: table for name, table in tables.items() for row in rows[name]}


def _plain_names(values: Mapping[str, Value], archive: Archive) -> dict[str, Value]:
    """Values by the weight table's names. Raises CheckpointError where two names become one."""
    plain = ((name, without_prefix(name), value) for name, value in values.items())
    named = ((name, text_name(short) or short, value) for name, short, value in plain)
    return renamed(named, str(archive.path))


def _with_names(values: Mapping[str, Value]) -> dict[str, tuple[str, Value]]:
    return {name: (name, value) for name, value in values.items()}


def _is_pattern(value: object) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _read_tensors(archive: Archive) -> dict[str, SourceTensor]:
    """Name, as in transformers' model, -> tensor."""
    file = next((name for name in WEIGHT_FILES if name in archive.names()), None)
    if file is None:
        raise CheckpointError(problem(f"{archive.path} holds no weights", choices=WEIGHT_FILES))
    origin = f"{file} of {archive.path}"
    load = (
        source_tensor.load_safetensors if file.endswith(".safetensors") else torch_file.load_state
    )
    loaded = load(archive.region(file), origin)
    stored = dict(torch_file.tensors_of(loaded.items(), origin))
    if len(stored) < len(loaded):
        raise CheckpointError(f"{origin} holds no state dict")
    for name, values in stored.items():
        archive.check(values, name)
    named = (
        (name, unwrapped(name)[0], SourceTensor.full(values)) for name, values in stored.items()
    )
    return renamed(named, origin)


def _sorted(tensors: Mapping[str, SourceTensor], problems: Problems) -> _Parts:
    parts = _Parts()
    for name, tensor in tensors.items():
        if lora := _LORA.fullmatch(name):
            side = lora["part"] + ("_bias" if lora["kind"] == "bias" else "")
            parts.put(parts.loras.setdefault(lora["module"], {}), side, tensor, name, problems)
        elif tokens := _TOKENS.fullmatch(name):
            parts.put(parts.tokens, tokens["module"], tensor, name, problems)
        elif match := _REPLACED.fullmatch(name):
            target = f"{match['module']}.{match['kind']}"
            parts.put(parts.full, target, tensor, name, problems)
        else:
            problems.add(f"{name} is not a part that is known")
    return parts


def _lora(
    name: str, module: str, sides: Mapping[str, SourceTensor], settings: _Settings
) -> dict[str, Update]:
    """Read the LoRA of a linear layer or a table, by the names of its tensors."""
    embedding = "embedding_A" in sides
    down, up = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    expected = {down, up} | ({"magnitude_vector"} if settings.raw.get("use_dora") else set())
    if settings.raw.get("lora_bias") and not embedding:
        expected.add("B_bias")
    if sides.keys() != expected:
        settings.problems.add(
            f"LoRA of {module} is not complete", got=sorted(sides), choices=sorted(expected)
        )
        return {}
    rank = sides[down].shape[0] if sides[down].shape else 0
    scale = settings.scale(module, rank)
    magnitude = sides.get("magnitude_vector")
    result: dict[str, Update] = {
        f"{name}.weight": LowRank(sides[down], sides[up], scale, magnitude, embedding)
    }
    if "B_bias" in sides:
        result[f"{name}.bias"] = Added(sides["B_bias"], scale)
    return result


def _lora_of_experts(
    name: str, module: str, sides: Mapping[str, SourceTensor], settings: _Settings, config: Any
) -> dict[str, Update]:
    """LoRA of the weights of each expert, from LoRA of the tensor `name` of all experts."""
    pairs = expert_pairs(name, sides, config, settings.reads_inputs, settings.problems)
    if not pairs:
        return {}
    scale = settings.scale(module, next(down.shape[0] for down, _ in pairs.values()))
    return {key: LowRank(down, up, scale) for key, (down, up) in pairs.items()}


def _drop_copies(updates: dict[str, tuple[Update, ...]], base: SourceCheckpoint) -> bool:
    """Keep tables that the base ties once; whether there were two, equal."""
    result = False
    if not getattr(base.config, "tied_embeddings", False):
        return False
    tied = [pair for row in ARCHITECTURES.values() for pair in row.tied.items()]
    for name, other in {(name, other) for name, others in tied for other in others}:
        pair = (*updates.get(name, ()), *updates.get(other, ()))
        tables = [float32(item.values.read()) for item in pair if isinstance(item, Replaced)]
        if len(tables) == 2 and np.array_equal(tables[0], tables[1]):
            del updates[other]
            result = True
    return result


def _dialects(base: SourceCheckpoint) -> Sequence[Sequence[str]]:
    """Return the names that transformers may use for the base's modules."""
    family, dialects = family_of(base.config).name, base.config_dialects
    rows = [row for row in ARCHITECTURES.values() if row.family == family]
    if any(row.dialect in dialects for row in rows):
        in_memory = [name for dialect in dialects if (name := f"{dialect}_in_memory") in DIALECTS]
        return [dialects, *([(*in_memory, *dialects)] if in_memory else [])]
    rows = [row for row in rows if row.may_be(base.config)]
    return list(dict.fromkeys((row.dialect, *row.inherits) for row in rows))
