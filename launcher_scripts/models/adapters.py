"""Parameter-efficient tuning of a finished model: prompt tables, IA3 vectors, bottleneck adapters,
LoRA.

Their rows are added to the weight table of the family. File names and shapes are those of
FasterTransformer's T5; a GPT takes the same below its own layer names, since FasterTransformer's
GPT has no IA3 and other adapters. LoRA leaves no rows where it is merged into the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems, problem
from launcher_scripts.models import mixers
from launcher_scripts.models.family import ModelConfig, Partition, Source, WeightSpec, stack_layers

# The dialect of the rows below.
DIALECT = "adapters"
NORM_POSITIONS = ("pre", "post")
ADAPTER_NORM_EPS = 1e-5
ATTENTION_ADAPTER, FFN_ADAPTER = "after_attention_adapter", "after_ffn_adapter"


@dataclass(frozen=True)
class PromptTask:
    """A prompt table: the task's name and how many virtual tokens it has."""

    name: str
    length: int


# Every one is a checkpoint that was trained.
MAX_TASKS = 1 << 16


@dataclass(frozen=True)
class LoRATarget:
    """A projection of a GPT's layers that LoRA may be learned for, W [inputs, outputs].

    stem:   its name within a layer;  inputs, outputs: sizes, attributes of the config
    blocks: sizes of the blocks of the outputs where there are several, each with a matrix A of its
            own
    """

    stem: str
    inputs: str
    outputs: str
    partition: Partition
    blocks: tuple[str, ...] = ()


