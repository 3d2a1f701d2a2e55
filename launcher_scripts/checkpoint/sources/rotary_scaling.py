"""Rotary positions and their scalings in the configurations of all makers.

Rotary positions and attention windows of a Hugging Face config.json, as GPTConfig's fields.

Scalings that are a number per pair of dimensions are stored as such: YaRN (Peng et al. 2023) as
`rotary_factors`, LongRoPE (Ding et al. 2024) as these and `rotary_long_factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.models.family import layer_list

# What classes of transformers take for rope_parameters where config.json has none.
CLASS_ROPES: dict[str, Fields] = {
    "cwm": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def as_text(numbers: Iterable[float]) -> str:
    """As a configuration holds them."""
    return ",".join(repr(float(number)) for number in numbers)


def mscale_of(factor: float, weight: float) -> float:
    """YaRN's growth of scores with a model's stretched positions."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn(
    pairs: int,
    base: float,
    factor: float,
    original: int,
    *,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> dict[str, Any]:
    """YaRN (Peng et al. 2023): pairs that turn seldom within the original positions turn `factor`
    times as slowly, those that turn often as before.

    beta_fast, beta_slow: how often is often and seldom;  truncate: to whole pairs
    attention_factor: what cosines and sines are multiplied by; else as the others say
    """

    def dimension(turns: float) -> float:
        """The pair, as a fraction, that turns so often within the original positions."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low, high = dimension(beta_fast or 32.0), dimension(beta_slow or 1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    slowed = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(pairs)]

    if not attention_factor:
        attention_factor = mscale_of(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = mscale_of(factor, mscale) / mscale_of(factor, mscale_all_dim)
    return {
        "rotary_scaling": "factors",
        "rotary_factors": as_text(1 / (share / factor + 1 - share) for share in slowed),
        "rotary_attention_factor": attention_factor,
    }


def yarn_section(
    factors: Sequence[float],
    base: float,
    positions: int,
    attention_factor: float,
    growth: float = 1.0,
) -> dict[str, Any]:
    """Return rope_parameters of a YaRN that computes these factors, `yarn` run backwards; nothing
    where no YaRN with bounds at pairs does.

    positions: of the model;  growth: by `mscale_all_dim`, of queries and of keys
    Where scores grow, `mscale` says what attention_factor would: other programs read that alone.
    """
    pairs = len(factors)
    low = max((pair for pair, number in enumerate(factors) if number <= 1), default=pairs)
    if low >= pairs - 1 or base <= 1:
        return {}
    step = 1 - 1 / factors[low + 1]
    powers = [1 << power for power in range(8, 21)]
    for high in range(low + 1, 2 * pairs):
        slowest = 1 / factors[-1] if high < pairs else 1 - step * (high - low)
        if slowest <= 0:
            break
        factor = _rounded(1 / slowest)
        original = round(positions / factor) or positions
        turns = {
            "beta_fast": original / math.tau * base ** (-(low + 0.5) / pairs),
            "beta_slow": original / math.tau * base ** (-(high - 0.5) / pairs),
        }
        # The usual bounds are looked for first, with the usual positions.
        for length, bounds in [
            *((length, {}) for length in (original, *powers)),
            (original, turns),
        ]:
            values = yarn(pairs, base, factor, length, **bounds)["rotary_factors"].split(",")
            if all(map(math.isclose, map(float, values), factors)):
                name = "original_max_position_embeddings"
                numbers = {"rope_type": "yarn", "factor": factor, name: length, **bounds}
                return numbers | _mscales(factor, attention_factor, growth)
    return {}


def _mscales(factor: float, attention_factor: float, growth: float) -> dict[str, float]:
    """The numbers that say both, as far as they are not the defaults."""
    by, all_dim = (
        (size - 1) / (mscale_of(factor, 1.0) - 1) for size in (attention_factor * growth, growth)
    )
    if math.isclose(growth, 1.0):
        return {} if math.isclose(by, 1.0) else {"attention_factor": attention_factor}
    if by > 0:
        return {"mscale": _rounded(by), "mscale_all_dim": _rounded(all_dim)}
    return {"attention_factor": attention_factor, "mscale_all_dim": _rounded(all_dim)}


def _rounded(number: float) -> float:
    """The number without what rounding has added to it."""
    short = round(number, 9)
    return short if math.isclose(short, number, rel_tol=1e-12) else number


_NAMES = {"su": "longrope"}
_CHUNKS = "dual_chunk_attention_config"
Fields = dict[str, Any]


def rope(raw: RawConfig, head_size: int) -> Fields:
    """The fields of rope_section."""
    return rope_of(raw, rope_section(raw), head_size)


def rope_section(raw: RawConfig) -> RawConfig:
    """Return `rope_parameters`, called `rope_scaling` before transformers 5."""
    if (default := CLASS_ROPES.get(str(raw.raw.get("model_type")))) is not None:
        raw.defaults(rope_parameters=default)
    return raw.section("rope_parameters", "rope_scaling")


def rope_of(raw: RawConfig, section: RawConfig, head_size: int) -> Fields:
    """See rope.  section: the mapping that holds them"""
    kind = section.text("rope_type", section.text("type", "default"))
    kind = _NAMES.get(kind, kind)
    if kind == "yarn" and section("long_factor", default=None):
        kind = "longrope"  # the first Phi-3 called it so
    share = section.real("partial_rotary_factor", raw.real("partial_rotary_factor", 1.0))
    raw.only(rope_interleaved=False, use_mrope=False)
    section.unused("attn_factor")  # of llama.cpp; transformers reads attention_factor
    section.unused("finetuned")  # of the first YaRN's code, about its training
    raw.unused("original_max_position_embeddings")  # but by the scalings that ask for it
    fields: Fields = {
        "position_embedding": "rope",
        "rotary_base": section.real("rope_theta", raw.real("rope_theta", 10000.0)),
        "rotary_percentage": share,
    }
    if kind == "default":
        return fields
    if kind not in _SCALINGS:
        raw.problems.add("unknown rope_type", got=kind, choices=("default", *_SCALINGS))
        return fields
    pairs = max(int(head_size * share) // 2, 1)
    return {**fields, **_SCALINGS[kind](raw, section, pairs, fields["rotary_base"])}


def two_ropes(raw: RawConfig, head_size: int, local_base: float) -> tuple[Fields, float | None]:
    """Return the rotation of layers without a window, and the base of those with one; None if it is
    missing.

    local_base: where a section of the file does not say it
    """
    parameters = raw.section("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if not parameters.raw.keys() & {*kinds}:
        if parameters.raw:
            text = "rope_parameters has no section for a kind of layers, and transformers' class "
            text += "reads nothing else of it"
            raw.problems.add(text, got=sorted(parameters.raw), choices=kinds)
        return rope(raw, head_size), None
    turns = rope_of(raw, parameters.section("full_attention"), head_size)
    local = parameters.section("sliding_attention")
    local.only(rope_type="default", partial_rotary_factor=turns["rotary_percentage"])
    return turns, local.real("rope_theta", local_base)


def ntk_alpha(raw: RawConfig, head_size: int) -> Fields:
    """Hunyuan's: a scaling called dynamic whose base grows once and for all, if it has an alpha."""
    section = raw.section("rope_parameters", "rope_scaling")
    alpha = section("alpha", default=None)
    kind = section.text("rope_type", section.text("type", "default"))
    if kind != "dynamic" or not alpha:
        return rope_of(raw, section, head_size)
    section.unused("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    base = section.real("rope_theta", raw.real("rope_theta", 10000.0))
    growth = section.real("alpha", 1.0) ** (head_size / (head_size - 2))
    return {"position_embedding": "rope", "rotary_base": base * growth}


def layer_bases(raw: RawConfig) -> Fields:
    """The bases of layer_rope_theta, 0 for layers that do not turn, if there are such."""
    if raw("layer_rope_theta", default=None) is None:
        return {}
    bases = raw.numbers("layer_rope_theta", raw.layers("num_hidden_layers"))
    section = raw.section("rope_parameters", "rope_scaling")
    if {*bases} - {0.0} == {section.real("rope_theta", raw.real("rope_theta", 10000.0))}:
        return {"unrotated_layers": layer_list(n for n, base in enumerate(bases) if not base)}
    kind = section.text("rope_type", section.text("type", "default"))
    kinds = ("default", "linear", "llama3")  # the others are of one base
    if kind not in kinds:
        raw.problems.add(
            "rope_type is not supported with layer_rope_theta", got=kind, choices=kinds
        )
    return {"rotary_layer_bases": as_text(bases)}


def windows(raw: RawConfig, full: Callable[[int], bool] | None = None) -> Fields:
    """The fields of `sliding_window`.

    full: whether a layer attends to all tokens where `layer_types` does not say it; None: no layer
          does, and transformers' class ignores `layer_types`
    """
    window = raw("sliding_window", default=None)
    layers = range(raw.layers("num_hidden_layers"))
    kinds_supported = ("full_attention", "sliding_attention")
    if full is None:
        raw.only(layer_types=[kinds_supported[window is not None]] * len(layers))
        return {} if window is None else {"sliding_window": raw.size("sliding_window")}
    kinds = raw("layer_types", default=None)
    if kinds is None:
        kinds = ["full_attention" if full(layer) else "sliding_attention" for layer in layers]
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(layers)
        or not set(kinds) <= set(kinds_supported)
    ):
        raw.problems.add(
            "layer_types must name every layer's attention", got=kinds, choices=kinds_supported
        )
        return {}
    full_layers = [layer for layer in layers if kinds[layer] == "full_attention"]
    if window is None or len(full_layers) == len(layers):
        return {}
    window = raw.size("sliding_window")
    return {"sliding_window": window, "full_attention_layers": layer_list(full_layers)}


