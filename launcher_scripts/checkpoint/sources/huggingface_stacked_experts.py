"""Experts that lie in one tensor a layer, as if each had tensors of its own.

IBM's Granite stores them so, and transformers 5 keeps the experts of all models so in memory, which
is what a state dict of such a model has. In those of OpenAI's gpt-oss, gate and up alternate: as
float with the inputs first, or in MXFP4 with the outputs first. There 32 numbers of four bits
(e2m1) share a power of two (e8m0):
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import (
    Piece,
    SourceTensor,
    Workspace,
    float32,
)
from launcher_scripts.checkpoint.layout.source_checkpoint import renamed
from launcher_scripts.checkpoint.sources.huggingface_raw import MAX_LAYERS
from launcher_scripts.common.errors import Problems

_EXPERTS = ".mlp.experts."
# Of gpt-oss: a tensor of all experts -> what its outputs belong to in turn.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Of the others: a module and how its tensor's name goes on -> what the rows [experts, rows, in] of
# an expert are, in parts of equal size.
_STACKED = {
    (".block_sparse_moe", ".input_linear.weight"): ("w1", "w3"),
    (".block_sparse_moe", ".output_linear.weight"): ("w2",),
    (".block_sparse_moe", ".experts.gate_up_proj"): ("w1", "w3"),
    (".block_sparse_moe", ".experts.down_proj"): ("w2",),
    (".mlp", ".experts.gate_up_proj"): ("gate_proj", "up_proj"),
    (".mlp", ".experts.down_proj"): ("down_proj",),
    (".feed_forward", ".experts.gate_up_proj"): ("gate_proj", "up_proj"),
    (".feed_forward", ".experts.down_proj"): ("down_proj",),
    ("", ".experts.gate_up_proj"): ("gate_proj", "up_proj"),
    ("", ".experts.down_proj"): ("down_proj",),
}
# Model types whose files hold them so -> the ends of the names of such tensors.
_LINEARS = (".input_linear.weight", ".output_linear.weight")
_EXPERT_LINEARS = (".experts.gate_up_proj", ".experts.down_proj")
STACKED_TYPES = {
    "gpt_oss": (),
    "granitemoe": _LINEARS,
    "granitemoeshared": _LINEARS,
    "granitemoehybrid": _LINEARS,
    "granitemoe_swa": _EXPERT_LINEARS,
    "llama4_text": _EXPERT_LINEARS,
    "gemma4_text": _EXPERT_LINEARS,
}
# Model types whose files have the names that transformers 5 has in memory.
IN_MEMORY_TYPES = ("granitemoe_swa",)
ALTERNATE_TYPES = ("gpt_oss",)
# Model types whose files have the inputs of experts before their outputs.
INPUTS_FIRST_TYPES = (*ALTERNATE_TYPES, "llama4_text")
# The weights of all experts in transformers 5, in the order of its classes.
PARAMETERS = ("gate_up_proj", "down_proj")
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1 without its sign, by their bits
_BLOCK_BYTES, _BLOCK = 16, 32  # that share a power of two
_EXPONENT_BIAS = 127
Value = TypeVar("Value")
_OF_ONE = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<part>\w+)")


@dataclass(frozen=True)
class Mxfp4Scheme:
    """The way gpt-oss stores its experts."""

    note = "weights stored in mxfp4 are widened"

    def applied(self, tensors: dict[str, SourceTensor], problems: Problems) -> None:
        """Put the weights of each expert in place of those of all in MXFP4."""
        for name in [name for name in tensors if name.endswith("_blocks")]:
            stem = name.removesuffix("_blocks")
            blocks, scales = tensors.pop(name), tensors.pop(f"{stem}_scales", None)
            layer, _, part = stem.rpartition(_EXPERTS)
            fits = len(blocks.shape) == 4 and blocks.shape[3] == _BLOCK_BYTES
            if part not in _PARTS or not fits or blocks.dtype != np.dtype("u1"):
                problems.add(f"{name} is not in mxfp4", got=(blocks.shape, str(blocks.dtype)))
            elif scales is None or (scales.shape, scales.dtype) != (blocks.shape[:3], blocks.dtype):
                got = None if scales is None else scales.shape
                problems.add(f"{stem}_scales do not fit", got=got, choices=[blocks.shape[:3]])
            else:
                every = zip(blocks.read(), scales.read(), strict=True)
                for expert, (bits, exponents) in enumerate(every):
                    for number, target in enumerate(_PARTS[part]):
                        rows = slice(number, None, len(_PARTS[part]))
                        tensors[f"{layer}{_EXPERTS}{expert}.{target}.weight"] = Mxfp4Tensor.of(
                            bits[rows], exponents[rows]
                        )


@dataclass(frozen=True)
class Mxfp4Tensor(SourceTensor):
    """A weight [out, in] computed when it is read, of bytes [out, in / 32, 16] and the exponents
    [out, in / 32] of their powers of two. The lower half of a byte is the first of its numbers."""

    blocks: SourceTensor
    exponents: SourceTensor

    @classmethod
    def of(cls, blocks: NDArray[Any], exponents: NDArray[Any]) -> Mxfp4Tensor:
        stored = SourceTensor.full(blocks)
        shape = (blocks.shape[0], blocks.shape[1] * _BLOCK)
        dtype = np.dtype("<f4")
        return cls(shape, dtype, stored.pieces, stored, SourceTensor.full(exponents))

    def read(self, workspace: Workspace | None = None, name: str = "whole") -> NDArray[Any]:
        result = (workspace or Workspace()).array(name, self.shape, self.dtype)
        stored = self.blocks.read()
        np.take(fp4_pairs(), stored, axis=0, out=result.reshape(*stored.shape, 2), mode="wrap")
        powers = np.ldexp(np.float32(1), self.exponents.read().astype(np.int32) - _EXPONENT_BIAS)
        groups = result.reshape(*stored.shape[:2], _BLOCK)
        groups *= powers[:, :, None]
        return result


@cache
def fp4_pairs() -> NDArray[Any]:
    """The two e2m1 numbers of every byte, the lower half first, float32 [256, 2]."""
    numbers = np.array([*_NUMBERS, *(-number for number in _NUMBERS)], np.float32)
    every = np.arange(256)
    return np.stack([numbers[every & 15], numbers[every >> 4]], axis=1)


def separate_experts(
    tensors: Mapping[str, SourceTensor], model_type: str, origin: str
) -> dict[str, SourceTensor]:
    """The tensors, those of all experts of a layer replaced by those of each.

    origin: the source, for errors
    Raises CheckpointError where an expert's tensor is there twice, alone and among all.
    """
    split = _SPLITS.get(model_type, _in_parts)
    if model_type == "dbrx":
        split = partial(_by_router, tensors)
    return renamed(
        (
            (name, expert_name, expert_tensor)
            for name, tensor in tensors.items()
            for expert_name, expert_tensor in split(name, tensor)
        ),
        origin,
    )


def _in_turn(name: str, tensor: SourceTensor) -> Iterator[tuple[str, SourceTensor]]:
    """Split gpt-oss's experts: weights [experts, in, out] and biases [experts, out] with gate and
    up interleaved."""
    layer, _, part = name.rpartition(_EXPERTS)
    stem, biased = part.removesuffix("_bias"), part.endswith("_bias")
    if stem not in _PARTS or len(tensor.shape) != (2 if biased else 3):
        yield name, tensor
        return
    targets, kind = _PARTS[stem], "bias" if biased else "weight"
    for expert, weight in enumerate(tensor.read()):
        for index, target in enumerate(targets):
            values = weight.T[index :: len(targets)]
            yield f"{layer}{_EXPERTS}{expert}.{target}.{kind}", SourceTensor.full(values)


def _in_parts(name: str, tensor: SourceTensor) -> Iterator[tuple[str, SourceTensor]]:
    """Split other models' experts: weights [experts, out, in], gate before up.

    Rows that cannot be divided make parts of different sizes, which do not fit the weight table.
    """
    end, parts = next(
        ((end, parts) for (module, end), parts in _STACKED.items() if name.endswith(module + end)),
        ("", ()),
    )
    if len(tensor.shape) != 3 or not parts:
        yield name, tensor
        return
    stem = name.removesuffix(end)
    for expert, weight in enumerate(tensor.read()):
        for part, values in zip(parts, np.array_split(weight, len(parts)), strict=True):
            yield f"{stem}.experts.{expert}.{part}.weight", SourceTensor.full(values)


def _transposed(name: str, tensor: SourceTensor) -> Iterator[tuple[str, SourceTensor]]:
    """Of Llama 4: as _in_parts, but weights [experts, in, out]."""
    stem, _, kind = name.rpartition(".feed_forward.experts.")
    if not stem or len(tensor.shape) != 3:
        yield name, tensor
        return
    parts = _STACKED[".feed_forward", f".experts.{kind}"]
    for expert, weight in enumerate(tensor.read()):
        for part, values in zip(parts, np.array_split(weight.T, len(parts)), strict=True):
            yield f"{stem}.feed_forward.experts.{expert}.{part}.weight", SourceTensor.full(values)


_OF_DBRX = re.compile(r"(blocks\.\d+\.ffn)\.experts\.mlp\.(w1|v1|w2)")
_DBRX_PARTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


def _by_router(
    tensors: Mapping[str, SourceTensor], name: str, tensor: SourceTensor
) -> Iterator[tuple[str, SourceTensor]]:
    """Split DBRX's experts: rows [experts * width, hidden] for as many as the router chooses among;
    those of w2 are its inputs.
    """
    match = _OF_DBRX.fullmatch(name)
    router = tensors.get(f"{match[1]}.router.layer.weight") if match else None
    if match is None or router is None or not router.shape or len(tensor.shape) != 2:
        yield name, tensor
        return
    for expert, rows in enumerate(np.array_split(tensor.read(), router.shape[0])):
        values = SourceTensor.full(rows.T if match[2] == "w2" else rows)
        yield f"{match[1]}.experts.{expert}.{_DBRX_PARTS[match[2]]}.weight", values


_SPLITS = {"gpt_oss": _in_turn, "llama4_text": _transposed}


def stacked_place(name: str, model_type: str) -> tuple[str, int, int] | None:
    """Return the tensor of all experts that holds a tensor of one in the files of a model type,
    with the expert and its part; None for a tensor that is stored alone.
    """
    match = re.fullmatch(r"(.+)\.experts\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or model_type not in STACKED_TYPES:
        return None
    module, expert, part, kind = match.groups()
    ends = {f".experts.{stem}{'_bias' * (kind == 'bias')}": _PARTS[stem] for stem in _PARTS}
    if model_type not in ALTERNATE_TYPES:
        ends = {  # of the first module that fits
            end: parts
            for (stem, end), parts in reversed(_STACKED.items())
            if end in STACKED_TYPES[model_type] and module.endswith(stem)
        }
    end = next(end for end, parts in ends.items() if part in parts)
    return module + end, int(expert), ends[end].index(part)


def stacked_name(module: str) -> str | None:
    """Returns the tensor of all experts that holds a module of one expert; None for others."""
    match = _OF_ONE.fullmatch(module)
    if match is None:
        return None
    end = "down_proj" if match["part"] in ("down_proj", "w2") else "gate_up_proj"
    return f"{match['experts']}.{end}"


def is_stacked(name: str) -> bool:
    """True for the tensor of all experts of a layer, as transformers 5 names it."""
    return ".experts." in name and name.endswith(PARAMETERS)


def unnested(
    loras: Mapping[str, tuple[str, Value]], is_target: Callable[[str], bool], problems: Problems
) -> dict[str, tuple[str, Value]]:
    """LoRA by module, that of a layer's stacked experts by parameter.

    PEFT wraps the module of the experts once for each parameter, the first one innermost.

    loras:     name of a module in the weight table -> whole name, LoRA
    is_target: the configuration names this parameter
    """
    result: dict[str, tuple[str, Value]] = {}
    wrappers: dict[str, list[tuple[str, Value]]] = {}
    for stem, lora in loras.items():
        experts = stem.partition(".base_layer")[0]
        if experts.endswith(".experts"):
            wrappers.setdefault(experts, []).append(lora)
        else:
            result[stem] = lora
    for experts, nested in wrappers.items():
        nested.sort(key=lambda item: len(item[0]), reverse=True)
        module = nested[-1][0].partition(".base_layer")[0]
        names = [name for name in PARAMETERS if is_target(f"{module}.{name}")]
        if len(names) != len(nested):
            message = f"LoRA of {len(nested)} parameters of {module} does not fit target_parameters"
            problems.add(message, got=names)
            continue
        for name, (_, sides) in zip(names, nested, strict=True):
            result[f"{experts}.{name}"] = (f"{module}.{name}", sides)
    return result


def expert_pairs(
    name: str,
    sides: Mapping[str, SourceTensor],
    config: Any,
    reads_inputs: bool,
    problems: Problems,
) -> dict[str, tuple[SourceTensor, SourceTensor]]:
    """LoRA of the tensor `name` of all experts, for each expert: name of a weight -> A [rank, in]
    and B [out, rank].

    A has the ranks of one expert after those of another, B the first rank of every expert and then
    the second. A PEFT before 0.20 gives A the outputs and B the inputs of some classes.

    reads_inputs: A has the inputs for sure, which the shapes of a square weight do not show
    """
    hidden, ffn, count = config.hidden_size, config.ffn_size, getattr(config, "num_experts", None)
    if count is None:
        problems.add(f"LoRA of {name}: the base has no experts")
        return {}
    outputs, inputs = (hidden, ffn) if name.endswith("down_proj") else (2 * ffn, hidden)
    shapes = {part: side.shape for part, side in sides.items()}
    rank = (shapes.get("A") or (0,))[0] // count
    plain, swapped = (
        {"A": (count * rank, columns), "B": (rows, count * rank)}
        for rows, columns in ((outputs, inputs), (inputs, outputs))
    )
    if rank == 0 or shapes not in (plain, swapped):
        problems.add(f"LoRA of {name} does not fit", got=shapes, choices=[plain])
        return {}
    if plain == swapped and not reads_inputs:
        problems.add(
            f"LoRA of {name}, which is square: a PEFT before 0.20 may have swapped A and B"
        )
        return {}
    downs = float32(sides["A"].read()).reshape(count, rank, -1)
    ups = float32(sides["B"].read()).reshape(-1, rank, count)
    alternate = bool(getattr(config, "attention_sinks", None))
    pairs = {}
    for expert in range(count):
        down, up = downs[expert], ups[..., expert]
        if shapes != plain:
            down, up = up.T, down.T
        for part, rows in _outputs(name, outputs, alternate).items():
            values = SourceTensor.full(down), SourceTensor.full(up[rows])
            pairs[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = values
    return pairs


def _outputs(name: str, outputs: int, alternate: bool) -> dict[str, slice]:
    """Part of an expert -> its outputs in the tensor `name` of all experts.

    alternate: outputs of gate and up take turns, as in gpt-oss
    """
    parts = next(parts for (module, end), parts in _STACKED.items() if name.endswith(module + end))
    size, step = outputs // len(parts), len(parts)
    return {
        part: slice(index, None, step) if alternate else slice(index * size, (index + 1) * size)
        for index, part in enumerate(parts)
    }


# Model types whose tables of all layers are read as every layer's own.
GEMMAS_WITH_INPUTS = ("gemma4_text", "gemma3n_text")
TABLE, PROJECTION = "embed_tokens_per_layer.weight", "per_layer_model_projection.weight"
PROJECTION_NORM = "per_layer_projection_norm.weight"
# The part of the table that is a layer's, and the key that says how many rows it has.
LAYER_TABLE, TABLE_ROWS = "per_layer_table", "vocab_size_per_layer_input"
_OF_KEYS = (".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.")


_HEAD_NORM = re.compile(r"(.+\.self_attn\.[qk])_layernorm\.norms\.(\d+)\.weight")


def joined_head_norms(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors, StableLM's norms of single heads as one tensor [heads, dimension]."""
    result, norms = {}, dict[str, dict[int, SourceTensor]]()
    for name, tensor in tensors.items():
        if match := _HEAD_NORM.fullmatch(name):
            norms.setdefault(f"{match[1]}_norm.weight", {})[int(match[2])] = tensor
        else:
            result[name] = tensor
    for name, heads in norms.items():
        rows = [heads[head].read() for head in sorted(heads)]
        if len({row.shape for row in rows}) == 1 and [*sorted(heads)] == [*range(len(heads))]:
            result[name] = SourceTensor.full(np.stack(rows))
    return result


