"""Other settings, and other orders of weights, with which an export is tried beside its original.

They are the mistakes that the reader of a checkpoint can make: one with which a layer agrees says
what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.models.family import ACTIVATIONS, WeightSpec

Stored = Callable[[WeightSpec, "int | None"], NDArray[Any]]
Change = Callable[[WeightSpec, "int | None", Stored], NDArray[Any]]
# The part of a model that a setting is about; the first row that fits.
_SETTINGS = (
    (r"norm_eps|normalization|zero_centered|norm_placement|qk_norm", "norm"),
    (r"rotary|alibi|position|unrotated|rope|distance|bucket|relative", "positions"),
    (r"sliding|full_attention|softmax|attention|sink", "attention"),
    (r"activation|gated", "mlp_input"),
    (r"expert|router|moe", "router"),
    (r"embedding_scale|embedding_norm", "embedding"),
    (r"logits", "head"),
    (r"parallel_residual|branches", "layer"),
)


def part_of_setting(name: str) -> str:
    """The part of a model that a setting is about."""
    return next((part for pattern, part in _SETTINGS if re.search(pattern, name)), "settings")


@dataclass(frozen=True)
class Variant:
    """A change of an export that may make it agree with its original.

    location: embedding, layer, final_norm or head: what it can change
    """

    location: str
    part: str
    kind: str
    name: str
    text: str
    changes: Mapping[str, Any]
    change: Change | None = None


def setting_variants(config: Any) -> Iterator[Variant]:
    """Other values of the settings that a checkpoint's reader may take wrongly."""
    for location, name, values in _setting_values(config):
        current = getattr(config, name, None)
        for value in values:
            if value == current or not hasattr(config, name):
                continue
            text = f"{name} {value} (the export has {current})"
            yield Variant(location, part_of_setting(name), "setting", name, text, {name: value})
    for plain in _without_scaling(config):
        text = "rotary positions that are not scaled"
        yield Variant("layer", "positions", "setting", "rotary_scaling", text, plain)


