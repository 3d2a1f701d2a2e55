"""Every key of a config.json is read, known to change nothing, or refused by its name.

What transformers 4 wrote is in tests/data; what transformers 5 writes, its own classes say.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM

from launcher_scripts.checkpoint.sources.huggingface_architectures import (
    ARCHITECTURES,
    architecture,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import (
    ACTIVATIONS,
    IRRELEVANT,
    OFF,
    RawConfig,
)
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import change_json, export_folder, refused_export
from tests.checkpoint.tiny_models import LLAMA

DATA = Path(__file__).parent.parent / "data" / "huggingface"
VERSION_4 = json.loads((DATA / "transformers_4_configs.json").read_text())
OURS = ("agm", "nemotron-nas")  # of a fork of transformers, and of code beside the weights
NAMES = sorted(set(ARCHITECTURES) - set(OURS))
# Keys of published files that no class of today writes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"aux_loss_alpha": 0.001, "seq_aux": True},
    "nemotron_h": {"num_mtp_layers": 0},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "gpt2": {
        "n_ctx": 1024,
        "apply_query_key_layer_scaling": True,
        "normalize_attention_scores": True,
        "task_specific_params": {"text-generation": {"do_sample": True}},
    },
    "gpt_bigcode": {
        "inference_runner": 0,
        "max_batch_size": None,
        "max_sequence_length": None,
        "pad_key_length": True,
        "pre_allocate_kv_cache": False,
        "runner_max_sequence_length": None,
        "validate_runner_input": True,
    },
    "bloom": {
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "n_embed": 64,
        "n_inner": None,
        "num_attention_heads": 8,
        "offset_alibi": 100,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
    },
    "opt": {"prefix": "</s>", "activation_dropout": 0.0, "torch_dtype": "float16"},
    "llama": {
        "is_llama_config": True,
        "max_sequence_length": 2048,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "unsloth_fixed": True,
        "unsloth_version": "2024.11.7",
        "_flash_attn_2_enabled": True,
        "attn_implementation": "flash_attention_2",
        "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
        "_attn_implementation": "sdpa",
        "_attn_implementation_autoset": True,
        "ep_size": 1,
        "experts_implementation": "grouped_mm",
        "loss_type": "ForCausalLMLoss",
        "model_max_length": 4096,
        "name_or_path": "a/b",
        "neftune_noise_alpha": 5.0,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "truncation_side": "right",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "attn_factor": 1.0},
    },
    "apertus": {"qk_norm": True, "post_norm": False},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5": {"compression_ratio": 1.0},
    "exaone_moe": {"num_hidden_layers": 2, "is_moe_layer": [False, True]},
    "falcon_h1": {"time_step_rank": "auto"},
    "hunyuan_v1_dense": {
        "anyres_pooling_size": 2,
        "enable_lm_head_fp32": True,
        "im_start_id": 4,
        "num_experts": 1,
        "pad_id": 3,
    },
    "hunyuan_v1_moe": {"routed_scaling_factor": 1.0},
    "hy_v3": {"first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    "nemotron": {"rope_percent": 0.5, "kv_channels": 128, "head_dim": 128},
    "qwen3": {
        "dual_chunk_attention_config": {"chunk_size": 9, "local_size": 1},
        "max_position_embeddings": 8,
    },
    "smollm3": {"max_window_layers": 28},
    "stablelm": {"norm_eps": 1e-5, "layer_norm_eps": 1e-5, "rotary_scaling_factor": 1.0},
    "qwen2": {"use_mrope": False, "sliding_window": None, "initializer_cutoff_factor": 2.0},
    "t5": {"n_positions": 512, "output_past": True},
    "umt5": {"scalable_attention": True},
    "switch_transformers": {"capacity_factor": 1.0, "num_selected_experts": 1},
    "bart": {
        "_num_labels": 3,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "author": "somebody",
        "do_blenderbot_90_layernorm": False,
        "extra_pos_embeddings": 2,
        "force_bos_token_to_be_generated": True,
        "gradient_checkpointing": False,
        "normalize_before": False,
        "normalize_embedding": True,
        "replacing_rate": 0,
        "save_step": 58,
        "static_position_embeddings": False,
        "student_decoder_layers": None,
    },
    "mbart": {"add_final_layer_norm": True, "normalize_before": True, "max_new_tokens": 9},
    "m2m_100": {"early_stopping": True, "tokenizer_class": "NllbTokenizer"},
    "pegasus": {
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "classif_dropout": 0.0,
        "extra_pos_embeddings": 1,
        "force_bos_token_to_be_generated": False,
        "length_penalty": 0.6,
        "normalize_before": True,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "task_specific_params": {"summarization_xsum": {"max_length": 64}},
    },
    "marian": {
        "_num_labels": 3,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "bad_words_ids": [[66]],
        "decoder_vocab_size": 67,
        "normalize_before": False,
        "normalize_embedding": False,
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": True,
    },
    "cohere2": {
        "cache_implementation": "hybrid",
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
    },
    "mpt": {
        "emb_pdrop": 0,
        "init_config": {"name": "kaiming_normal_", "fan_mode": "fan_in"},
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "verbose": 0,
    },
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "codegen": {"gradient_checkpointing": False, "scale_attn_weights": True},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    "falcon": {"apply_residual_connection_post_layernorm": False, "n_head": 71, "n_layer": 32},
    "gemma2": {"cache_implementation": "hybrid", "sliding_window_size": 4096},
    "gemma3_text": {"sliding_window_pattern": 6, "cache_implementation": "hybrid"},
    "phi3": {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "a.B"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
    },
    "starcoder2": {
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-05,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
    "mixtral": {"router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
    "gpt_oss": {
        "attention_bias": True,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "minimax_m2": {
        "attn_type_list": [1, 1],
        "num_hidden_layers": 2,
        "head_dim": 128,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
}


def of_version_4(name: str) -> dict[str, Any]:
    """What its class wrote, or of a class that is younger, what all write."""
    return VERSION_4["common"] | VERSION_4["models"].get(name, {"model_type": name})


def of_today(name: str) -> list[dict[str, Any]]:
    """Everything that the class knows, and what save_pretrained writes."""
    config = CONFIG_MAPPING[name]()
    return [json.loads(json.dumps(said)) for said in (config.to_dict(), config.to_diff_dict())]


def problems(raw: dict[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """What is wrong with the keys, and the notes."""
    path = Path("config.json")
    row = architecture(raw, path)
    config = RawConfig(raw, ("encoder.block.", "decoder.block."), Problems(str(path)))
    try:
        row.variants(config)
        row.read(config)
    except CheckpointError:
        pass  # a default that the project cannot hold is refused elsewhere
    config.problems.messages.clear()
    notes = config.check_keys()
    return config.problems.messages, notes


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_writes_has_no_unknown_key(name: str) -> None:
    written = [*of_today(name), of_version_4(name)]
    for raw in [*written, of_version_4(name) | PUBLISHED.get(name, {})]:
        assert problems(raw) == ([], ())


@pytest.mark.parametrize("name", NAMES)
def test_no_switch_hides_another_key(name: str) -> None:
    """Whatever a file's switches say, every other key of its class is still known."""
    raw = of_version_4(name)
    for key in [key for key, value in raw.items() if isinstance(value, bool) and key not in OFF]:
        assert problems(raw | {key: not raw[key]})[0] == [], key


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "attn_logit_softcapping", 50.0),
        ("llama", "partial_rotary_factors", [0.5]),
        ("llama", "quantization_config", {"bits": 4}),
        ("gpt2", "sliding_window", 4096),
        ("bloom", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("opt", "num_key_value_heads", 2),
        ("t5", "foo_scale", 2),
        ("bart", "tie_encoder_decoder", True),
        ("mt5", "foo_type", "rope"),
        ("qwen3", "zero", 0),
    ],
)
def test_an_unknown_key_that_has_a_value_is_refused(name: str, key: str, value: Any) -> None:
    (message,), _ = problems(of_version_4(name) | {key: value})
    assert message.startswith(f"{key} is not known here; got {value!r}"[:60])
    assert "remove the key" in message