# A switch of GPT-2, and the tensors that make its queries, keys and values.
BY_LAYER = "scale_attn_by_inverse_layer_idx"
_GPT2_QUERIES = re.compile(r"h\.(\d{1,6})\.attn\.c_attn\.(?:weight|bias)")


def unscaled_by_layer(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors, queries of a GPT-2 divided by the layer's number (from 1), as its scores are."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.shape and (match := _GPT2_QUERIES.fullmatch(name)):
            values = float32(tensor.read()).copy()
            values[..., : values.shape[-1] // 3] /= int(match[1]) + 1
            result[name] = SourceTensor.full(values)
    return result


def tensors_of_layers(
    tensors: Mapping[str, SourceTensor], raw: Mapping[str, Any]
) -> dict[str, SourceTensor]:
    """Tables of all layers as those of every one, a value's projection where it is the key's, and
    neither of layers that share keys.
    """
    count, shared = raw.get("num_hidden_layers"), raw.get("num_kv_shared_layers", 0)
    if type(count) is not int or type(shared) is not int or not 0 <= count <= MAX_LAYERS:
        return dict(tensors)
    result = {
        name: value for name, value in tensors.items() if not _is_shared(name, count - shared)
    }
    if raw.get("attention_k_eq_v"):
        for name in [name for name in result if ".self_attn.k_proj." in name]:
            result.setdefault(name.replace("k_proj", "v_proj"), result[name])
    table, projection, norm = (result.get(name) for name in (TABLE, PROJECTION, PROJECTION_NORM))
    if table is None or projection is None or norm is None:
        return result
    size = norm.shape[0] if norm.shape else 0
    if len(table.shape) != 2 or {table.shape[1], projection.shape[0]} != {count * size}:
        return result
    for name in (TABLE, PROJECTION, PROJECTION_NORM):
        del result[name]
    # Ids behind the table's are read as the first one.
    rows, projected = raw.get("vocab_size"), projection.read()
    count_of_rows = rows if type(rows) is int and rows < 1 << 24 else table.shape[0]
    for layer in range(count):
        part = slice(layer * size, (layer + 1) * size)
        values = table.columns(part)
        if more := max(count_of_rows - table.shape[0], 0):
            full = values.read()
            pieces = (
                Piece((0, 0), full),
                Piece((len(full), 0), np.repeat(full[:1], more, axis=0)),
            )
            values = SourceTensor((count_of_rows, size), full.dtype, pieces)
        elif count_of_rows < table.shape[0]:
            values = SourceTensor.full(values.read()[:count_of_rows])
        result[f"layers.{layer}.{LAYER_TABLE}"] = values
        result[f"layers.{layer}.{PROJECTION}"] = SourceTensor.full(projected[part])
        result[f"layers.{layer}.{PROJECTION_NORM}"] = norm
    return result


def _is_shared(name: str, first: int) -> bool:
    """True for a tensor of keys or values in a layer from `first` on."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= first and any(part in name for part in _OF_KEYS)
