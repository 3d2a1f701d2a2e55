"""config.json files, as transformers 4 and 5 write them, read as hyperparameters."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from launcher_scripts.checkpoint.fastertransformer import config_ini
from launcher_scripts.checkpoint.sources import huggingface_configs as configs
from launcher_scripts.checkpoint.sources import huggingface_decoders as decoders
from launcher_scripts.checkpoint.sources import huggingface_experts as experts
from launcher_scripts.checkpoint.sources import huggingface_gemma as gemma
from launcher_scripts.checkpoint.sources.huggingface_architectures import architecture, described
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.engine.model import rotary
from tests.checkpoint import tiny_models

T5_KEYS = ("shared.weight", "decoder.block.0.layer.0.SelfAttention.q.weight")
T5 = {
    "model_type": "t5",
    "vocab_size": 100,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
}
BART = {
    "model_type": "bart",
    "vocab_size": 100,
    "d_model": 16,
    "max_position_embeddings": 20,
    "activation_function": "gelu",
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
}


def raw(values: dict[str, Any], *keys: str) -> RawConfig:
    return RawConfig(values, keys, Problems("config.json"))


@pytest.mark.parametrize(
    ("said", "scale"),
    [
        ({}, 0.25),  # the original T5 says nothing
        ({"tie_word_embeddings": True}, 0.25),
        ({"tie_word_embeddings": False}, 1.0),  # transformers 4, T5 v1.1
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, 1.0),  # transformers 5
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, 0.25),
        ({"tie_word_embeddings": True, "model_type": "mt5"}, 1.0),
    ],
)
def test_t5_logits_scale_comes_from_the_raw_file(said: dict[str, Any], scale: float) -> None:
    assert configs.t5(raw({**T5, **said}, *T5_KEYS)).logits_scale == scale


@pytest.mark.parametrize(
    ("said", "scale"),
    [({}, 0.25), ({"tie_word_embeddings": True}, 0.25), ({"tie_word_embeddings": False}, 1.0)],
)
def test_umt5_scales_its_logits_where_its_file_says_that_its_tables_are_tied(
    said: dict[str, Any], scale: float
) -> None:
    config = configs.umt5(raw({**T5, "model_type": "umt5", **said}, *T5_KEYS))
    assert (config.logits_scale, config.relative_bias_per_layer) == (scale, True)


def test_t5_head_is_tied_exactly_when_no_head_is_stored() -> None:
    untied = {**T5, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert configs.t5(raw(untied, *T5_KEYS)).tied_embeddings
    assert not configs.t5(raw(untied, *T5_KEYS, "lm_head.weight")).tied_embeddings


@pytest.mark.parametrize(
    ("said", "activation", "gated"),
    [("relu", "relu", False), ("gated-gelu", "gelu", True), ("gated-silu", "silu", True)],
)
def test_t5_activation(said: str, activation: str, gated: bool) -> None:
    config = configs.t5(raw({**T5, "feed_forward_proj": said}, *T5_KEYS))
    assert (config.activation, config.gated) == (activation, gated)


def test_t5_without_decoder_tensors_is_an_encoder() -> None:
    config = configs.t5(raw(T5, "shared.weight"))
    assert config.encoder_only
    assert config.num_decoder_layers == 0


def test_every_missing_size_is_reported_at_once() -> None:
    config = raw({"model_type": "opt", "num_attention_heads": 2})
    with pytest.raises(CheckpointError):  # no token id is one of a vocabulary that is unknown
        configs.opt(config)
    assert sorted(message.split()[0] for message in config.problems.messages) == [
        "ffn_dim",
        "hidden_size",
        "max_position_embeddings",
        "num_hidden_layers",
        "vocab_size",
    ]


@pytest.mark.parametrize(
    ("pattern", "full"), [(4, "3"), (5, "4"), ("LLG", "2,5"), ("LLLG", "3,5"), (1, "0,1,2,3,4,5")]
)
def test_exaone4_s_layers_without_a_window_do_not_turn(pattern: int | str, full: str) -> None:
    sizes = {"vocab_size": 67, "intermediate_size": 8, "max_position_embeddings": 32}
    said = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 6, **sizes}
    config = gemma.exaone4(raw({**said, "sliding_window": 4, "sliding_window_pattern": pattern}))
    assert config.unrotated_layers == full
    windowed = full.count(",") < 5
    assert config.full_attention_layers == (full if windowed else None)
    assert config.sliding_window == (4 if windowed else None)


@pytest.mark.parametrize(("kinds", "full"), [("SSF", "2"), ("FSF", "0,2"), ("SSS", None)])
def test_t5gemma_names_its_layers_without_a_window_where_it_has_any(
    tmp_path: Path, kinds: str, full: str | None
) -> None:
    names = {"S": "sliding_attention", "F": "full_attention"}
    types = {"num_hidden_layers": 3, "layer_types": [names[kind] for kind in kinds]}
    stack = {**tiny_models.T5GEMMA_STACK, **types}
    said = raw({"is_encoder_decoder": True, "encoder": stack, "decoder": stack})
    config = gemma.t5gemma(said)
    assert (config.sliding_window, config.full_attention_layers) == (7, full)
    text = config_ini.format_config(config, 1, "fp32")
    assert ("full_attention_layers" in text) == (full is not None)
    if full is None:  # earlier exports have the key, with nothing behind it
        text += "full_attention_layers = \n"
    (tmp_path / "config.ini").write_text(text)
    assert config_ini.read_config(tmp_path).config == config


@pytest.mark.parametrize("read", [gemma.gemma, gemma.gemma2, gemma.gemma3])
def test_a_gemma_s_heads_are_wide_where_it_does_not_say_how(read: Any) -> None:
    sizes = {"vocab_size": 67, "intermediate_size": 8, "max_position_embeddings": 32}
    said = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 6, **sizes}
    assert read(raw(said)).head_size == 256
    assert read(raw({**said, "head_dim": 8})).head_size == 8


@pytest.mark.parametrize(
    ("read", "values", "word"),
    [
        (configs.gpt2, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
        (configs.bloom, {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        (decoders.llama, {"rope_scaling": {"rope_type": "ntk"}}, "rope_type"),
        (gemma.gemma2, {"layer_types": ["chunked_attention"]}, "layer_types"),
        (gemma.gemma2, {"use_bidirectional_attention": True}, "bidirectional"),
        (configs.falcon, {"new_decoder_architecture": True, "parallel_attn": False}, "parallel"),
        (decoders.llama, {"sliding_window": 4096}, "sliding_window"),
        (configs.agm, {"use_alibi_position_embedding": True}, "alibi"),
        (configs.gpt2, {"activation_function": "mish"}, "activation_function"),
        (configs.gpt_bigcode, {"multi_query": False}, "multi_query"),
        (configs.gpt_neo, {"num_layers": 2}, "attention_types"),
        (configs.gpt_neo, {"attention_types": [[["strided"], 1]]}, "attention_types"),
        (configs.gpt_neo, {"attention_types": [["global", "local"]]}, "attention_types"),
        (
            configs.gpt_neo,
            {"num_layers": 10**12, "attention_types": [[["global"], 10**12]]},
            "attention_types",
        ),
        (decoders.phi, {"qk_layernorm": True}, "qk_layernorm"),
        (decoders.cohere2, {"eos_token_id": 2, "rotary_pct": 0.5}, "rotary_pct"),
        (
            decoders.smollm3,
            {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "no_rope_layers": [2]},
            "no_rope_layers",
        ),
        (
            gemma.exaone4,
            {"bos_token_id": 1, "sliding_window": 4, "sliding_window_pattern": "LLX"},
            "sliding_window_pattern",
        ),
        (configs.codegen, {"n_head": 6}, "n_head"),
        (configs.mpt, {"attn_config": {"alibi": False}}, "alibi"),
        (configs.mpt, {"no_bias": False}, "no_bias"),
        (decoders.gpt_neox, {"rope_theta": 500.0, "partial_rotary_factor": 0.25}, "rope_theta"),
    ],
)
def test_what_the_families_cannot_hold_is_refused(read: Any, values: Any, word: str) -> None:
    config = raw({"vocab_size": 67, **values})
    read(config)
    assert any(word in message and "choices" in message for message in config.problems.messages)


@pytest.mark.parametrize(
    ("said", "forced"),
    [
        ({}, None),
        ({"forced_bos_token_id": None}, None),
        ({"forced_bos_token_id": 4}, 4),
        ({"force_bos_token_to_be_generated": True, "bos_token_id": 6}, 6),
        ({"force_bos_token_to_be_generated": True}, 0),
    ],
)
def test_barts_forced_first_token(said: dict[str, Any], forced: int | None) -> None:
    assert configs.bart(raw({**BART, **said})).forced_bos_id == forced


def test_a_forced_token_outside_of_the_vocabulary() -> None:
    with pytest.raises(CheckpointError, match=r"forced_bos_id .* got 100; choices: 0-99"):
        configs.bart(raw({**BART, "forced_bos_token_id": 100}))


def test_agm_is_told_from_bart_by_its_own_keys() -> None:
    where = Path("config.json")
    assert architecture({"model_type": "bart"}, where).family == "bart"
    assert architecture({"model_type": "bart", "mup_scale": True}, where).family == "agm"


def test_agm_attention_scale() -> None:
    values = {"model_type": "bart", "d_model": 32, "decoder_attention_heads": 2}
    assert configs.agm(raw({**values, "mup_scale": True})).attention_scale == 0.5
    assert configs.agm(raw({**values, "mup_scale": False})).attention_scale == 0.25
    assert configs.agm(raw({**values, "scale_attention": False})).attention_scale == 1.0


def test_unknown_model_types_are_answered_with_the_known_ones() -> None:
    with pytest.raises(
        CheckpointError,
        match="got 'rwkv'; choices: afmoe, agm, apertus, arcee, aya_vision, bamba, bart",
    ):
        architecture({"model_type": "rwkv"}, Path("config.json"))


def test_relatives_that_are_not_read_say_why() -> None:
    with pytest.raises(
        CheckpointError, match="not supported: its layers have Mamba-1; got 'jamba'"
    ):
        architecture({"model_type": "jamba"}, Path("config.json"))


@pytest.mark.parametrize(
    ("said", "caps"),
    [({}, (50.0, 30.0)), ({"attn_logit_softcapping": None, "sliding_window": None}, (None, 30.0))],
)
def test_keys_that_a_file_lacks_mean_what_the_class_takes_for_them(said: Any, caps: Any) -> None:
    sizes = {"vocab_size": 67, "intermediate_size": 8, "max_position_embeddings": 32}
    sizes |= {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    found = gemma.gemma2(raw({"model_type": "gemma2", **sizes, **said}))
    assert (found.attention_softcap, found.logits_softcap) == caps
    assert found.sliding_window == (None if said else 4096)
    assert (found.start_id, found.end_id, found.pad_id) == (2, 1, 0)


IDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "sliding_window": 7,
}


@pytest.mark.parametrize(
    ("read", "said", "fields"),
    [
        (configs.t5, {**T5, "feed_forward_proj": "gated-gelu"}, {"activation": "gelu"}),
        (
            configs.t5,
            {**T5, "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
            {"activation": "gelu_erf", "gated": True},
        ),
        (configs.t5, {**T5, "is_gated_act": True}, {"activation": "relu", "gated": True}),
        (
            configs.switch_transformers,
            {**T5, "num_layers": 4, "num_sparse_encoder_layers": 1, "encoder_sparse_step": 2},
            {"encoder_expert_layers": "1,3"},
        ),
        (
            experts.qwen2_moe,
            {**SIZES, "num_experts": 4, "use_sliding_window": True, "max_window_layers": 3},
            {"full_attention_layers": "1,3"},
        ),
        (
            decoders.ministral3,
            {**SIZES, "model_type": "ministral3"},
            {"rotary_scaling": "factors", "rotary_base": 1e6},
        ),
        (
            experts.gpt_oss,
            {**SIZES, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
            | IDS,
            {"rotary_scaling": "factors", "rotary_base": 150000.0},
        ),
        (
            decoders.cwm,
            {**SIZES, **IDS, "model_type": "cwm"},
            {"rotary_scaling": "llama3", "rotary_scaling_factor": 16.0},
        ),
        (
            experts.ernie4_5_moe,
            {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_layer_end_index": 4},
            {"dense_layers": "0"},
        ),
        (
            configs.gpt2,
            {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
            | {"scale_attn_weights": False},
            {"softmax_scale": 1.0},
        ),
    ],
)
def test_keys_rule_over_one_another_as_in_the_classes(
    read: Callable[[RawConfig], Any], said: dict[str, Any], fields: dict[str, Any]
) -> None:
    config = read(raw(said, *T5_KEYS))
    assert {name: getattr(config, name) for name in fields} == fields


GPT2 = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize("value", ["x", "16", 1.5, 0, -1, True, [], {}])
def test_sizes_are_whole_numbers(value: Any) -> None:
    for name in ("n_embd", "n_layer", "n_head", "n_positions", "n_inner"):
        found = raw({**GPT2, "n_positions": 8, name: value})
        with pytest.raises(CheckpointError, match=f"{name} .*must be a whole number from 1 on"):
            checked(configs.gpt2, found)


def checked(read: Any, found: RawConfig) -> None:
    """What huggingface.open does with a configuration."""
    read(found)
    found.problems.raise_if_any(CheckpointError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", "x"),
        ("attention_bias", "no"),
        ("rope_scaling", 3),
        ("rope_scaling", {"rope_type": 3}),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}),
        ("hidden_act", ["silu"]),
        ("eos_token_id", "</s>"),
        ("bos_token_id", [[1]]),
    ],
)
def test_other_values_have_their_types(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"must be|unknown"):
        checked(decoders.llama, raw({**LLAMA, key: value}))


def test_a_token_below_zero_is_none() -> None:
    found = decoders.llama(raw({**LLAMA, "pad_token_id": -1, "eos_token_id": [7, 8]}))
    assert (found.pad_id, found.end_id) == (None, 7)


def test_scalings_without_their_numbers_are_refused() -> None:
    found = raw({**LLAMA, "rope_scaling": {"type": "su", "short_factor": [1]}})
    with pytest.raises(CheckpointError, match="long_factor must be a list of 2 numbers"):
        checked(decoders.phi3, found)
    found = raw({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    with pytest.raises(CheckpointError, match="llama3 needs rotary_low_frequency_factor"):
        checked(decoders.llama, found)


def _published_mimo(said: dict[str, Any]) -> dict[str, Any]:
    turns = said.pop("rope_parameters")
    kinds, mlps = said.pop("layer_types"), said.pop("mlp_layer_types")
    window, groups = said.pop("sliding_window") - 1, said["num_key_value_heads"]
    return said | {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in mlps],
        "layernorm_epsilon": said.pop("rms_norm_eps"),
        "sliding_window": window,
        "sliding_window_size": window,
        "rope_theta": turns["full_attention"]["rope_theta"],
        "swa_rope_theta": turns["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": 0.334,
        "swa_num_key_value_heads": 2 * groups,
        "swa_num_attention_heads": said["num_attention_heads"],
        "swa_head_dim": said["head_dim"],
        "swa_v_head_dim": said["v_head_dim"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_chunk_size": 128,
        "routed_scaling_factor": None,
    }


def _published_lfm2(said: dict[str, Any]) -> dict[str, Any]:
    return said | {"block_ff_dim": said.pop("intermediate_size")}


SPELLINGS: dict[str, Any] = {
    "mimo_v2_flash": _published_mimo,
    "lfm2": _published_lfm2,
    "deepseek_v3": lambda said: said | {"model_type": "kimi_k2"},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_maker_s_own_keys_say_what_those_of_transformers_do(name: str) -> None:
    if name == "lfm2":
        plain = {**tiny_models.LLAMA, "model_type": "lfm2", "layer_types": ["conv"] * 2}
    else:
        kind, values = tiny_models.LLAMAS[name]
        made = getattr(transformers, f"{kind}Config")(**{**tiny_models.LLAMA, **values})
        plain = json.loads(made.to_json_string(use_diff=False))
    configs_read = []
    for said in (plain, SPELLINGS[name](copy.deepcopy(plain))):
        full = described(said)
        values_read = RawConfig(full, (), Problems("config.json"))
        configs_read.append(architecture(full, Path("config.json")).read(values_read))
        values_read.unused("rope_interleave")  # the names of its tensors say it
        values_read.check_keys()
        assert values_read.problems.messages == []
    assert configs_read[0] == configs_read[1]


def test_marks_of_layers_that_contradict_their_kinds_are_refused() -> None:
    kinds = ["full_attention", "sliding_attention"]
    said = {**tiny_models.LLAMA, "model_type": "mimo_v2_flash", "layer_types": kinds}
    full = described(said | {"hybrid_layer_pattern": [0, 0]})
    values = RawConfig(full, (), Problems("config.json"))
    values.check_keys()
    assert any("hybrid_layer_pattern is not known" in text for text in values.problems.messages)


def test_positions_behind_the_first_chunk_of_dual_attention_are_left_out() -> None:
    chunks = {"chunk_size": 24, "local_size": 4, "original_max_position_embeddings": 24}
    said = {**tiny_models.LLAMA, "model_type": "qwen2", "dual_chunk_attention_config": chunks}
    values = RawConfig(said, (), Problems("config.json"))
    assert decoders.qwen2(values).max_positions == 20
    assert "of 32 positions the first 20 are served" in values.notes[0]


def test_a_llama_4_may_turn_without_a_band_between_slow_and_fast() -> None:
    """Scout's low_freq_factor and high_freq_factor are both 1."""
    turns = rotary._llama3(torch.tensor([1.0, 0.01]), 16.0, 64, 1.0, 1.0)
    assert turns.tolist() == pytest.approx([1.0, 0.01 / 16])


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_turns_that_are_not_of_a_kind_of_layers_are_refused(name: str) -> None:
    """transformers' classes take their defaults then, whatever the number says."""
    kind = {"olmo3": "Olmo3", "gemma3_text": "Gemma3Text"}[name]
    turns = {"rope_type": "default", "rope_theta": 100.0}
    made = getattr(transformers, f"{kind}Config")(rope_parameters=dict(turns))
    assert made.rope_parameters["full_attention"]["rope_theta"] != 100.0
    said = {**tiny_models.LLAMA, "rope_parameters": turns, "model_type": name, "eos_token_id": 2}
    values = raw(said)
    architecture(said, Path("config.json")).read(values)
    assert "no section for a kind of layers" in values.problems.messages[0]