def test_keys_of_sections_are_checked_too() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}
    (message,), _ = problems(of_version_4("llama") | {"rope_scaling": rope})
    assert message.startswith("rope_scaling.mscale is not known here; got 0.7")


def test_an_unknown_key_that_is_switched_off_is_a_note() -> None:
    off = {"use_wings": False, "wings": [], "wing_type": "", "nothing": None}
    found, (note,) = problems(of_version_4("llama") | off)
    assert (found, note) == (
        [],
        "config.json: use_wings, wings, wing_type unknown, but switched off",
    )


def test_all_unknown_keys_are_one_error_and_notes_reach_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)).save_pretrained(folder)
    file = folder / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"foo_scale": 2, "sliding_window": 7, "use_foo": False}))
    with pytest.raises(CheckpointError) as caught:
        export_folder(folder, tmp_path)
    assert len(caught.value.problems) == 2
    assert all(word in str(caught.value) for word in ("foo_scale", "sliding_window", str(file)))
    file.write_text(json.dumps(said | {"use_foo": False}))
    exported = export_folder(folder, tmp_path)
    source = json.loads((exported / "manifest.json").read_text())["source"]
    assert source["notes"] == ["config.json: use_foo unknown, but switched off"]


def test_two_names_of_one_size_must_agree() -> None:
    raw = RawConfig({"n_positions": 1024, "n_ctx": 512}, (), Problems("config.json"))
    raw.size("n_positions", "n_ctx")
    assert raw.problems.messages == ["n_positions and n_ctx differ; got [1024, 512]"]