def first_chunk(raw: RawConfig) -> int:
    """Return the number of positions, of dual_chunk_attention_config's those before the second
    chunk, which are as any other's."""
    positions, section = raw.size("max_position_embeddings"), raw.section(_CHUNKS)
    if not section.raw:
        return positions
    section.unused("original_max_position_embeddings")
    served = section.size("chunk_size", default=8192) - section.size("local_size", default=1024)
    if not 0 < served < positions:
        return positions
    raw.notes.append(
        f"of {positions} positions the first {served} are served: behind them other programs "
        "attend in chunks, and transformers' class does not"
    )
    return served


def _linear(_raw: RawConfig, section: RawConfig, _pairs: int, _base: float) -> Fields:
    return {"rotary_interpolation_factor": section.real("factor", 1.0)}


def _llama3(raw: RawConfig, section: RawConfig, _pairs: int, _base: float) -> Fields:
    return {
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": section.real("factor", 0.0),
        "rotary_low_frequency_factor": section.real("low_freq_factor", 0.0),
        "rotary_high_frequency_factor": section.real("high_freq_factor", 0.0),
        "rotary_original_positions": original_positions(raw, section),
    }


def _dynamic(raw: RawConfig, section: RawConfig, _pairs: int, _base: float) -> Fields:
    section.unused("original_max_position_embeddings")  # transformers' class ignores it
    return {
        "rotary_scaling": "dynamic",
        "rotary_scaling_factor": section.real("factor", 1.0),
        "rotary_original_positions": raw.size("max_position_embeddings"),
    }


