"""Hyperparameters from the config.json of Google's Gemmas, and of others that normalize what their
branches add: OLMo's and EXAONE's; see huggingface_decoders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_configs import has_decoder
from launcher_scripts.checkpoint.sources.huggingface_decoders import (
    decoder,
    head_size_of,
    unwindowed,
)
from launcher_scripts.checkpoint.sources.huggingface_experts import (
    biased_experts,
    specified_experts,
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
from launcher_scripts.models.t5 import T5Config


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
    """The text model of a Gemma 4, whose heads have another size in layers without a window."""
    if raw("use_bidirectional_attention", default=None) != "vision":
        raw.only(use_bidirectional_attention=None)
    raw.defaults(head_dim=256, sliding_window=512)
    last = raw.layers("num_hidden_layers") - 1
    fields = windows(raw, lambda layer: (layer + 1) % 6 == 0 or layer == last)
    size, sizes, groups = _gemma4_heads(raw, (unwindowed(raw, fields) or "").split(","))
    shared = _shared_keys(raw, fields, 0)
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
        layer_input_size=_layer_inputs(raw, raw.size("vocab_size")),
        **_gemma4_experts(raw, shared),
        **_gemma4_turns(raw, size),
        **fields,
        **shared,
    )


def _shared_keys(raw: RawConfig, fields: Fields, default: int) -> Fields:
    """The last layers attend to the keys and values of the last one of their kind before them.

    fields: those of windows
    """
    count = raw.layers("num_hidden_layers")
    shared = raw.size("num_kv_shared_layers", default=default, minimum=0)
    if not shared:
        return {}
    full = (unwindowed(raw, fields) or "").split(",")
    first, sources = count - shared, [*range(count)]
    for layer in range(max(first, 0), count):
        kind = str(layer) in full
        earlier = [n for n in range(max(first, 0)) if (str(n) in full) == kind]
        if not earlier:
            text = "num_kv_shared_layers leaves no layer with keys of each kind"
            raw.problems.add(text, got=shared, choices=(f"0-{count - 1}",))
            return {}
        sources[layer] = earlier[-1]
    return {"layer_kv_sources": layer_list(sources)}


def _layer_inputs(raw: RawConfig, needed: int) -> int | None:
    """The size of layers' inputs; needed: the least ids that their tables have"""
    size = raw.size("hidden_size_per_layer_input", default=256, minimum=0)
    rows = raw.size("vocab_size_per_layer_input", default=262144)
    if size and rows < needed:
        text = "vocab_size_per_layer_input is not supported below vocab_size"
        raw.problems.add(text, got=rows, choices=(needed,))
    return size or None


def _gemma4_experts(raw: RawConfig, shared: Fields) -> Fields:
    """Experts beside the MLP, and MLPs of double width in layers that share keys."""
    width, wide = raw.size("intermediate_size"), raw.flag("use_double_wide_mlp", False)
    if not raw.flag("enable_moe_block", False):
        raw.unused("moe_intermediate_size", "num_experts", "top_k_experts")
        if not (wide and shared):
            return {}
        sources = map(int, shared["layer_kv_sources"].split(","))
        sizes = (width if source == layer else 2 * width for layer, source in enumerate(sources))
        return {"ffn_size": width, "layer_ffn_sizes": layer_list(sizes)}
    if shared:
        raw.only(use_double_wide_mlp=False)
    return {
        "ffn_size": raw.size("moe_intermediate_size"),
        "shared_expert_size": width,
        "shared_expert_gate": False,
        "num_experts": raw.size("num_experts"),
        "experts_per_token": raw.size("top_k_experts"),
        "normalized_experts": True,
        "expert_norms": True,
    }