def _setting_values(config: Any) -> Iterator[tuple[str, str, Sequence[Any]]]:
    layer, eps = "layer", (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)
    for location in (layer, "final_norm", "encoder_norm"):
        yield location, "norm_eps", eps
        yield location, "zero_centered_norm", (True, None)
    yield layer, "latent_norm_eps", eps
    base = getattr(config, "rotary_base", None) or 1e4
    yield layer, "rotary_base", _others(base, (1e4, 1e5, 5e5, 1e6))
    yield layer, "rotary_percentage", (1.0, 0.5, 0.25)
    factor = getattr(config, "rotary_interpolation_factor", None) or 1.0
    yield layer, "rotary_interpolation_factor", (1.0, *_others(factor, (2.0, 4.0, 8.0)))
    scaling = getattr(config, "rotary_scaling_factor", None)
    yield layer, "rotary_scaling_factor", _others(scaling, (8.0, 32.0)) if scaling else ()
    local = getattr(config, "rotary_local_base", None)
    yield layer, "rotary_local_base", _others(local, (1e4, None)) if local else ()
    yield layer, "unrotated_layers", (None,)
    window = getattr(config, "sliding_window", None)
    sizes = (window - 1, window + 1, 2 * window, window // 2, None) if window else ()
    yield layer, "sliding_window", [size for size in sizes if size is None or size > 0]
    yield layer, "full_attention_layers", _layer_lists(config)
    for name in ("softmax_scale", "attention_scale"):
        head = getattr(config, "head_size", 1) ** -0.5
        scale = getattr(config, name, None) or head
        yield layer, name, (head, 1.0, head**2, *_others(scale, ()))
    cap = getattr(config, "attention_softcap", None)
    yield layer, "attention_softcap", (None, *_others(cap, ())) if cap else (30.0, 50.0)
    yield layer, "activation", ACTIVATIONS
    yield layer, "parallel_residual", (True, None)
    yield layer, "alibi_layer_scaling", (True, False)
    count = getattr(config, "experts_per_token", None)
    if count:
        yield layer, "experts_per_token", [n for n in (count - 1, count + 1) if n > 0]
        yield layer, "normalized_experts", (True, False, None)
        yield layer, "router_score_function", ("softmax", "sigmoid")
        router = getattr(config, "router_scaling_factor", None) or 1.0
        yield layer, "router_scaling_factor", (None, 1.0, *_others(router, (2.0, 2.5, 16.0)))
    distance = getattr(config, "max_distance", None)
    yield layer, "max_distance", _others(distance, (128, 256)) if distance else ()
    scale = getattr(config, "embedding_scale", None)
    yield "embedding", "embedding_scale", (None, config.hidden_size**0.5, *_others(scale, ()))
    logits = getattr(config, "logits_scale", None)
    size = config.hidden_size**-0.5
    yield "head", "logits_scale", (None, 1.0, size, *_others(logits, ()))
    yield "head", "logits_softcap", (None, 3.0, 20.0, 30.0, 50.0)


def _others(value: float | None, more: Sequence[Any]) -> tuple[Any, ...]:
    kind = int if isinstance(value, int) else float
    scaled = [] if value is None else [kind(value * part) for part in (2, 0.5, 4, 0.25, 10, 0.1)]
    return (*more, *(number for number in scaled if number))


def _layer_lists(config: Any) -> list[str | None]:
    """Other layers that attend to all tokens: none, the others, shifted by one."""
    if not getattr(config, "sliding_window", None):
        return []
    text = getattr(config, "full_attention_layers", None)
    numbers = {int(part) for part in (text or "").split(",") if part}
    layers = range(config.num_layers)
    lists = [[n for n in layers if n not in numbers], [n for n in layers if n - 1 in numbers]]
    return [None, *(",".join(map(str, part)) for part in lists if part)]


def _without_scaling(config: Any) -> Iterator[dict[str, Any]]:
    if getattr(config, "rotary_scaling", None):
        names = [name for name in vars(config) if name.startswith("rotary_")]
        fixed = ("rotary_percentage", "rotary_base", "rotary_local_base", "rotary_layer_bases")
        changes: dict[str, Any] = {name: None for name in names if name not in fixed}
        yield {**changes, "rotary_interpolation_factor": 1.0}


# Pairs of tensors that a reader may take for each other.
_PAIRS = (
    (r"\.dense_h_to_4h\.", ".dense_h_to_4h_2.", "mlp_input", "gate and up exchanged"),
    (r"\.wi\.", ".wi2.", "mlp_input", "gate and up exchanged"),
    (r"\.input_layernorm\.", ".post_attention_layernorm.", "norm", "the two norms exchanged"),
)
_QUERY_KEY_VALUE = re.compile(r"query_key_value\.|SelfAttention\.qkv\.")


def weight_variants(config: Any) -> Iterator[Variant]:
    """Other orders of the stored weights [in, out]."""
    for pattern, other, part, text in _PAIRS:
        change = _exchanged(pattern, other)
        yield Variant("layer", part, "exchanged", text, text, {}, change)
    orders = {"key and value exchanged": (0, 2, 1), "query and key exchanged": (1, 0, 2)}
    for text, order in orders.items():
        change = _of_blocks(config, _in_order(order))
        yield Variant("layer", "query_key_value", "exchanged", text, text, {}, change)
    for text, axes in (
        ("halves of each head in pairs", True),
        ("pairs of each head in halves", False),
    ):
        change = _of_blocks(config, _turned(config, paired=axes))
        yield Variant("layer", "positions", "order", "rotary layout", text, {}, change)
    for text, fused in (("heads of a fused matrix apart", True), ("heads fused", False)):
        change = _of_blocks(config, _fused(config, fused=fused))
        yield Variant("layer", "query_key_value", "order", "query_key_value", text, {}, change)
    for pattern, name in (
        (r"attention\.dense\.weight|SelfAttention\.o\.weight", "attention_output"),
        (r"dense_4h_to_h\.weight|\.wo\.weight", "mlp_output"),
        (r"dense_h_to_4h\.weight|\.wi\.weight", "mlp_input"),
        (r"lm_head\.weight", "head"),
    ):
        location = "head" if name == "head" else "layer"
        for kind, transform in _MATRICES.items():
            change = _of_tensor(pattern, transform)
            yield Variant(location, name, kind, name, f"{name} {kind}", {}, change)
    for pattern, location in (
        (r"\*.*norm\.weight", "layer"),
        (r"final_layer.*norm", "final_norm"),
    ):
        for text, shift in (("norm weights plus one", 1.0), ("norm weights less one", -1.0)):
            change = _of_tensor(pattern, partial(np.add, shift))
            yield Variant(location, "norm", "shifted", "norm weight", text, {}, change)


def _transposed(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values.T).reshape(values.shape)


_MATRICES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "transposed": _transposed,
    "of the other sign": lambda values: -values,
    "with its rows in the other order": lambda values: values[::-1],
    "doubled": lambda values: 2 * values,
    "halved": lambda values: values / 2,
}