def _yarn(raw: RawConfig, section: RawConfig, pairs: int, base: float) -> Fields:
    original = original_positions(raw, section)
    factor = section.real("factor", raw.size("max_position_embeddings") / original)

    return yarn(
        pairs,
        base,
        factor,
        original,
        beta_fast=section.real("beta_fast", 0.0),
        beta_slow=section.real("beta_slow", 0.0),
        truncate=section.flag("truncate", True),
        attention_factor=section.real("attention_factor", 0.0),
        mscale=section.real("mscale", 0.0),
        mscale_all_dim=section.real("mscale_all_dim", 0.0),
    )


def _longrope(raw: RawConfig, section: RawConfig, pairs: int, _base: float) -> Fields:
    original, longest = original_positions(raw, section), raw.size("max_position_embeddings")
    short, long = (section.numbers(name, pairs) for name in ("short_factor", "long_factor"))
    factor = section.real("factor", longest / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return {
        "rotary_scaling": "longrope",
        "rotary_factors": as_text(short),
        "rotary_long_factors": as_text(long),
        "rotary_original_positions": original,
        "rotary_attention_factor": section.real("attention_factor", scale),
    }


def original_positions(raw: RawConfig, section: RawConfig) -> int:
    """The positions before they were stretched; Phi-3 says them outside of the section."""
    name = "original_max_position_embeddings"
    return raw.size(name, default=section.size(name, default=raw.size("max_position_embeddings")))


_SCALINGS = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
