"""NeMo's checkpoints of adapters: prompt tables, IA3, bottleneck adapters and LoRA.

NeMo's checkpoints of adapters: prompt learning, IA3, adapters and LoRA, without a model.

NeMo 1.18 nests its parts (a dictionary of tensors per module, named `<layer>:<part>`); from 1.19
on they are flat, behind `adapter_layer`. Here both have the same names: those of the target for
IA3 and adapters, and for LoRA those of the weights it is for.

Prompt tables of NeMo's prompt learning: one [virtual tokens, hidden] per task.

NeMo fills the table when training ends. What it did not fill is computed here from the prompt
encoder where that is a pair of linear layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.formats import pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import section
from launcher_scripts.checkpoint.formats.source_tensor import (
    SourceTensor,
    concatenated,
    float32,
    widened,
)
from launcher_scripts.checkpoint.layout.source_checkpoint import flat_values, merged_stages, renamed
from launcher_scripts.checkpoint.sources.nemo_files import (
    distributed_tensors,
    rank_weight_files,
    read_nemo_config,
)
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models.adapters import ATTENTION_ADAPTER, FFN_ADAPTER

_PREFIX = re.compile(
    r"^(?:model\.(?!layers\.)(?:module\.)?(?:language_model\.)?)?(?:enc_dec_model\.)*"
)
_IGNORED = re.compile(r"(.+[./])?_extra_state(/.*)?|(.+\.)?(inv_freq|indices)")
_LAYER = re.compile(
    r"(?P<stack>(?P<side>encoder|decoder)\.(?P<t5>model\.)?layers\.\d+)\.(?P<rest>.+)"
)
_IA3 = re.compile(
    r"(?:(?P<module>self_attention|inter_attention|mlp)\.)?(?P<inter>inter_)?"
    r"(?P<kind>key|value|mlp)_infused_adapter\.scalers"
)
_ADAPTER = re.compile(r"adapter_(?P<number>[12])\.(?P<name>.+)")
_LORA = re.compile(
    r"(?P<module>self_attention|inter_attention|mlp)\.lora_(?P<kind>\w+)_adapter\."
    r"linear_(?P<side>in|out)\.weight"
)
# Of an adapter: NeMo's name -> the target's; the second kind is whole on every rank.
_LINEAR_ADAPTER = {
    "linear_in.weight": "DenseSiluDense.wi.weight",
    "linear_out.weight": "DenseSiluDense.wo.weight",
    "layer_norm.weight": "layer_norm.weight",
    "layer_norm.bias": "layer_norm.bias",
}
_FULL_ADAPTER = {
    "module.1.weight": "DenseSiluDense.wi.weight",
    "module.3.weight": "DenseSiluDense.wo.weight",
    "module.0.weight": "layer_norm.weight",
    "module.0.bias": "layer_norm.bias",
}
# (module, kind of LoRA) -> the weight it changes, classic and Megatron-LM core.
_LORA_TARGETS = {
    ("self_attention", "kqv"): ("query_key_value", "linear_qkv"),
    ("self_attention", "dense_attention"): ("dense", "linear_proj"),
    ("inter_attention", "dense_attention"): ("dense", None),
    ("inter_attention", "q"): ("query", None),
    ("inter_attention", "kv"): ("key_value", None),
    ("mlp", "hto4h"): ("dense_h_to_4h", "linear_fc1"),
    ("mlp", "4htoh"): ("dense_4h_to_h", "linear_fc2"),
}
# NeMo's cross attention has this part and never calls it.
_UNUSED_LORA = ("inter_attention", "kqv")

Shards = dict[str, tuple[SourceTensor, ...]]


@dataclass(frozen=True)
class PartFile:
    """One checkpoint of adapters, all names without prefixes.

    raw:      model_config.yaml
    family:   gpt or t5, None where the names do not tell (prompts of 1.18)
    ia3:      name of a vector's row, with its layer -> shards
    adapters: name of an adapter's row, with its layer -> shards
    loras:    name of a source weight -> {"in": shards, "out": shards}
    others:   what is none of these (prompt learning)
    notes:    what a user should know
    """

    path: Path
    raw: Mapping[str, Any]
    family: str | None = None
    ia3: Shards = field(default_factory=dict)
    adapters: Shards = field(default_factory=dict)
    loras: dict[str, dict[str, tuple[SourceTensor, ...]]] = field(default_factory=dict)
    others: Shards = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> set[str]:
        """Kinds of adapters in it: ia3, adapter, prompt."""
        by_kind = {"ia3": self.ia3, "adapter": self.adapters or self.loras, "prompt": self.others}
        return {kind for kind, tensors in by_kind.items() if tensors}


def read_parts(path: Path, scratch: Path | None = None) -> PartFile:
    """Open a `.nemo` file or an unpacked folder. scratch: see Archive.

    Raises CheckpointError when it is damaged, or is not a checkpoint of NeMo's.
    """
    archive = Archive(path, scratch)
    root, raw = read_nemo_config(archive)
    ranks = _read_ranks(archive, root)
    if len(ranks) > 1 and selects_layers(raw):
        # Stages count their layers from 0: only full stages tell where the next one begins.
        raise CheckpointError(
            f"{path} has parts for some layers only, and several pipeline stages; their layers "
            "cannot be told apart"
        )
    shards = merged_stages(ranks)
    for name, tensors in shards.items():
        for tensor in tensors:
            for piece in tensor.pieces:
                archive.check(piece.values, name)
    return _sorted(path, raw, shards)


def selects_layers(raw: Mapping[str, Any]) -> bool:
    """Return whether the parts were learned for some layers only (`layer_selection`)."""
    peft = section(raw, "peft")
    return any(section(peft, tuning).get("layer_selection") for tuning in peft)


def _read_ranks(archive: Archive, root: str) -> list[list[dict[str, SourceTensor]]]:
    """The flat state dicts, [pipeline stage][tensor-parallel rank]."""
    tensors = distributed_tensors(archive, root)
    if tensors is not None:
        return [[_named(tensors.items(), str(archive.path))]]
    ranks = []
    for names in rank_weight_files(archive, root):
        stage = []
        for name in names:
            origin = f"{name} of {archive.path}"
            loaded = torch_file.load_state(archive.region(name), origin)
            state = loaded.get("state_dict", loaded)
            pickles.check_readable(state, f"state_dict of {origin}")
            stage.append(
                _named(
                    (
                        (name, SourceTensor.full(values))
                        for name, values in torch_file.tensors_of(flat_values(state), origin)
                    ),
                    origin,
                )
            )
        ranks.append(stage)
    return ranks


def _named(tensors: Iterable[tuple[str, SourceTensor]], origin: str) -> dict[str, SourceTensor]:
    """Names as classic NeMo 1.18's, all parts of a name separated by dots.

    Raises CheckpointError for two tensors of one name.
    """
    named = (
        (name, _PREFIX.sub("", name.replace(":", ".")).replace("adapter_layer.", ""), tensor)
        for name, tensor in tensors
    )
    return renamed((item for item in named if not _IGNORED.fullmatch(item[1])), origin)


def _sorted(path: Path, raw: Mapping[str, Any], shards: Shards) -> PartFile:
    part = PartFile(path, raw)  # whose tables are filled here
    problems = Problems(f"the adapters {path}")
    families: set[str] = set()
    unused = 0
    for name, tensors in shards.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            part.others[name] = tensors
            continue
        families.add("t5" if match["t5"] else "gpt")
        used = _target(part, match, tensors, problems)
        unused += not used
    problems.raise_if_any(CheckpointError)
    notes: tuple[str, ...] = ()
    if unused:
        notes = (f"{path.name}: LoRA of cross-attention's query, key and value is never used",)
    if len(families) > 1:
        raise CheckpointError(f"{path} holds parts of a GPT and of a T5")
    return replace(part, family=families.pop() if families else None, notes=notes)


def _target(
    part: PartFile,
    layer: re.Match[str],
    tensors: tuple[SourceTensor, ...],
    problems: Problems,
) -> bool:
    """Put one tensor of a layer where it belongs; whether NeMo uses it at all."""
    suffix = layer["rest"]
    number = layer["stack"].rsplit(".", 1)[1]
    t5 = bool(layer["t5"])
    target = f"{layer['side']}.block.{number}" if t5 else f"layers.{number}"
    ia3, adapter, lora = (pattern.fullmatch(suffix) for pattern in (_IA3, _ADAPTER, _LORA))
    if ia3:
        name = _t5_ia3(layer["side"], ia3) if t5 else _gpt_ia3(ia3)
        _put(part.ia3, f"{target}.{name}", tensors, suffix, problems)
        return True
    if adapter:
        stem = f"{target}.{ATTENTION_ADAPTER if adapter['number'] == '1' else FFN_ADAPTER}"
        for table, parts in ((_LINEAR_ADAPTER, tensors), (_FULL_ADAPTER, tensors[:1])):
            if adapter["name"] in table:
                name = f"{stem}.{table[adapter['name']]}"
                _put(part.adapters, name, parts, suffix, problems)
                return True
    if lora:
        location = (lora["module"], lora["kind"])
        if location == _UNUSED_LORA:
            return False
        if location in _LORA_TARGETS:
            # Classic GPTs have their layers below `encoder`.
            core = layer["side"] == "decoder" and not t5
            linear = _LORA_TARGETS[location][1 if core else 0]
            weight = f"{layer['stack']}.{lora['module']}.{linear}.weight"
            _put(part.loras.setdefault(weight, {}), lora["side"], tensors, suffix, problems)
            return True
    problems.add(f"{layer.string} is not a part that is known")
    return True


def _gpt_ia3(match: re.Match[str]) -> str:
    if match["kind"] == "mlp":
        return "mlp.ia3.weight"
    return f"attention.{match['kind'][0]}.ia3.weight"


def _put(
    table: Shards, name: str, tensors: tuple[SourceTensor, ...], source: str, problems: Problems
) -> None:
    """Put a tensor into a table under a new name, which it must not share with another."""
    if name in table:
        problems.add(f"{source} and another tensor of its layer are both {name}")
    table[name] = tensors


def _t5_ia3(side: str, match: re.Match[str]) -> str:
    if match["kind"] == "mlp":
        return f"layer.{1 if side == 'encoder' else 2}.DenseReluDense.ia3.weight"
    cross = match["inter"] or match["module"] == "inter_attention"
    attention = "layer.1.EncDecAttention" if cross else "layer.0.SelfAttention"
    return f"{attention}.{match['kind'][0]}.ia3.weight"


_TABLE = re.compile(r"(?:prompt_table\.)+(?P<task>.+)\.prompt_embeddings\.weight")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# The encoder's tensors by their last names; what leads to them differs between releases.
_ENCODER = re.compile(
    r"(?:prompt_encoder\.)?(?:embeddings?|mlp_head|lstm_head|tpmlp|ptuning_adapter)\b.*"
)
_CLASSIC = ("mlp_head.0", "mlp_head.2")
_PARALLEL = re.compile(r"(?P<stem>(?:.+\.)?)first\.weight")


def read_tables(part: PartFile, number: int) -> dict[str, SourceTensor]:
    """Task -> its table, in the order of the checkpoint's task templates.

    number: how many tasks come before, for those without a name
    Raises CheckpointError for what is not filled and cannot be computed, and for unknown tensors.
    """
    problems = Problems(f"the prompts {part.path}")
    tables: dict[str, SourceTensor] = {}
    for name, shards in part.others.items():
        match = _TABLE.fullmatch(name)
        if match:
            tables[match["task"]] = shards[0]
        elif not _ENCODER.fullmatch(name):
            problems.add(f"{name} is not a part of prompt learning")
    if any("ptuning_adapter." in name for name in part.others):
        _compute(part, f"task_{number}", tables, problems)
    templates = _templates(part.raw)
    empty = [
        task for task in templates if task not in tables or not widened(tables[task].read()).any()
    ]
    if len(empty) == 1 and empty[0] in _new_tasks(part.raw, empty):
        _compute(part, empty[0], tables, problems)
    elif empty:
        problems.add(
            "no prompt table is filled for these tasks; let NeMo finish their training, which "
            "fills it",
            got=empty,
        )
    _check(tables, templates, problems)
    problems.raise_if_any(CheckpointError)
    return {task: tables[task] for task in dict.fromkeys([*templates, *tables])}


def _new_tasks(raw: Mapping[str, Any], default: list[str]) -> list[Any]:
    names = raw.get("new_tasks")
    return names if isinstance(names, list) and names else default


def _templates(raw: Mapping[str, Any]) -> dict[str, int]:
    """Task -> its virtual tokens, as the configuration has them."""
    templates = raw.get("task_templates") or ()
    try:
        return {
            str(template["taskname"]): int(template["total_virtual_tokens"])
            for template in templates
            if template.get("total_virtual_tokens")
        }
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(
            problem("task_templates of the prompts are damaged", got=templates)
        ) from error


def _check(
    tables: Mapping[str, SourceTensor], templates: Mapping[str, int], problems: Problems
) -> None:
    for task, table in tables.items():
        if not _NAME.fullmatch(task):
            problems.add("a task's name cannot be part of a file's name", got=task)
        if task in templates and table.shape[:1] != (templates[task],):
            problems.add(
                f"the table of {task} has another length than its template says",
                got=table.shape[0] if table.shape else 0,
                choices=[templates[task]],
            )


def _compute(
    part: PartFile, task: str, tables: dict[str, SourceTensor], problems: Problems
) -> None:
    """Add the encoder's output as the table of `task`, in float32."""
    try:
        values = _encoded(part)
    except (KeyError, ValueError, CheckpointError) as error:
        problems.add(f"the prompt encoder is damaged: {error}")
        return
    if values is None:
        problems.add(
            f"the prompt table of {task} is not filled and cannot be computed from this encoder; "
            "let NeMo finish the training, which fills it",
            got=sorted(part.others)[:3],
            choices=["a filled prompt_table", "an mlp or tpmlp encoder"],
        )
        return
    tables[task] = SourceTensor.full(np.ascontiguousarray(values, np.float32))


