"""LoRA that NeMo 2 and Megatron Bridge trained on a model of Megatron-LM core.

Beside the linear layer `NAME` stand `NAME.adapter.linear_in.weight` [dim, in] and
`NAME.adapter.linear_out.weight` [out, dim]; `NAME.adapter.weight_magnitude` [out] for DoRA. The
canonical form has such a pair per part of the fused layers: `adapter_q`, `adapter_k`, `adapter_v`
of `linear_qkv`, `adapter_gate` and `adapter_up` of `linear_fc1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, float32
from launcher_scripts.checkpoint.layout.source_checkpoint import renamed
from launcher_scripts.checkpoint.sources import core_t5
from launcher_scripts.checkpoint.sources.core_layers import concatenated_ranks
from launcher_scripts.checkpoint.sources.huggingface_raw import unknown_keys
from launcher_scripts.checkpoint.sources.merging import LearnedAdapter, LowRank, Replaced, Update
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt_nemo import core_dialects, nemo_dialects

_MARK = ".adapter."
_PART = re.compile(
    r"(?P<module>.+)\.adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?"
    r"(?P<side>linear_in|linear_out|weight_magnitude)(?:\.weight)?"
)
_SPLIT = ("q", "k", "v")
_METHODS = ("LoRA", "CanonicalLoRA", "DoRA")
# Without a part in what the trained model computes: there is no row for LoRA of experts.
_IRRELEVANT = frozenset(
    {
        "a2a_experimental",
        "canonical_mapping",
        "dropout",
        "dropout_position",
        "dropout_recompute",
        "exclude_modules",
        "experts_shared_outer_loras",
        "lora_A_init_method",
        "lora_B_init_method",
        "lora_dtype",
        "normalize_moe_lora",
        "params_to_save",
        "sequence_parallel_input_regather",
        "share_expert_adapters",
    }
)
_READ = frozenset({"_target_", "alpha", "dim", "target_modules"})
_EARLY_BRIDGE = (
    "canonical LoRA of query, key and value is read as Megatron Bridge 0.3.0 and later add it; "
    "earlier ones, which the checkpoint does not tell apart, added it in another order"
)
_NEMO_ORDER = (
    "NeMo 2 adds canonical LoRA of query, key and value in the order of its tensor-parallel ranks' "
    "[queries, keys, values]: so does this export, and other tools that read q_proj there do not"
)


@dataclass(frozen=True)
class PeftSettings:
    """Settings that the adapters were trained with.

    raw:      the section of the configuration
    problems: what is wrong with the adapters
    tp_size:  the training's tensor-parallel size
    nemo:     NeMo 2 trained them, not Megatron Bridge
    """

    raw: Mapping[str, Any]
    problems: Problems
    tp_size: int
    nemo: bool

    def scale(self) -> float:
        """alpha / dim."""
        settings: list[Any] = [self.raw.get(key) for key in ("alpha", "dim")]
        if not all(type(value) in (int, float) and value > 0 for value in settings):
            self.problems.add("alpha and dim must be positive numbers", got=settings)
            return 1.0
        return float(settings[0]) / float(settings[1])

    def check(self) -> None:
        """Note what would change the model in ways that merging does not know."""
        method = str(self.raw.get("_target_")).rpartition(".")[2]
        if method not in _METHODS:
            self.problems.add("_target_ is not supported", got=method, choices=_METHODS)
        for key in unknown_keys(self.raw, _READ | _IRRELEVANT):
            if not key.startswith("_"):
                self.problems.add(f"{key} is not supported", got=self.raw[key])

    def targets(self, module: str, _linear: bool) -> bool | None:
        """Return whether LoRA was learned for a module: patterns name its last part, or all of
        it."""
        targets = self.raw.get("target_modules")
        if not isinstance(targets, list) or not targets or self.raw.get("exclude_modules"):
            return None
        stem, _, last = module.rpartition(".")
        names = [last]
        if last == "linear_qkv" and self.nemo:
            names.append("linear_q")  # which _joined has put there
        return any(
            name == pattern or re.fullmatch(_wildcards(str(pattern)), f"{stem}.{name}")
            for name in names
            for pattern in targets
        )


def _wildcards(pattern: str) -> str:
    """A pattern's regular expression; what is before the model's own names may be left out."""
    return r"(module\.)*" + ".*".join(re.escape(part) for part in pattern.split("*"))


def separated(
    tensors: Mapping[str, SourceTensor], origin: str
) -> tuple[dict[str, SourceTensor], dict[str, SourceTensor]]:
    """The tensors of the base, and those of adapters that were saved together with it.

    origin: where they are from, for errors
    """
    named = renamed(
        ((name, name.replace(".to_wrap.", "."), tensor) for name, tensor in tensors.items()), origin
    )
    adapter_tensors = {name: tensor for name, tensor in named.items() if _MARK in name}
    return {
        name: tensor for name, tensor in named.items() if name not in adapter_tensors
    }, adapter_tensors


def adapter_of(
    path: Path,
    tensors: Mapping[str, SourceTensor],
    settings: PeftSettings,
    config: ModelConfig,
    dialects: tuple[str, ...],
) -> LearnedAdapter:
    """The adapter for a base of these hyperparameters and dialects.

    tensors: names without a common prefix; what belongs to no adapter was trained as a whole
    Raises CheckpointError for what is not complete or not supported, all of it at once.
    """
    settings.check()
    scale = settings.scale()
    settings.problems.raise_if_any(CheckpointError)
    base, adapter_tensors = separated(tensors, str(path))
    layers = _layers(adapter_tensors, settings, config)
    updates: dict[str, Update] = {name: Replaced(tensor) for name, tensor in base.items()}
    notes: set[str] = set()
    joined: dict[str, dict[str, LowRank]] = {}
    for (module, part), sides in layers.items():
        value = _low_rank(module, sides, scale, settings)
        if value is None:
            continue
        if part in _SPLIT and settings.nemo:
            joined.setdefault(module, {})[part or ""] = value
            continue
        if part in _SPLIT:
            notes.add(_EARLY_BRIDGE)
        _put(updates, f"{_renamed(module, part)}.weight", value, settings)
    for module, parts in joined.items():
        notes.add(_NEMO_ORDER)
        value = _joined(module, parts, settings)
        if value is not None:
            _put(updates, f"{module}.weight", value, settings)
    settings.problems.raise_if_any(CheckpointError)
    values = {name: (value,) for name, value in updates.items()}
    if family_of(config).name == "t5":
        if "nemo" not in dialects:
            dialects = nemo_dialects(fused=_gated(config), plus_one=False)
        values = core_t5.nemo_names(values, str(path))
        return LearnedAdapter(path, values, [dialects], ties=True, notes=tuple(sorted(notes)))
    core = dialects if "mcore" in dialects else core_dialects(_gated(config), "mcore", False)
    split = ("mcore_split_attention", "mcore_split_gate")
    ways = [core, (*split, *core), *((part, *core) for part in split)]
    return LearnedAdapter(path, values, ways, settings.targets, True, tuple(sorted(notes)))


def _put(updates: dict[str, Update], name: str, value: Update, settings: PeftSettings) -> None:
    if name in updates:
        settings.problems.add(f"{name} was trained twice: as a whole, as one LoRA, or as several")
    updates[name] = value


def _gated(config: Any) -> bool:
    return bool(config.gated)


def _layers(
    adapter_tensors: Mapping[str, SourceTensor], settings: PeftSettings, config: Any
) -> dict[tuple[str, str | None], dict[str, SourceTensor]]:
    """Module and its part -> side -> tensor."""
    result: dict[tuple[str, str | None], dict[str, SourceTensor]] = {}
    for name, tensor in adapter_tensors.items():
        match = _PART.fullmatch(name)
        if match is None:
            settings.problems.add(f"{name} is not a part that is known")
            continue
        module, part, side = match["module"], match["part"], match["side"]
        if settings.tp_size > 1 and module.endswith("linear_fc1"):
            order = _order(name, tensor, (part, side), _gated(config), settings)
            tensor = _in_order(name, tensor, order, settings) if order else tensor
        if side == "linear_out" and len(tensor.pieces) == settings.tp_size:
            # Of what has several sections, each rank's rows of all of them lie together.
            shards = [SourceTensor.full(piece.values) for piece in tensor.pieces]
            tensor = concatenated_ranks(f"{module}.weight", shards, config) or tensor
        sides = result.setdefault((module, part), {})
        if side in sides:
            settings.problems.add(f"{side} of {module} is there twice", got=name)
        sides[side] = tensor
    return result


def _order(
    name: str,
    tensor: SourceTensor,
    key: tuple[str | None, str],
    gated: bool,
    settings: PeftSettings,
) -> tuple[int, int] | None:
    """Order in which the rows of `linear_fc1`'s tensor are stored; None for the normal order.

    The tools cut every rank's `linear_out` into a gate's and an up's half, and store the first
    halves of all ranks before the second ones: also what the canonical form has for one of the two
    alone, and, before Megatron Bridge 0.5.0, what a layer without a gate has. Magnitudes lie rank
    by rank, [gate, up] each.
    """
    tp_size, (part, side) = settings.tp_size, key
    if side == "weight_magnitude":
        return (tp_size, 2) if gated else None
    if side != "linear_out" or (gated and part is None):
        return None
    pieces = len(tensor.pieces)
    if part is None and pieces != 2 * tp_size:
        if pieces != tp_size:
            settings.problems.add(
                f"{name} does not show in which order its rows are",
                got=f"{pieces} pieces",
                choices=[f"{tp_size} pieces, one per rank", f"{2 * tp_size}, two per rank"],
            )
        return None
    return (2, tp_size)


def _in_order(
    name: str, tensor: SourceTensor, order: tuple[int, int], settings: PeftSettings
) -> SourceTensor:
    """The tensor with its blocks of rows, which are stored as a grid of this shape, transposed."""
    if not tensor.shape or tensor.shape[0] % (order[0] * order[1]):
        blocks = order[0] * order[1]
        settings.problems.add(f"{name} cannot be divided", got=tensor.shape, choices=[blocks])
        return tensor
    values = float32(tensor.read())
    rows = values.reshape(*order, -1, *values.shape[1:]).swapaxes(0, 1)
    return SourceTensor.full(rows.reshape(values.shape))


def _low_rank(
    module: str,
    sides: Mapping[str, SourceTensor],
    scale: float,
    settings: PeftSettings,
) -> LowRank | None:
    dora = str(settings.raw.get("_target_")).endswith("DoRA")
    expected = {"linear_in", "linear_out"} | ({"weight_magnitude"} if dora else set())
    if sides.keys() != expected:
        message = f"LoRA of {module} is not complete"
        settings.problems.add(message, got=sorted(sides), choices=sorted(expected))
        return None
    rank = sides["linear_in"].shape[:1]
    if rank != (settings.raw["dim"],):
        settings.problems.add(
            f"LoRA of {module} has another rank than dim says",
            got=rank,
            choices=[settings.raw["dim"]],
        )
    return LowRank(sides["linear_in"], sides["linear_out"], scale, sides.get("weight_magnitude"))


def _renamed(module: str, part: str | None) -> str:
    """The name that the dialects "mcore_split_*" have for a part of a fused layer."""
    if part is None:
        return module
    stem = module.rpartition(".")[0]
    return f"{stem}.linear_{part}" if part in _SPLIT else f"{module}_{part}"


def _joined(module: str, parts: Mapping[str, LowRank], settings: PeftSettings) -> LowRank | None:
    """Query's, key's and value's LoRA as one of the fused layer, of three times the rank: every
    rank of the training added its [queries, keys, values] to its rows."""
    if parts.keys() != set("qkv"):
        settings.problems.add(f"canonical LoRA of {module} is not complete", got=sorted(parts))
        return None
    tp_size = settings.tp_size
    ordered = [parts[name] for name in "qkv"]
    ups = [float32(part.up.read()) for part in ordered]
    if any(len(up) % tp_size for up in ups):
        settings.problems.add(f"LoRA of {module} cannot be divided", got=tp_size)
        return None
    rank = sum(up.shape[1] for up in ups)
    rows = []
    for number in range(tp_size):
        start = 0
        for up in ups:
            share = np.split(up, tp_size)[number]
            wide = np.zeros((len(share), rank), np.float32)
            wide[:, start : start + up.shape[1]] = share
            start += up.shape[1]
            rows.append(wide)
    down = np.concatenate([float32(part.down.read()) for part in ordered])
    up_matrix = SourceTensor.full(np.concatenate(rows))
    return LowRank(SourceTensor.full(down), up_matrix, ordered[0].scale)
