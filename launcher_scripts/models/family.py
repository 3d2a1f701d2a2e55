"""Model families as data: hyperparameters and one row per weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.common.parallelism import Parallelism, divisors

NORMALIZATIONS = ("layernorm", "rmsnorm")
# Those of the FasterTransformer forks that serve BART and Agm, and all.
FORK_ACTIVATIONS = ("gelu", "gelu_erf", "relu", "silu")
ACTIVATIONS = (*FORK_ACTIVATIONS, "squared_relu", "clamped_swiglu")
# With parameters of its own in every layer (arXiv:2411.13010).
XIELU = "xielu"
# What a hyperparameter that is not a whole number may be, so that float32 holds it and its inverse.
REALS = (1e-30, 1e30)
REAL_RANGES = dict.fromkeys(("norm_eps", "mixer_norm_eps", "latent_norm_eps"), (1e-30, 1.0))
LAYER_LISTS = (
    "full_attention_layers",
    "unrotated_layers",
    "dense_layers",
    "qk_norm_layers",
    "sink_layers",
)
LAYER_VALUES = (
    *("rotary_layer_bases", "layer_branches", "layer_num_kv_heads", "layer_head_sizes"),
    *("layer_ffn_sizes", "layer_sparsities"),
)  # one for each layer
Number = TypeVar("Number", int, float)
Sizes = TypeVar("Sizes", bound="ModelConfig")
# The kinds of a layer's residual branches: those that mix tokens, and those of each token alone.
MIXERS = ("attention", "mamba2", "gated_delta", "kimi_delta", "short_conv", "linear")
BRANCHES = (*MIXERS, "mlp", "moe", "linear_mlp")
# Of these, the kinds that keep a state of each row which does not grow.
RECURRENT_KINDS = ("mamba2", "gated_delta", "kimi_delta", "short_conv")
_SIZES = ("vocab_size", "num_layers", "hidden_size", "num_heads", "ffn_size")


class Partition(str, Enum):
    """How tensor-parallel ranks share a weight (Megatron's words). Weights are stored [in, out].

    COLUMN_PARALLEL splits the last axis and ROW_PARALLEL the first, in one file per rank.
    VOCAB_PARALLEL tables are whole on disk and split by the engine when it loads them.
    """

    COLUMN_PARALLEL = "column_parallel"
    ROW_PARALLEL = "row_parallel"
    VOCAB_PARALLEL = "vocab_parallel"
    REPLICATED = "replicated"

    @property
    def per_rank(self) -> bool:
        """Return whether every tensor-parallel rank has a file of its own."""
        return self in (Partition.COLUMN_PARALLEL, Partition.ROW_PARALLEL)


@dataclass(frozen=True)
class Source:
    """Source of a weight in one source dialect.

    `keys` name the source tensors (`*` stands for the layer number); `layout` names the function
    of checkpoint/layout/layouts.py that turns them into the stored form. Several rows may read
    one key.
    """

    keys: tuple[str, ...]
    layout: str = "as_is"


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of a family.

    name:       canonical name and target file stem, `*` for the layer number
    shape:      axis sizes as names of ModelConfig attributes, whole (not per rank), or numbers
    partition:  how ranks share it
    blocks:     sizes (attribute names) of the blocks that make up a COLUMN_PARALLEL last axis,
                each of which is split separately (query | key | value)
    sources:    dialect -> Source
    layers:     the attribute that says how many layers the `*` of the name counts
    kinds:      only layers with a branch of one of these kinds have it; none: all
    only:       the method of ModelConfig that says whether a layer has it, if not all have
    prefix:     what the file name starts with, before the canonical name
    required:   whether a checkpoint without it is incomplete
    """

    name: str
    shape: tuple[str, ...]
    partition: Partition = Partition.REPLICATED
    blocks: tuple[str, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    layers: str = "num_layers"
    kinds: tuple[str, ...] = ()
    only: str = ""
    prefix: str = "model."
    required: bool = True

    @property
    def per_layer(self) -> bool:
        return "*" in self.name

    def layer_numbers(self, config: ModelConfig) -> list[int] | list[None]:
        """The layers that have this tensor; [None] for one outside of the layers."""
        if not self.per_layer:
            return [None]
        layers: Iterable[int] = range(getattr(config, self.layers))
        if self.only:
            layers = filter(getattr(config, self.only), layers)
        if not self.kinds:
            return list(layers)
        return [n for n in layers if any(config.has_branch(n, kind) for kind in self.kinds)]

    def shape_on(self, config: ModelConfig, tp_size: int) -> tuple[int, ...]:
        """Shape of one file: the whole tensor, or one rank's part where ranks have their own."""
        sizes = [int(axis) if axis.isdigit() else int(getattr(config, axis)) for axis in self.shape]
        if self.partition is Partition.COLUMN_PARALLEL:
            sizes[-1] = config.local_size(self.shape[-1], tp_size)
        elif self.partition is Partition.ROW_PARALLEL:
            sizes[0] = config.local_size(self.shape[0], tp_size)
        return tuple(sizes)

    def tp_ranks(self, tp_size: int) -> range:
        """The ranks that have a file of their own; the first alone where all read one file."""
        return range(tp_size if self.partition.per_rank else 1)

    def file_name(self, layer: int | None, tp_rank: int) -> str:
        """Name of the file that holds this tensor, or one rank's part of it."""
        rank = f".{tp_rank}" if self.partition.per_rank else ""
        return f"{self.prefix}{self.tensor_name(layer)}{rank}.bin"

    def tensor_name(self, layer: int | None = None) -> str:
        """The canonical name of one tensor: `*` replaced by the global layer number."""
        return self.name if layer is None else self.name.replace("*", str(layer))


def stack_layers(name: str) -> str:
    """WeightSpec.layers of a tensor of an encoder-decoder, by its name."""
    return "num_decoder_layers" if name.startswith("decoder.") else "num_layers"


def layer_list(layers: Iterable[int]) -> str | None:
    """The text by which a configuration names layers: numbers with commas between them."""
    return ",".join(map(str, layers)) or None


def branches_text(layers: Iterable[Sequence[Sequence[str]]]) -> str:
    """layer_branches of layers with such branches."""
    return ",".join("/".join("+".join(both) for both in layer) or "none" for layer in layers)


def numbers_in(
    problems: Problems, name: str, text: str | None, kind: Callable[[str], Number]
) -> list[Number]:
    """The numbers of a text with commas between them."""
    try:
        return [kind(part) for part in (text or "").split(",") if part]
    except ValueError:
        problems.add(f"{name} must be numbers with commas between them", got=text)
        return []


def _lists(numbers: str | None, layer: int) -> bool:
    """Return whether such a text has a layer."""
    return str(layer) in (numbers or "").split(",")


class ModelConfig(ABC):
    """Hyperparameters every family has, in the project's own words; a frozen dataclass.

    Making one raises CheckpointError with everything that no model of the family can have.
    title: what texts call the family
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    title: ClassVar[str]

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    position_embedding: str
    normalization: str
    norm_eps: float
    start_id: int
    end_id: int
    pad_id: int | None
    sliding_window: int | None = None
    full_attention_layers: str | None = None
    unrotated_layers: str | None = None
    num_experts: int | None = None
    dense_layers: str | None = None
    layer_branches: str | None = None
    parallel_residual: bool | None = None
    qk_norm_layers: str | None = None
    sink_layers: str | None = None

    def __post_init__(self) -> None:
        problems = Problems(f"the {self.title} hyperparameters")
        self.check_fields(problems, _SIZES, {})
        self._check_branches(problems)
        self.check(problems)
        self._check_layers(problems)
        _check_numbers(problems, self)
        problems.raise_if_any(CheckpointError)

    @abstractmethod
    def check(self, problems: Problems) -> None:
        """Note what no model of the family can have, besides what is checked of all families."""

    def _check_layers(self, problems: Problems) -> None:
        """Note lists of layers that name others, and a window of no tokens."""
        for name in LAYER_LISTS:
            for layer in numbers_in(problems, name, getattr(self, name), int):
                if not self.may_list(layer):
                    problems.add(
                        f"{name} names a layer that is not there",
                        got=layer,
                        choices=(f"0-{self.num_layers - 1}",),
                    )
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.add("sliding_window must be at least 1", got=self.sliding_window)

    def _check_branches(self, problems: Problems) -> None:
        """Note branches of unknown kinds, and of another number of layers."""
        if self.layer_branches is None:
            return
        layers = self._layer_branches
        if len(layers) != self.num_layers:
            problems.add(
                "layer_branches must name the branches of every layer",
                got=len(layers),
                choices=(self.num_layers,),
            )
        for kind in sorted(self.branch_kinds):
            problems.check_choice("layer_branches", kind, BRANCHES)
        if any(len(both) > 2 for layer in layers for both in layer):
            problems.add("layer_branches has more than two branches side by side")

    def may_list(self, layer: int) -> bool:
        """Return whether a list of layers may name it."""
        return 0 <= layer < self.num_layers

    def window(self, layer: int) -> int:
        """How many tokens attention of a layer covers, the token's own included; 0: all."""
        return 0 if _lists(self.full_attention_layers, layer) else self.sliding_window or 0

    def rotates(self, layer: int) -> bool:
        """Whether rotary positions turn a layer's queries and keys, if the model has them."""
        return not _lists(self.unrotated_layers, layer)

    def branches(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """The kinds of a layer's residual branches, one after the other; those of one entry read
        the same hidden states.
        """
        if self.layer_branches is not None:
            return self._layer_branches[layer]
        dense = self.num_experts is None or _lists(self.dense_layers, layer)
        both = ("attention", "mlp" if dense else "moe")
        return (both,) if self.parallel_residual else tuple((kind,) for kind in both)

    @cached_property
    def _layer_branches(self) -> list[tuple[tuple[str, ...], ...]]:
        """layer_branches, layer by layer."""
        return [
            tuple(tuple(both.split("+")) for both in layer.split("/") if both != "none")
            for layer in (self.layer_branches or "").split(",")
        ]

    @cached_property
    def branch_kinds(self) -> frozenset[str]:
        """The kinds of all layers' branches; a harmful file may name a billion layers."""
        if self.layer_branches is not None:
            return frozenset(
                kind for layer in self._layer_branches for both in layer for kind in both
            )
        dense = len(self.dense_layers.split(",")) if self.dense_layers else 0
        kinds = ["mlp"] * (self.num_experts is None or dense > 0)
        kinds += ["moe"] * (self.num_experts is not None and dense < self.num_layers)
        return frozenset(("attention", *kinds))

    @property
    def has_row_states(self) -> bool:
        """Return whether rows have states of a fixed size, besides what is kept of each token."""
        return not self.branch_kinds.isdisjoint(RECURRENT_KINDS)

    def has_branch(self, layer: int, kind: str) -> bool:
        """Return whether a layer has a branch of a kind of BRANCHES."""
        return any(kind in both for both in self.branches(layer))

    def normalizes_heads(self, layer: int) -> bool:
        """True if a layer normalizes queries and keys, if the model does."""
        return self.qk_norm_layers is None or _lists(self.qk_norm_layers, layer)

    def has_sinks(self, layer: int) -> bool:
        """True if a layer's heads have sinks, if the model's do."""
        return self.sink_layers is None or _lists(self.sink_layers, layer)

    def layer_kind(self, layer: int) -> tuple[Any, ...]:
        """Values that are the same for layers that compute the same."""
        return (
            self.window(layer) > 0,
            self.rotates(layer),
            self.branches(layer),
            self.normalizes_heads(layer),
            self.has_sinks(layer),
        )

    def selected(self, layers: Sequence[int]) -> dict[str, str]:
        """Returns the fields about layers, for a model of some of them."""
        result = {}
        for name in (*LAYER_LISTS, *LAYER_VALUES):
            text = getattr(self, name, None)
            if text is None:
                continue
            items = text.split(",")
            if name in LAYER_LISTS:
                items = [str(n) for n, layer in enumerate(layers) if str(layer) in items]
            else:
                items = [items[layer] for layer in layers]
            result[name] = ",".join(items)
        return result

    def of_layer(self: Sizes, _layer: int | None) -> Sizes:
        """The hyperparameters by which a layer's sizes are read."""
        return self

    def has_experts(self, layer: int) -> bool:
        """Return whether tokens go through some of several MLPs in a layer."""
        return self.has_branch(layer, "moe")

    def unit_size(self, axis: str) -> int:
        """Size of the pieces of a split axis that stay together, as heads do."""
        return int(getattr(self, "head_size", 1)) if axis else 1

    @abstractmethod
    def tp_sizes(self) -> list[int]:
        """The tensor-parallel sizes that can hold the model."""

    def local_size(self, axis: str, tp_size: int) -> int:
        """Size on one of `tp_size` ranks of a split axis called `axis` (an attribute name)."""
        size: int = getattr(self, axis)
        return -(-size // tp_size) if axis.endswith("vocab_size") else size // tp_size

    def check_fields(
        self, problems: Problems, sizes: Iterable[str], choices: Mapping[str, Sequence[str]]
    ) -> None:
        """Note the sizes below 1, and the words that are none of their choices."""
        for name in sizes:
            problems.check_minimum(name, getattr(self, name), 1)
        for name, allowed in choices.items():
            problems.check_choice(name, getattr(self, name), allowed)

    def check_divides(self, problems: Problems, part: str, total: str) -> None:
        """Note a size that does not divide another one, where nothing else is wrong."""
        size, of = getattr(self, part), getattr(self, total)
        if not problems.messages and (size < 1 or of % size):
            problems.add(f"{part} must divide {total}", got=size, choices=divisors(of))


class ExpertsOfStacks:
    """Layers of an encoder and of a decoder in which a token goes through some of several MLPs."""

    num_experts: int | None
    encoder_expert_layers: str | None
    decoder_expert_layers: str | None

    def check_expert_layers(self, problems: Problems) -> None:
        """Note lists of layers without experts, and experts fewer than one."""
        for name in ("encoder_expert_layers", "decoder_expert_layers"):
            layers = numbers_in(problems, name, getattr(self, name), int)
            if layers and self.num_experts is None:
                problems.add(f"{name} needs num_experts")
        if self.num_experts is not None:
            problems.check_minimum("num_experts", self.num_experts, 1)

    def encoder_has_experts(self, layer: int) -> bool:
        """Return whether tokens go through one of several MLPs in a layer of the encoder."""
        return str(layer) in (self.encoder_expert_layers or "").split(",")

    def decoder_has_experts(self, layer: int) -> bool:
        """Return whether tokens go through one of several MLPs in a layer of the decoder."""
        return str(layer) in (self.decoder_expert_layers or "").split(",")

    def encoder_is_dense(self, layer: int) -> bool:
        """Return whether a layer of the encoder has one MLP."""
        return not self.encoder_has_experts(layer)

    def decoder_is_dense(self, layer: int) -> bool:
        """Return whether a layer of the decoder has one MLP."""
        return not self.decoder_has_experts(layer)


def _check_numbers(problems: Problems, config: Any) -> None:
    """Note the real numbers and token ids of `config` that no model can have.

    Start ids are read by the model, so they are of its vocabulary. End and pad ids are only
    compared and written: vocab_size is one that never comes. What FasterTransformer assumes where
    a checkpoint says nothing, GPT's 50256, may be any.
    """
    defaults = {item.name: item.default for item in fields(config)}
    for name in (item.name for item in fields(config) if str(item.type).startswith("float")):
        minimum, maximum = REAL_RANGES.get(name, REALS)
        value = getattr(config, name)
        if value is not None and not minimum <= value <= maximum:
            problems.add(
                f"{name} is out of range", got=value, choices=(f"{minimum:g} to {maximum:g}",)
            )
    for name, others, maximum in (
        ("start_id", "decoder_start_token_id", config.vocab_size - 1),
        ("end_id", "eos_token_id", config.vocab_size),
        ("pad_id", "pad_token_id", config.vocab_size),
    ):
        token = getattr(config, name)
        if token not in (None, defaults[name]) and not 0 <= token <= maximum:
            problems.add(
                f"{name} ({others}) is not an id of the vocabulary",
                got=token,
                choices=(f"0-{maximum}",),
                change=f"it in config.ini, or export.model.tokenizer.{name} for an export",
            )


def check_division(problems: Problems, model: Any, parallelism: Parallelism) -> None:
    """Note the parallel sizes of an export that a model cannot be divided by.

    model: a ModelConfig, or what is known of one, with None for what is not
    """
    allowed = model.tp_sizes()
    if allowed is not None and parallelism.tp_size not in allowed:
        problems.add(
            f"the model ({model.num_heads} attention heads, MLP size {model.ffn_size}) "
            "cannot be divided into this many tensor-parallel parts",
            got=parallelism.tp_size,
            choices=allowed,
            change="export.model.tensor_model_parallel_size",
        )
    if model.num_layers is not None and parallelism.pp_size > model.num_layers:
        problems.add(
            f"the model has {model.num_layers} layers, fewer than pipeline stages",
            got=parallelism.pp_size,
            choices=(f"1-{model.num_layers}",),
            change="export.triton_deployment.pipeline_model_parallel_size",
        )


@dataclass(frozen=True)
class Family:
    """A row of FAMILIES: what the rest of the project must know about a model family.

    config_type: the frozen dataclass of hyperparameters
    weights:     config -> its WeightSpecs
    """

    name: str
    config_type: type[Any]
    weights: Callable[[Any], list[WeightSpec]]