def _encoded(part: PartFile) -> Any:
    """[virtual tokens, hidden]; None for an encoder that is not a pair of linear layers."""
    tables = part.others
    parallel = next(filter(None, map(_PARALLEL.fullmatch, tables)), None)
    embeddings = next(
        (
            shards[0]
            for name, shards in tables.items()
            if re.search(r"embeddings?\.weight$", name) and not _TABLE.fullmatch(name)
        ),
        None,
    )
    recurrent = any("lstm_head" in name for name in tables)
    if embeddings is None or recurrent or not (parallel or f"{_CLASSIC[0]}.weight" in tables):
        return None
    values = float32(embeddings.read())
    if parallel:
        # Ranks share the inner axis.
        first, second = f"{parallel['stem']}first", f"{parallel['stem']}second"
        weight, bias = _joined(tables, f"{first}.weight"), _joined(tables, f"{first}.bias")
        inner = _gelu(_linear(values, weight, bias))
        second_weight = _joined(tables, f"{second}.weight", axis=1)
        return _linear(inner, second_weight, _full(tables, f"{second}.bias"))
    first, second = _CLASSIC
    inner = _linear(values, *(_full(tables, f"{first}.{kind}") for kind in ("weight", "bias")))
    weight, bias = (_full(tables, f"{second}.{kind}") for kind in ("weight", "bias"))
    return _linear(np.maximum(inner, 0), weight, bias)


def _linear(values: Any, weight: Any, bias: Any) -> Any:
    """values @ weight.T + bias. Raises ValueError for a bias that is not one number per output."""
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of shape {bias.shape} for a weight of shape {weight.shape}")
    return values @ weight.T + bias


def _full(tables: Mapping[str, tuple[SourceTensor, ...]], name: str) -> Any:
    """A tensor that every rank holds."""
    return float32(tables[name][0].read())


def _joined(tables: Mapping[str, tuple[SourceTensor, ...]], name: str, axis: int = 0) -> Any:
    """A tensor that the ranks share."""
    return float32(concatenated(tables[name], axis).read())


def _gelu(x: Any) -> Any:
    """The tanh form, which NeMo's fused kernel computes."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
