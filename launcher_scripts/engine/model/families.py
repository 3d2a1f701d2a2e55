"""Differences between families in the engine: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from launcher_scripts import kernels
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.messages.plan import Bounds
from launcher_scripts.engine.model.gpt_weights import GPTWeightLoader
from launcher_scripts.engine.model.kv_cache import LayerStates, TokenState
from launcher_scripts.engine.model.recurrent import row_states
from launcher_scripts.engine.model.side_streams import shared_layers
from launcher_scripts.engine.model.t5_weights import (
    AgmWeightLoader,
    BartWeightLoader,
    T5WeightLoader,
)
from launcher_scripts.engine.model.weight_loader import WeightLoader
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda.compiling import settle_keys
from launcher_scripts.kernels.operands import Heads
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models import family_of
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.family import RECURRENT_KINDS, ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config


def kernels_for(device_type: str) -> Ops:
    """The implementation for `cpu` or `cuda`; the reference where the Triton language is absent."""
    if device_type == "cuda" and find_spec("triton") is not None:
        from launcher_scripts.kernels.cuda import fused

        settle_keys(kernels.__name__)
        return fused
    if device_type not in ("cpu", "cuda"):
        raise KeyError(device_type)
    return reference


# Relative positions have no end; a cache of this many tokens takes inputs much longer than those
# a model was trained on, also where few rows are to be served.
MIN_RELATIVE_TOKENS = 4096
# Of a row whose model says nothing of lengths.
RELATIVE_ROW_TOKENS = 1024


@dataclass(frozen=True)
class EngineFamily:
    """A row of FAMILIES.

    loader:        the reader of a rank's weights
    heads:         (config, tp_size) -> the heads of one rank
    cached_layers: config -> how many layers may keep something of a row
    states:        (config, layer, tp_size) -> what a layer keeps on one rank
    depth:         config -> the most pipeline stages there can be
    row_tokens:    (config, rows, block) -> cache tokens for `rows` rows of the model's full length
                   in blocks of `block` tokens
    longest:       config -> what a decode step reads of a row of that length at most
    """

    loader: type[WeightLoader]
    heads: Callable[[Any, int], Heads]
    cached_layers: Callable[[Any], int]
    states: Callable[[Any, int, int], LayerStates]
    depth: Callable[[Any], int]
    row_tokens: Callable[[Any, int, int], int]
    longest: Callable[[Any], Bounds]


def _gpt_heads(config: GPTConfig | AgmConfig, tp_size: int) -> Heads:
    """Key/value heads are copied where the ranks outnumber them."""
    return Heads(
        num_heads=config.num_heads // tp_size,
        num_kv_heads=config.local_size("num_kv_heads", tp_size),
        head_size=config.head_size,
    )


def _t5_heads(config: T5Config | BartConfig, tp_size: int) -> Heads:
    """The decoder's."""
    heads, kv_heads = config.num_decoder_heads, config.decoder_kv_heads
    return Heads(heads // tp_size, kv_heads // tp_size, config.decoder_head_size)


def _keys_and_values(heads: Heads) -> LayerStates:
    return LayerStates(TokenState(2, heads.num_kv_heads, heads.head_size))


def _gpt_states(config: GPTConfig, layer: int, tp_size: int) -> LayerStates:
    """Those of the layer's branches."""
    token = None
    if config.has_branch(layer, "attention") and config.has_keys(layer):
        token = _keys_and_values(_gpt_heads(config.of_layer(layer), tp_size)).token
        if config.kv_lora_rank is not None:  # every rank keeps the whole latent vector
            token = TokenState(1, 1, config.kv_down_size)
    kinds = [kind for kind in RECURRENT_KINDS if config.has_branch(layer, kind)]
    return LayerStates(token, row_states(config, kinds[0], tp_size) if kinds else ())


def _gpt_tokens(config: GPTConfig, rows: int, block: int) -> int:
    return rows * -(-config.max_positions // block) * block


def _t5_tokens(config: T5Config | BartConfig, rows: int, block: int) -> int:
    """As many for the input as for the output."""
    min_tokens = MIN_RELATIVE_TOKENS if config.position_embedding == "relative" else 0
    return max(2 * rows * -(-config.max_positions // block) * block, min_tokens)


def _agm_tokens(_: AgmConfig, rows: int, _block: int) -> int:
    return max(rows * RELATIVE_ROW_TOKENS, MIN_RELATIVE_TOKENS)


def _t5_longest(config: T5Config | BartConfig) -> Bounds:
    length = 0 if config.encoder_only else config.max_positions
    return Bounds(length, length)


def _t5_depth(config: T5Config | BartConfig) -> int:
    if config.encoder_only:
        return config.num_layers
    return min(config.num_layers, config.num_decoder_layers)


FAMILIES = {
    "gpt": EngineFamily(
        GPTWeightLoader,
        _gpt_heads,
        lambda config: config.num_layers,
        _gpt_states,
        lambda config: config.num_layers,
        _gpt_tokens,
        lambda config: Bounds(config.max_positions),
    ),
    "t5": EngineFamily(
        T5WeightLoader,
        _t5_heads,
        lambda config: 0 if config.encoder_only else config.num_decoder_layers,
        lambda config, _, tp_size: _keys_and_values(_t5_heads(config, tp_size)),
        _t5_depth,
        _t5_tokens,
        _t5_longest,
    ),
    "bart": EngineFamily(
        BartWeightLoader,
        _t5_heads,
        lambda config: config.num_decoder_layers,
        lambda config, _, tp_size: _keys_and_values(_t5_heads(config, tp_size)),
        _t5_depth,
        _t5_tokens,
        _t5_longest,
    ),
    "agm": EngineFamily(
        AgmWeightLoader,
        _gpt_heads,
        lambda config: config.num_layers,
        lambda config, _, tp_size: _keys_and_values(_gpt_heads(config, tp_size)),
        lambda config: config.num_layers,
        _agm_tokens,
        lambda _: Bounds(RELATIVE_ROW_TOKENS),
    ),
}


def stage_states(
    config: ModelConfig, parallelism: Parallelism, pp_rank: int, tp_size: int
) -> dict[int, LayerStates]:
    """Return what a rank keeps of a row by layers: its stage's own, and earlier ones that this or
    later stages attend to.
    """
    family = engine_family(config)
    layers = parallelism.layers(family.cached_layers(config), pp_rank)
    earlier, _ = shared_layers(config, layers)
    return {layer: family.states(config, layer, tp_size) for layer in (*earlier, *layers)}


def engine_family(config: ModelConfig) -> EngineFamily:
    """The row of a model that the engine can run."""
    return FAMILIES[family_of(config).name]