def _exchanged(pattern: str, other: str) -> Change:
    first = pattern.replace("\\", "")

    def change(spec: WeightSpec, layer: int | None, read: Stored) -> NDArray[Any]:
        name = spec.name
        if first in name:
            name = name.replace(first, other)
        elif other in name:
            name = name.replace(other, first)
        return read(replace(spec, name=name), layer)

    return change


def _of_tensor(pattern: str, transform: Callable[[NDArray[Any]], NDArray[Any]]) -> Change:
    def change(spec: WeightSpec, layer: int | None, read: Stored) -> NDArray[Any]:
        values = read(spec, layer)
        return transform(values) if re.search(pattern, spec.name) else values

    return change


def _of_blocks(
    config: Any, transform: Callable[[list[NDArray[Any]]], list[NDArray[Any]]]
) -> Change:
    """A change of the blocks of queries, keys and values [..., width]."""

    def change(spec: WeightSpec, layer: int | None, read: Stored) -> NDArray[Any]:
        values = read(spec, layer)
        if not _QUERY_KEY_VALUE.search(spec.name) or len(spec.blocks) != 3:
            return values
        ends = np.cumsum([int(getattr(config, block)) for block in spec.blocks])[:-1]
        return np.concatenate(transform(np.split(values, ends, axis=-1)), axis=-1)

    return change


def _in_order(order: Sequence[int]) -> Callable[[list[NDArray[Any]]], list[NDArray[Any]]]:
    return lambda blocks: [blocks[index] for index in order]


def _turned(config: Any, *, paired: bool) -> Callable[[list[NDArray[Any]]], list[NDArray[Any]]]:
    """Queries and keys whose halves of each head become pairs, or the other way about."""
    size = int(config.head_size)
    halves = np.arange(size).reshape(2, size // 2)
    order = halves.T.reshape(-1) if paired else np.argsort(halves.T.reshape(-1))

    def transform(blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
        turned = [
            block.reshape(*block.shape[:-1], -1, size)[..., order].reshape(block.shape)
            for block in blocks[:2]
        ]
        return [*turned, blocks[2]]

    return transform


def _fused(config: Any, *, fused: bool) -> Callable[[list[NDArray[Any]]], list[NDArray[Any]]]:
    """Blocks read as [heads, 3, size] where they are [3, heads, size], or the other way about."""
    size = int(config.head_size)

    def transform(blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
        if len({block.shape for block in blocks}) > 1:
            return blocks
        full = np.concatenate(blocks, axis=-1)
        heads = blocks[0].shape[-1] // size
        shape = (heads, 3, size) if fused else (3, heads, size)
        values = full.reshape(*full.shape[:-1], *shape).swapaxes(-3, -2)
        return np.split(values.reshape(full.shape), 3, axis=-1)

    return transform