LORA_TARGETS = {
    target.stem: target
    for target in (
        LoRATarget(
            "attention.query_key_value",
            "hidden_size",
            "qkv_size",
            Partition.COLUMN_PARALLEL,
            ("q_size", "kv_size", "kv_size"),
        ),
        LoRATarget("attention.query", "hidden_size", "q_size", Partition.COLUMN_PARALLEL),
        LoRATarget("attention.query_down", "hidden_size", "q_lora_rank", Partition.REPLICATED),
        LoRATarget("attention.query_up", "q_lora_rank", "q_size", Partition.COLUMN_PARALLEL),
        LoRATarget("attention.kv_down", "hidden_size", "kv_down_size", Partition.REPLICATED),
        LoRATarget("attention.kv_up", "kv_lora_rank", "kv_up_size", Partition.COLUMN_PARALLEL),
        LoRATarget("attention.gate", "hidden_size", "q_size", Partition.COLUMN_PARALLEL),
        LoRATarget("attention.dense", "attended_size", "hidden_size", Partition.ROW_PARALLEL),
        LoRATarget(
            "mamba.in_proj",
            "hidden_size",
            "mamba_in_size",
            Partition.COLUMN_PARALLEL,
            mixers.MAMBA_IN,
        ),
        LoRATarget("mamba.out_proj", "mamba_inner_size", "hidden_size", Partition.ROW_PARALLEL),
        LoRATarget(
            "delta.in_proj",
            "hidden_size",
            "delta_in_size",
            Partition.COLUMN_PARALLEL,
            mixers.DELTA_IN,
        ),
        LoRATarget("delta.out_proj", "delta_value_size", "hidden_size", Partition.ROW_PARALLEL),
        LoRATarget(
            "kimi_delta.in_proj",
            "hidden_size",
            "kimi_in_size",
            Partition.COLUMN_PARALLEL,
            mixers.KIMI_IN,
        ),
        *(
            LoRATarget(f"kimi_delta.{name}", inputs, outputs, partition)
            for name, inputs, outputs, partition in (
                ("decay_down", "hidden_size", "delta_key_head_size", Partition.REPLICATED),
                ("gate_down", "hidden_size", "delta_key_head_size", Partition.REPLICATED),
                ("decay_up", "delta_key_head_size", "delta_key_size", Partition.COLUMN_PARALLEL),
                ("gate_up", "delta_key_head_size", "delta_value_size", Partition.COLUMN_PARALLEL),
                ("out_proj", "delta_value_size", "hidden_size", Partition.ROW_PARALLEL),
            )
        ),
        LoRATarget(
            "short_conv.in_proj",
            "hidden_size",
            "short_conv_in_size",
            Partition.COLUMN_PARALLEL,
            mixers.SHORT_CONV_IN,
        ),
        LoRATarget("short_conv.out_proj", "hidden_size", "hidden_size", Partition.ROW_PARALLEL),
        LoRATarget("mlp.dense_h_to_4h", "hidden_size", "ffn_size", Partition.COLUMN_PARALLEL),
        LoRATarget("mlp.dense_h_to_4h_2", "hidden_size", "ffn_size", Partition.COLUMN_PARALLEL),
        LoRATarget("mlp.dense_4h_to_h", "ffn_size", "hidden_size", Partition.ROW_PARALLEL),
    )
}
MAX_LORAS_KEY = "export.triton_deployment.max_loras"
LORA_FIELDS = ("lora_names", "lora_targets")  # of Adapters, with lora_rank
_LORA_FILE = re.compile(r"\.lora_(in|out)\.weight(\.\d+)?\.bin")
LORA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class LoRASlots:
    """Memory of a running model for LoRA adapters, each of which takes one slot.

    rank:    the largest that fits;  targets: stems of the projections that they may have
    """

    count: int
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Adapters:
    """Adapters of a checkpoint.

    prompt_start_id:       token ids from here on are rows of a task's prompt table
    ia3_num_tasks:         rows of every IA3 vector
    ia3_adapted:           IA3 is folded into the weights
    adapter_size:          width of the adapters' bottleneck, 0 without adapters
    adapter_norm_position: the adapter's layer norm is before or after its bottleneck
    lora_names:            LoRA adapters of which each request chooses one
    lora_rank:             the largest rank of theirs; smaller ones are filled up with zeros
    lora_targets:          stems of the projections that any of them has, of LORA_TARGETS
    lora_slots:            of a running model that more adapters can be added to: slots for all

    An adapter is given the output of self-attention or MLP, before its bias and the residual, and
    is added to it; it is silu(norm(x) @ wi) @ wo.
    """

    prompt_tasks: tuple[PromptTask, ...] = ()
    prompt_start_id: int = 0
    ia3_num_tasks: int = 0
    ia3_adapted: bool = False
    adapter_size: int = 0
    adapter_norm_position: str = "pre"
    lora_names: tuple[str, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    # Not of the exported files, which are identified by the other fields.
    lora_slots: LoRASlots | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_lora()
        if not 0 <= self.ia3_num_tasks <= MAX_TASKS:
            raise CheckpointError(
                problem(
                    "ia3_num_tasks is out of range",
                    got=self.ia3_num_tasks,
                    choices=[f"0-{MAX_TASKS}"],
                )
            )
        if self.adapter_norm_position not in NORM_POSITIONS:
            raise CheckpointError(
                problem(
                    "unknown adapter_norm_position",
                    got=self.adapter_norm_position,
                    choices=NORM_POSITIONS,
                )
            )

    def _check_lora(self) -> None:
        problems = Problems("the LoRA adapters")
        for name in self.lora_names:
            if not LORA_NAME.fullmatch(name):
                text = "a name may have letters, digits, dots, - and _"
                problems.add(text, got=name, change="the name of its folder")
        if len(set(self.lora_names)) < len(self.lora_names):
            problems.add("two adapters have one name", got=self.lora_names)
        if unknown := sorted(set(self.lora_targets) - LORA_TARGETS.keys()):
            problems.add("unknown lora_targets", got=unknown, choices=LORA_TARGETS)
        if self.lora_names and self.lora_rank < 1:
            problems.add("lora_rank must be at least 1", got=self.lora_rank)
        problems.raise_if_any(CheckpointError)

    @property
    def loras(self) -> LoRASlots:
        """Slots of the LoRA adapters, those that hold none yet included."""
        stored = LoRASlots(len(self.lora_names), self.lora_rank, self.lora_targets)
        return self.lora_slots or stored

    @property
    def names(self) -> list[str]:
        """Names of the adapters that change how the model computes."""
        names_present = {
            "prompt tables": self.prompt_tasks,
            "IA3 vectors": self.ia3_num_tasks,
            "adapters": self.adapter_size,
            "LoRA": self.lora_names,
        }
        return [name for name, value in names_present.items() if value]


NO_ADAPTERS = Adapters()


def adapters_of(config: object) -> Adapters:
    """The adapters of a model of any family."""
    parts: Adapters = getattr(config, "parts", NO_ADAPTERS)
    return parts


def _merges_mlps(config: Any) -> bool:
    """True if LoRA of the MLPs can only be merged."""
    return any(getattr(config, name, None) for name in ("num_experts", "layer_sparsities"))


def with_lora_slots(config: Any, rows: Iterable[WeightSpec], count: int, rank: int) -> Any:
    """The config of a running model to which `count` LoRA adapters of at most `rank` can be added.

    rows: of its weights
    Raises ConfigError for a model whose LoRA can only be merged.
    """
    parts, names = adapters_of(config), {spec.name for spec in rows}
    targets = tuple(
        stem
        for stem in LORA_TARGETS
        if f"layers.*.{stem}.weight" in names
        and not (stem.startswith("mlp.") and _merges_mlps(config))
    )
    if not targets:
        text = "LoRA of this model can only be merged into its weights: none can be added"
        raise ConfigError(problem(text, got=count, choices=[0], change=MAX_LORAS_KEY))
    slots = LoRASlots(len(parts.lora_names) + count, max(parts.lora_rank, rank), targets)
    return replace(config, parts=replace(parts, lora_slots=slots))


class AdapterSizes(ModelConfig):
    """Axes of the rows below, for a config with a field `parts`."""

    parts: Adapters

    @property
    def ia3_num_tasks(self) -> int:
        return self.parts.ia3_num_tasks

    @property
    def adapter_size(self) -> int:
        return self.parts.adapter_size

    @property
    def lora_size(self) -> int:
        """The ranks of all LoRA adapters."""
        return len(self.parts.lora_names) * self.parts.lora_rank

    @property
    def lora_size_of_3(self) -> int:
        """The same where each of so many blocks has a matrix A of its own."""
        return 3 * self.lora_size

    @property
    def lora_size_of_4(self) -> int:
        return 4 * self.lora_size

    @property
    def lora_size_of_5(self) -> int:
        return 5 * self.lora_size

    @property
    def lora_size_of_6(self) -> int:
        return 6 * self.lora_size


@dataclass(frozen=True)
class IA3Site:
    """A vector per layer that scales keys, values or the MLP's inner activations.

    name:   the vector's row, `*` for the layer
    axis:   its size, an attribute of the config
    target: stem of the linear layer it can be folded into
    block:  which block of the target's columns it scales; None: the rows of its weight
    """

    name: str
    axis: str
    target: str
    block: int | None


def ia3_sites(family: str, decoder: bool = True) -> tuple[IA3Site, ...]:
    """Every place of IA3 in one layer of each stack. decoder: whether there is one."""
    if family == "gpt":
        attention, mlp = "layers.*.attention", "layers.*.mlp"
        return (
            IA3Site(f"{attention}.k.ia3.weight", "kv_size", f"{attention}.query_key_value", 1),
            IA3Site(f"{attention}.v.ia3.weight", "kv_size", f"{attention}.query_key_value", 2),
            IA3Site(f"{mlp}.ia3.weight", "ffn_size", f"{mlp}.dense_4h_to_h", None),
        )
    self_attention, layers = "layer.0.SelfAttention", "encoder.block.*"
    sites = [
        *_t5_keys_and_values(f"{layers}.{self_attention}", fused=False),
        _t5_mlp(f"{layers}.layer.1.DenseReluDense"),
    ]
    if decoder:
        layers = "decoder.block.*"
        sites += [
            *_t5_keys_and_values(f"{layers}.{self_attention}", fused=True),
            *_t5_keys_and_values(f"{layers}.layer.1.EncDecAttention", fused=False),
            _t5_mlp(f"{layers}.layer.2.DenseReluDense"),
        ]
    return tuple(sites)


def adapter_stems(family: str, decoder: bool = True) -> tuple[str, ...]:
    """Names of the adapters in one layer of each stack."""
    stacks = ["layers.*"]
    if family != "gpt":
        stacks = ["encoder.block.*", "decoder.block.*"] if decoder else ["encoder.block.*"]
    return tuple(f"{stack}.{name}" for stack in stacks for name in (ATTENTION_ADAPTER, FFN_ADAPTER))


def weights(family: str, parts: Adapters, decoder: bool = True) -> list[WeightSpec]:
    """The rows of `parts`, to be added to the family's."""
    prefix = "model." if family == "gpt" else ""
    specs = [
        WeightSpec(
            f"prompt_table.{task.name}.weight",
            (str(task.length), "hidden_size"),
            sources=_sources((f"prompt_table.{task.name}.weight",), "as_is"),
            prefix="model.",
        )
        for task in parts.prompt_tasks
    ]
    if parts.ia3_num_tasks:
        specs += [
            WeightSpec(
                site.name,
                ("ia3_num_tasks", site.axis),
                Partition.COLUMN_PARALLEL,
                (site.axis,) if site.axis == "kv_size" else (),
                _sources(ia3_keys(site, parts.ia3_num_tasks), "stacked_rows"),
                layers=stack_layers(site.name),
                prefix=prefix,
            )
            for site in ia3_sites(family, decoder)
        ]
    if parts.adapter_size:
        for stem in adapter_stems(family, decoder):
            specs += _adapter(stem, prefix)
    if parts.lora_names:
        specs += [spec for stem in parts.lora_targets for spec in _lora(LORA_TARGETS[stem])]
    return specs


def beside(learned: Iterable[WeightSpec], rows: Iterable[WeightSpec]) -> list[WeightSpec]:
    """The learned rows that belong to a model with these: LoRA of projections that it has, in the
    layers that have them.
    """
    bases = {spec.name: spec for spec in rows}
    result = []
    for spec in learned:
        stem, _, inside = spec.name.partition(".lora_")
        base = bases.get(f"{stem}.weight")
        if not inside:
            result.append(spec)
        elif base is not None:
            result.append(replace(spec, kinds=base.kinds, only=base.only))
    return result


def is_lora_file(name: str) -> bool:
    """True if a file of an export holds LoRA adapters that requests choose."""
    return _LORA_FILE.search(name) is not None


def ia3_keys(site: IA3Site, tasks: int) -> tuple[str, ...]:
    """The names under which the vectors of all tasks are found."""
    return tuple(f"{task}:{site.name}" for task in range(tasks))


def _adapter(stem: str, prefix: str) -> list[WeightSpec]:
    rows: Iterable[tuple[str, tuple[str, ...], Partition]] = (
        ("layer_norm.weight", ("hidden_size",), Partition.REPLICATED),
        ("layer_norm.bias", ("hidden_size",), Partition.REPLICATED),
        ("DenseSiluDense.wi.weight", ("hidden_size", "adapter_size"), Partition.COLUMN_PARALLEL),
        ("DenseSiluDense.wo.weight", ("adapter_size", "hidden_size"), Partition.ROW_PARALLEL),
    )
    return [
        WeightSpec(
            f"{stem}.{name}",
            shape,
            partition,
            sources=_sources((f"{stem}.{name}",), "transposed"),
            layers=stack_layers(stem),
            prefix=prefix,
        )
        for name, shape, partition in rows
    ]


def _lora(target: LoRATarget) -> list[WeightSpec]:
    """A as [inputs, adapters x blocks x rank] and B, times its scale, as [adapters x rank,
    outputs]. Ranks share what they share of W.
    """
    stem, replicated = f"layers.*.{target.stem}", Partition.REPLICATED
    columns = target.partition is Partition.COLUMN_PARALLEL
    size = f"lora_size_of_{len(target.blocks)}" if target.blocks else "lora_size"
    rows: Iterable[tuple[str, tuple[str, ...], Partition, tuple[str, ...]]] = (
        (
            f"{stem}.lora_in.weight",
            (target.inputs, size),
            replicated if columns else target.partition,
            (),
        ),
        (
            f"{stem}.lora_out.weight",
            ("lora_size", target.outputs),
            target.partition if columns else replicated,
            target.blocks,
        ),
    )
    return [
        WeightSpec(name, shape, partition, blocks, _sources((name,), "as_is"))
        for name, shape, partition, blocks in rows
    ]


def _t5_keys_and_values(attention: str, *, fused: bool) -> list[IA3Site]:
    """fused: query, key and value are columns of one matrix."""
    return [
        IA3Site(
            f"{attention}.{part}.ia3.weight",
            "inner_size",
            f"{attention}.qkv" if fused else f"{attention}.{part}",
            block if fused else 0,
        )
        for part, block in (("k", 1), ("v", 2))
    ]


def _t5_mlp(stem: str) -> IA3Site:
    return IA3Site(f"{stem}.ia3.weight", "ffn_size", f"{stem}.wo", None)


def _sources(keys: tuple[str, ...], layout: str) -> dict[str, Source]:
    return {DIALECT: Source(keys, layout)}