def gemma3n(raw: RawConfig) -> GPTConfig:
    """The text model of a Gemma 3n."""
    raw.unused("altup_coef_clip")  # of the training
    raw.defaults(head_dim=256, rope_theta=1e6, sliding_window=512, num_key_value_heads=2)
    count = raw.layers("num_hidden_layers")
    fields = windows(raw, lambda layer: (layer + 1) % 5 == 0)
    turns, local_base = two_ropes(raw, head_size_of(raw), 10000.0)
    if local_base is None:
        local_base = raw.real("rope_local_base_freq", 10000.0)
    sizes: list[int] = []
    if isinstance(raw.raw.get("intermediate_size"), list):
        sizes = [*map(int, raw.numbers("intermediate_size", count))]
    pattern = raw("activation_sparsity_pattern", default=None)
    if pattern is None:
        sparsities = [0.95 if count > 10 and layer < 10 else 0.0 for layer in range(count)]
    else:
        sparsities = raw.numbers("activation_sparsity_pattern", count)
    if not all(0 <= value < 1 for value in sparsities):
        text = "activation_sparsity_pattern must be from 0 to below 1"
        raw.problems.add(text, got=pattern)
        sparsities = [0.0] * count
    streams = raw.size("altup_num_inputs", default=4, minimum=2)
    return decoder(
        raw,
        **({"ffn_size": max(sizes), "layer_ffn_sizes": layer_list(sizes)} if sizes else {}),
        embedding_scale=math.sqrt(raw.size("hidden_size")),
        activation=raw.activation("hidden_activation", "gelu_pytorch_tanh"),
        mlp_bias=False,
        qk_norm=True,
        value_norm=True,
        norm_placement="sandwich",
        softmax_scale=1.0,
        logits_softcap=raw.real("final_logit_softcapping", 30.0) or None,
        rotary_local_base=local_base,
        layer_input_size=_layer_inputs(raw, 1),
        num_streams=streams,
        active_stream=raw.size("altup_active_idx", default=0, minimum=0),
        scaled_stream=raw.flag("altup_correct_scale", True),
        laurel_rank=raw.size("laurel_rank", default=64),
        layer_sparsities=as_text(sparsities) if any(sparsities) else None,
        **turns,
        **fields,
        **_shared_keys(raw, fields, 15),
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


def _branch_norms(raw: RawConfig, **fields: Any) -> GPTConfig:
    """A Llama that normalizes what its branches add, not what they read."""
    raw.defaults(rms_norm_eps=1e-5)
    return decoder(raw, norm_placement="branch", qk_norm=True, mlp_bias=False, **fields)


def olmo2(raw: RawConfig, **fields: Any) -> GPTConfig:
    """OLMo 2 normalizes all heads' queries and keys together."""
    raw.defaults(eos_token_id=50279, pad_token_id=1)
    return _branch_norms(raw, joint_qk_norm=True, **fields)


def olmo3(raw: RawConfig) -> GPTConfig:
    """OLMo 3: an OLMo 2, of which the layers with a window turn without a scaling."""
    raw.defaults(rope_theta=500000.0)
    turns, local_base = two_ropes(raw, head_size_of(raw), 500000.0)
    fields = windows(raw, lambda layer: (layer + 1) % 4 == 0)
    if fields:
        fields["rotary_local_base"] = local_base or turns["rotary_base"]
    return olmo2(raw, **turns, **fields)


def _exaone4_full(raw: RawConfig, layers: int) -> Callable[[int], bool]:
    """Return a test for layers without a window, by sliding_window_pattern: every n-th, or G in a
    text that repeats, as LLLG, and the last layer."""
    pattern = raw("sliding_window_pattern", default=4)
    if not isinstance(pattern, str):
        interval = raw.size("sliding_window_pattern", default=4)
        return lambda layer: (layer + 1) % interval == 0
    if not pattern or set(pattern) - {"L", "G"}:
        choices = ("a number of layers", "L and G, as LLLG")
        raw.problems.add("sliding_window_pattern is not supported", got=pattern, choices=choices)
        pattern = "G"
    return lambda layer: pattern[layer % len(pattern)] == "G" or layer == layers - 1


def exaone4_attention(raw: RawConfig) -> Fields:
    """Read EXAONE 4's attention: if some layers have a window, those without it do not rotate."""
    if raw("sliding_window", default=None) is None:
        raw.unused("sliding_window_pattern", "layer_types")
        return {}
    layers = raw.layers("num_hidden_layers")
    fields = windows(raw, _exaone4_full(raw, layers))
    return {**fields, "unrotated_layers": unwindowed(raw, fields)}


def exaone4(raw: RawConfig) -> GPTConfig:
    raw.defaults(bos_token_id=0)
    return _branch_norms(raw, attention_bias=False, **exaone4_attention(raw))


def flex_olmo(raw: RawConfig) -> GPTConfig:
    """FlexOlmo: an OLMo 2 with experts."""
    raw.defaults(rms_norm_eps=1e-6, rope_theta=500000.0, eos_token_id=100257, pad_token_id=100277)
    return olmo2(raw, **specified_experts(raw))


def exaone_moe(raw: RawConfig) -> GPTConfig:
    """K-EXAONE: EXAONE 4's attention, behind norms of what it reads."""
    raw.defaults(rms_norm_eps=1e-5, eos_token_id=53, pad_token_id=0)
    raw.defaults(first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5)
    experts = biased_experts(raw)
    dense = (experts.get("dense_layers") or "").split(",")
    raw.only(
        is_moe_layer=[str(layer) not in dense for layer in range(raw.layers("num_hidden_layers"))]
    )
    return decoder(
        raw,
        qk_norm=True,
        attention_bias=False,
        mlp_bias=False,
        **exaone4_attention(raw),
        **experts,
    )


_SAME_OF_STACKS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "rms_norm_eps", "hidden_activation", "query_pre_attn_scalar"),
    *("sliding_window", "attn_logit_softcapping", "rope_parameters", "rope_theta", "rope_scaling"),
    *("attention_bias", "max_position_embeddings"),
)
_IMAGE_KEYS = (
    *("image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
    "mm_tokens_per_image",
)
_LINEAR = "rotary_interpolation_factor"


def t5gemma(raw: RawConfig) -> T5Config:
    encoder, decoder = raw.section("encoder"), raw.section("decoder")
    decoder.only(cross_attention_hidden_size=encoder.raw.get("hidden_size"))
    rope = decoder.section("rope_parameters", "rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind != "default":
        raw.problems.add("unknown rope_type", got=kind, choices=("default",))
    return _t5gemma(
        raw,
        encoder,
        decoder,
        pattern=2,
        max_positions=decoder.size("max_position_embeddings"),
        rotary_base=rope.real("rope_theta", decoder.real("rope_theta", 10000.0)),
        attention_softcap=decoder("attn_logit_softcapping", default=None),
    )


def t5gemma2(raw: RawConfig) -> T5Config:
    """A T5Gemma 2 without its images: Gemma 3's layers, with one attention in those of the decoder.

    Both stacks replace the embedding of the token behind an image, which no text has.
    """
    images, decoder = raw.section("encoder"), raw.section("decoder")
    behind = images.raw.get("eoi_token_index", 256000)
    if behind is not None and behind < decoder.size("vocab_size"):
        raw.notes.append(f"token {behind}, which ends an image, has the embedding of its row")
    encoder = images.section("text_config")
    images.unused("vision_config", *_IMAGE_KEYS)
    raw.unused(*_IMAGE_KEYS)
    for stack in (encoder, decoder):
        stack.unused("sliding_window_pattern", "_sliding_window_pattern", "classifier_dropout_rate")
    size = decoder.size("head_dim", default=256)
    turns, local_base = two_ropes(decoder, size, 10000.0)
    for name in sorted(turns.keys() - {"position_embedding", "rotary_base", _LINEAR}):
        if turns[name] != 1.0:
            raw.problems.add(f"{name} of a T5Gemma 2 is not supported", got=turns[name])
    pattern = decoder.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _t5gemma(
        raw,
        encoder,
        decoder,
        pattern=pattern,
        max_positions=decoder.size("max_position_embeddings", default=131072),
        rotary_base=turns["rotary_base"],
        rotary_interpolation_factor=turns.get(_LINEAR),
        rotary_local_base=decoder.real("rope_local_base_freq", 10000.0)
        if local_base is None
        else local_base,
        merged_attention=True,
        qk_norm=True,
    )


def _t5gemma(
    raw: RawConfig, encoder: RawConfig, decoder: RawConfig, pattern: int, **fields: Any
) -> T5Config:
    """pattern: of so many layers the last one has no window, unless layer_types says it

    fields: what the models say otherwise
    """
    for name in _SAME_OF_STACKS:
        if encoder.raw.get(name) != decoder.raw.get(name):
            message = f"{name} of encoder and decoder must be the same"
            raw.problems.add(message, got=(encoder.raw.get(name), decoder.raw.get(name)))
    encoder.unused(*_SAME_OF_STACKS, "final_logit_softcapping")  # it has no logits
    for stack in (encoder, decoder):
        stack.only(attention_bias=False, use_bidirectional_attention=False)
    raw.unused("vocab_size")  # it repeats the decoder's
    hidden, heads = decoder.size("hidden_size"), decoder.size("num_attention_heads")
    window = decoder("sliding_window", default=None)
    encoder_only = not has_decoder(raw)
    return T5Config(
        vocab_size=decoder.size("vocab_size"),
        num_layers=encoder.layers("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        head_size=decoder.size("head_dim", default=hidden // heads),
        ffn_size=decoder.size("intermediate_size"),
        num_decoder_layers=0 if encoder_only else decoder.layers("num_hidden_layers"),
        position_embedding="rope",
        norm_eps=decoder.real("rms_norm_eps", default=1e-6),
        activation=decoder.activation("hidden_activation", "gelu_pytorch_tanh"),
        gated=True,
        attention_scale=decoder.size("query_pre_attn_scalar", default=256) ** -0.5,
        tied_embeddings="lm_head.weight" not in raw.keys,
        shared_embeddings="decoder.embed_tokens.weight" not in raw.keys,
        encoder_only=encoder_only,
        start_id=raw.token("decoder_start_token_id", decoder.token("bos_token_id", 2)),
        end_id=decoder.token("eos_token_id", 1),
        pad_id=decoder.token("pad_token_id", 0),
        num_kv_heads=decoder.size("num_key_value_heads", default=heads),
        sandwich_norms=True,
        zero_centered_norm=True,
        embedding_scale=hidden**0.5,
        logits_softcap=decoder("final_logit_softcapping", default=None),
        sliding_window=window,
        full_attention_layers=_full_layers(encoder, decoder, pattern) if window else None,
        **fields,
    )


def _full_layers(encoder: RawConfig, decoder: RawConfig, pattern: int) -> str | None:
    """The numbers of the layers without a window, which both stacks must agree on."""
    kinds_of_pattern = [*["sliding_attention"] * (pattern - 1), "full_attention"]
    stacks = [stack("layer_types", default=kinds_of_pattern * 500) for stack in (encoder, decoder)]
    kinds = max(stacks, key=len)
    for name, item in zip(("encoder", "decoder"), stacks, strict=True):
        if item != kinds[: len(item)] or not set(item) <= {"sliding_attention", "full_attention"}:
            encoder.problems.add(f"layer_types of the {name} are not supported", got=item)
    max_layers = max(stack.layers("num_hidden_layers") for stack in (encoder, decoder))
    kinds = kinds[:max_layers]
    return layer_list(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