def test_the_table_has_no_stale_keys() -> None:
    files = [
        raw for name in CONFIG_MAPPING if name in VERSION_4["models"] for raw in of_today(name)
    ]
    files += [of_version_4(name) for name in VERSION_4["models"]]
    known = {key for raw in [*files, *PUBLISHED.values()] for key in raw}
    patterns = [pattern for keys in IRRELEVANT.values() for pattern in keys]
    assert len(patterns) == len(set(patterns))
    stale = [each for each in patterns if not any(fnmatchcase(key, each) for key in known)]
    assert stale == []
    assert set(OFF) <= known
    assert not any(fnmatchcase(key, each) for key in OFF for each in patterns)


def save_llama(folder: Path, **values: Any) -> dict[str, Any]:
    """A tiny Llama whose config.json then says `values` besides; what it says."""
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    return change_json(folder / "config.json", **values) | values


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (4, "num_key_value_heads does not fit .* got 4; choices: 2"),
        (3, "num_kv_heads"),
        (1, "num_key_value_heads does not fit .* got 1; choices: 2"),
    ],
)
def test_key_value_heads_that_do_not_fit_the_tensors_are_refused(
    tmp_path: Path, heads: int, message: str
) -> None:
    save_llama(tmp_path / "hf", num_key_value_heads=heads)
    refused_export(tmp_path / "hf", tmp_path, message)


def test_an_unknown_activation_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", hidden_act="mish")
    with pytest.raises(CheckpointError) as caught:
        export_folder(tmp_path / "hf", tmp_path)
    assert "unknown hidden_act; got 'mish'; choices: " in str(caught.value)
    assert all(name in str(caught.value) for name in ACTIVATIONS)


def save_tokenizer(folder: Path, tokens: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocab = {f"t{index}": index for index in range(tokens)}
    Tokenizer(WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "t1", "eos_token": "t2"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


@pytest.mark.parametrize(("tokens", "fits"), [(60, True), (67, True), (68, False)])
def test_a_tokenizer_may_not_have_more_tokens_than_the_table_has_rows(
    tmp_path: Path, tokens: int, fits: bool
) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf", tokens)
    tokenizer = TokenizerSettings("auto")
    if fits:
        assert (export_folder(tmp_path / "hf", tmp_path, tokenizer=tokenizer)).is_dir()
        return
    refused_export(
        tmp_path / "hf", tmp_path, "more tokens than the model's 67; got 68", tokenizer=tokenizer
    )
    assert not (tmp_path / "1-gpu").exists()
