"""GPTConfig from the config.json of Google's Gemmas; see huggingface_decoders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import (
    decoder,
    head_size_of,
    unwindowed,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import (
    Fields,
    as_text,
    rope_of,
    two_ropes,
    windows,
)
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig


def gemma(raw: RawConfig, **fields: Any) -> GPTConfig:
    """Gemma 1; its MLP is the tanh form of GELU whatever the older key `hidden_act` says."""
    raw.only(use_bidirectional_attention=False)
    raw.defaults(head_dim=256)
    old = raw.text("hidden_act", "gelu_pytorch_tanh")
    activation = raw.activation("hidden_activation", "gelu_pytorch_tanh" if old == "gelu" else old)
    return decoder(
        raw,
        zero_centered_norm=True,
        embedding_scale=math.sqrt(raw.size("hidden_size")),
        activation=activation,
        **fields,
    )


def gemma2(raw: RawConfig) -> GPTConfig:
    return gemma(raw, **_gemma2(raw), **windows(raw, lambda layer: layer % 2 == 1))


def gemma3(raw: RawConfig) -> GPTConfig:
    """Gemma 3's text model: layers with a window turn by a base of their own."""
    raw.defaults(head_dim=256, rope_theta=1e6)
    turns, local_base = two_ropes(raw, head_size_of(raw), 10000.0)
    if local_base is None:
        local_base = raw.real("rope_local_base_freq", 10000.0)
    pattern = raw.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return gemma(
        raw,
        qk_norm=True,
        rotary_local_base=local_base,
        **turns,
        **_gemma2(raw),
        **windows(raw, lambda layer: (layer + 1) % pattern == 0),
    )


def gemma4(raw: RawConfig) -> GPTConfig:
    """The text model of a dense Gemma 4, whose heads have another size in layers without a window;
    of those with embeddings of every layer, shared keys or experts beside the MLP none is served.
    """
    raw.unused("vocab_size_per_layer_input", "use_double_wide_mlp")
    raw.unused("moe_intermediate_size", "num_experts", "top_k_experts")
    raw.only(num_kv_shared_layers=0, enable_moe_block=False)
    if raw("use_bidirectional_attention", default=None) != "vision":
        raw.only(use_bidirectional_attention=None)
    inputs = raw.size("hidden_size_per_layer_input", default=256, minimum=0)
    if inputs:
        text = "hidden_size_per_layer_input is not supported"
        raw.problems.add(text, got=inputs, choices=(0,))
    raw.defaults(head_dim=256, sliding_window=512)
    last = raw.layers("num_hidden_layers") - 1
    fields = windows(raw, lambda layer: (layer + 1) % 6 == 0 or layer == last)
    size, sizes, groups = _gemma4_heads(raw, (unwindowed(raw, fields) or "").split(","))
    return decoder(
        raw,
        head_size=size,
        embedding_scale=math.sqrt(raw.size("hidden_size")),
        activation=raw.activation("hidden_activation", "gelu_pytorch_tanh"),
        mlp_bias=False,
        qk_norm=True,
        value_norm=True,
        layer_scale=True,
        norm_placement="sandwich",
        softmax_scale=1.0,
        logits_softcap=raw.real("final_logit_softcapping", 0.0) or None,
        layer_head_sizes=layer_list(sizes),
        layer_num_kv_heads=layer_list(groups),
        **_gemma4_turns(raw, size),
        **fields,
    )


def _gemma4_heads(raw: RawConfig, full: Sequence[str]) -> tuple[int, list[int], list[int]]:
    """The size of heads in layers without a window, which `full` names, and of every layer its
    heads' size and its number of keys and values.
    """
    size = raw.size("head_dim")
    groups = raw.size("num_key_value_heads", default=4)
    overrides = raw.section("per_layer_config")
    of_full = raw.size("num_global_key_value_heads", default=groups)
    others = {
        "head_dim": raw.size("global_head_dim", default=512),
        "num_key_value_heads": of_full if raw.flag("attention_k_eq_v", False) else groups,
    }
    # transformers writes the numbers of layers with zeros before them: 05 of 30 layers.
    names = {name.lstrip("0") or "0": name for name in overrides.raw}
    sizes, counts, kinds = [], [], set()
    for layer in map(str, range(raw.layers("num_hidden_layers"))):
        local = RawConfig(others if layer in full else {}, (), raw.problems)
        if "per_layer_config" in raw.raw:  # which rules, also where it is empty
            local = overrides.section(names.get(layer, layer))
        sizes.append(local.size("head_dim", default=size))
        counts.append(local.size("num_key_value_heads", default=groups))
        kinds.add((layer in full, sizes[-1]))
    if len(kinds) > len({is_full for is_full, _ in kinds}):
        raw.problems.add("per_layer_config: heads of layers of one kind differ", got=sizes)
    return next((width for is_full, width in kinds if is_full), size), sizes, counts


def _gemma4_turns(raw: RawConfig, size: int) -> Fields:
    """Pairs of a head that do not turn in layers without a window are the last ones of each half,
    not the last of the head.
    """
    parameters = raw.section("rope_parameters")
    section, local = (parameters.section(f"{kind}_attention") for kind in ("full", "sliding"))
    local.only(rope_type="default")
    fields: Fields = {"rotary_local_base": local.real("rope_theta", 10000.0)}
    if section.text("rope_type", "proportional") != "proportional":
        return {**rope_of(raw, section, size), **fields}
    turning = int(section.real("partial_rotary_factor", 0.25) * size // 2)
    factor = section.real("factor", 1.0)
    return {
        **fields,
        "position_embedding": "rope",
        "rotary_base": section.real("rope_theta", 1e6),
        "rotary_scaling": "factors",
        "rotary_factors": as_text(
            factor if pair < turning else math.inf for pair in range(size // 2)
        ),
    }


def vaultgemma(raw: RawConfig) -> GPTConfig:
    """A Gemma 2 without the norms of what its branches add."""
    fields = {**_gemma2(raw), "norm_placement": "pre"}
    return gemma(raw, **fields, **windows(raw, lambda layer: layer % 2 == 1))


def _gemma2(raw: RawConfig) -> Fields:
    """Read the fields that Gemma 2 and 3 have beyond Gemma 1."""
    raw.unused("sliding_window_size")  # the first name of sliding_window, which transformers reads
    return {
        "norm_placement": "sandwich",
        "softmax_scale": raw.size("query_pre_attn_scalar", default=256) ** -0.5,
        "attention_softcap": raw.real("attn_logit_softcapping", 0.0) or None,
        "logits_softcap": raw.real("final_logit_softcapping", 0.0) or None,
    }