def test_windows_may_begin_with_the_first_layer() -> None:
    said = {**tiny_models.LLAMA, "use_sliding_window": True, "sliding_window": 4}
    values = raw({**said, "max_window_layers": 0, "model_type": "qwen3"})
    config = decoders.qwen3(values)
    assert (config.sliding_window, config.full_attention_layers) == (4, None)
    assert values.problems.messages == []


def test_a_dbrx_turns_by_the_base_of_its_attention() -> None:
    """As published; transformers' class takes 10,000 for it."""
    attention = {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000}
    mlp = {"ffn_hidden_size": 12, "model_type": "", "moe_num_experts": 4, "moe_top_k": 2}
    said = {"model_type": "dbrx", "d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}
    said |= {"vocab_size": 67, "attn_config": attention, "ffn_config": mlp}
    made = transformers.DbrxConfig(**copy.deepcopy(said))
    assert made.rope_parameters["rope_theta"] == 10000
    values = raw(said)
    config = decoders.dbrx(values)
    assert (values.check_keys(), values.problems.messages) == ((), [])
    assert (config.rotary_base, config.attention_clip, config.num_kv_heads) == (500000, 8, 2)
    assert (config.num_experts, config.normalized_experts) == (4, True)
    values = raw(json.loads(made.to_json_string(use_diff=False)))
    decoders.dbrx(values)
    values.check_keys()
    (message,) = values.problems.messages
    assert (
        "rope_theta of attn_config and of rope_parameters differ; got [500000.0, 10000" in message
    )
    changes = {"moe_normalize_expert_weights": 2.0, "uniform_expert_assignment": True}
    values = raw({**said, "ffn_config": {**mlp, **changes}})
    decoders.dbrx(values)
    for key, message in zip(sorted(changes), sorted(values.problems.messages), strict=True):
        assert f"{key} is not supported" in message
    values = raw({**said, "ffn_config": {**mlp, "moe_normalize_expert_weights": None}})
    assert decoders.dbrx(values).normalized_experts is False
