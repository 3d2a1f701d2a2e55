"""config.ini of every family: what is written is read back, and the original's files are read."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.fastertransformer import config_ini
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.models import FAMILIES, family_of
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

T5 = {
    "vocab_size": 100,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "head_size": 8,
    "ffn_size": 32,
    "num_decoder_layers": 3,
}
BART = {
    "vocab_size": 100,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "ffn_size": 32,
    "num_decoder_layers": 3,
    "num_decoder_heads": 2,
    "decoder_ffn_size": 24,
    "max_positions": 20,
}
AGM = {"vocab_size": 100, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 64}
GPT = {
    "vocab_size": 100,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 6,
    "ffn_size": 32,
    "max_positions": 20,
}
T5_WITH_WINDOW = T5Config(
    **T5,
    position_embedding="rope",
    max_positions=77,
    num_kv_heads=2,
    rotary_base=500.0,
    sandwich_norms=True,
    zero_centered_norm=True,
    embedding_scale=4.0,
    attention_softcap=50.0,
    logits_softcap=30.0,
    sliding_window=7,
    full_attention_layers="1,2",
)
GPT_WITHOUT_ROTATION = GPTConfig(**GPT, position_embedding="rope", unrotated_layers="0")
CONFIGS: list[Any] = [
    T5Config(**T5),
    T5Config(**T5, logits_scale=0.25, start_id=5, end_id=7, pad_id=None, encoder_only=False),
    T5Config(**{**T5, "num_decoder_layers": 0}, encoder_only=True),
    T5Config(
        **T5,
        position_embedding="learned",
        max_positions=77,
        normalization="layernorm",
        norm_eps=1e-5,
        activation="gelu_erf",
        gated=True,
        bias=True,
        logits_bias=False,
        attention_scale=8**-0.5,
        tied_embeddings=False,
        shared_embeddings=False,
        relative_bias_layer_scaling=True,
        cross_attention_relative_bias=True,
    ),
    T5Config(**T5, relative_bias_per_layer=True),
    T5_WITH_WINDOW,
    BartConfig(**BART),
    BartConfig(**BART, forced_bos_id=0),
    BartConfig(**BART, embedding_norm=False),
    BartConfig(**BART, norm_placement="pre", activation="relu", tied_embeddings=False, pad_id=3),
    AgmConfig(**AGM),
    AgmConfig(**AGM, attention_scale=1.0, activation="gelu", logits_bias=False, pad_id=None),
    AgmConfig(**AGM, attention_scale=8**-0.5),
    GPTConfig(**GPT),
    GPTConfig(**GPT, position_embedding="rope", gated=True, activation="silu", pad_id=4),
    GPT_WITHOUT_ROTATION,
    GPTConfig(
        **GPT,
        mlp_bias=False,
        num_experts=5,
        experts_per_token=2,
        normalized_experts=True,
        router_score_function="sigmoid",
        router_scaling_factor=2.5,
        expert_bias=True,
        dense_layers="1",
        dense_ffn_size=24,
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: family_of(config).name)
@pytest.mark.parametrize("weight_data_type", ["fp32", "bf16"])
def test_what_is_written_is_read_back(tmp_path: Path, config: Any, weight_data_type: str) -> None:
    text = config_ini.format_config(config, 2, weight_data_type)
    (tmp_path / "config.ini").write_text(text)
    assert config_ini.read_config(tmp_path) == config_ini.ConfigIni(config, 2, weight_data_type)


@pytest.mark.parametrize(
    ("config", "line", "value", "message"),
    [
        (GPTConfig(**GPT), "start_id = 50256", "100", "start_id .*got 100; choices: 0-99; change"),
        (GPTConfig(**GPT), "start_id = 50256", "1000000000", "start_id .*got 1000000000"),
        (GPTConfig(**GPT), "end_id = 50256", "1000000000", "end_id .*choices: 0-100; change"),
        (GPTConfig(**GPT), "end_id = 50256", "-1", "end_id .*got -1"),
        (GPTConfig(**GPT, pad_id=4), "pad_id = 4", "1000000000", "pad_id .*got 1000000000"),
        (GPTConfig(**GPT), "layernorm_eps = 1e-05", "inf", "norm_eps is .*got inf; choices: 1e-30"),
        (GPTConfig(**GPT), "layernorm_eps = 1e-05", "nan", "norm_eps is out of range; got nan"),
        (GPTConfig(**GPT), "layernorm_eps = 1e-05", "-1e-05", "norm_eps is out of range"),
        (GPTConfig(**GPT), "layernorm_eps = 1e-05", "0", "norm_eps is out of range"),
        (GPTConfig(**GPT), "rotary_base = 10000.0", "nan", "rotary_base is out of range; got nan"),
        (GPT_WITHOUT_ROTATION, "unrotated_layers = 0", "0,2", "a layer that is not there; got 2"),
        (T5Config(**T5), "decoder_start_token_id = 0", "1000000000", "decoder_start_token_id"),
        (T5Config(**T5), "eos_token_id = 1", "1000000000", r"end_id \(eos_token_id\)"),
        (T5Config(**T5), "pad_id = 0", "1000000000", "pad_id .*got 1000000000"),
        (T5Config(**T5), "norm_eps = 1e-06", "inf", "norm_eps is out of range"),
        (T5Config(**T5), "logits_scale = 1.0", "inf", "logits_scale is out of range"),
        (T5_WITH_WINDOW, "full_attention_layers = 1,2", "1,b", "must be numbers with commas"),
        (
            T5_WITH_WINDOW,
            "full_attention_layers = 1,2",
            "1,-9",
            "a layer that is not there; got -9",
        ),
        (T5_WITH_WINDOW, "sliding_window = 7", "0", "sliding_window must be at least 1"),
        (BartConfig(**BART), "decoder_start_token_id = 2", "1000000000", "decoder_start_token_id"),
        (BartConfig(**BART), "eos_token_id = 2", "1000000000", "eos_token_id"),
        (BartConfig(**BART), "pad_token_id = 1", "1000000000", "pad_token_id"),
        (BartConfig(**BART), "norm_eps = 1e-05", "inf", "norm_eps is out of range"),
        (AgmConfig(**AGM), "decoder_start_token_id = 2", "1000000000", "decoder_start_token_id"),
        (AgmConfig(**AGM), "eos_token_id = 2", "1000000000", "eos_token_id"),
        (AgmConfig(**AGM), "norm_eps = 1e-05", "inf", "norm_eps is out of range"),
    ],
    ids=lambda value: value.replace(" ", "") if isinstance(value, str) else None,
)
def test_numbers_that_no_model_has_are_refused(
    tmp_path: Path, config: Any, line: str, value: str, message: str
) -> None:
    text = config_ini.format_config(config, 2, "fp16")
    assert f"\n{line}\n" in text
    key = line.split(" ")[0]
    (tmp_path / "config.ini").write_text(text.replace(f"\n{line}\n", f"\n{key} = {value}\n"))
    with pytest.raises(CheckpointError, match=message) as raised:
        config_ini.read_config(tmp_path)
    assert str(tmp_path / "config.ini") in str(raised.value)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (T5Config(**T5, bias=True, attention_scale=8**-0.5), "d_kv = 8"),
        (AgmConfig(**AGM, attention_scale=1.5), "decoder_attention_heads = 4"),
    ],
    ids=["t5", "agm"],
)
def test_a_size_of_zero_is_refused(tmp_path: Path, config: Any, line: str) -> None:
    text = config_ini.format_config(config, 2, "fp16").replace(line, f"{line[:-1]}0")
    (tmp_path / "config.ini").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.ini says a size that no model has"):
        config_ini.read_config(tmp_path)


def test_an_end_that_never_comes_is_read(tmp_path: Path) -> None:
    config = GPTConfig(**GPT, start_id=99, end_id=100, pad_id=100)
    (tmp_path / "config.ini").write_text(config_ini.format_config(config, 1, "fp16"))
    assert config_ini.read_config(tmp_path).config == config


def test_every_family_has_a_format() -> None:
    assert set(config_ini.FORMATS) == set(FAMILIES)


def test_the_nemo_t5_keys_are_those_of_the_original_in_its_order() -> None:
    config = T5Config(
        **T5,
        position_embedding="learned",
        max_positions=32,
        normalization="layernorm",
        activation="gelu",
        bias=True,
        logits_bias=True,
        attention_scale=8**-0.5,
        start_id=60,
        end_id=61,
        pad_id=62,
    )
    text = config_ini.format_config(config, 4, "fp16")
    assert text.startswith(
        """[encoder]
_name_or_path = t5
model_type = T5
weight_data_type = fp16
tensor_para_size = 4
vocab_size = 100
feed_forward_proj = gelu
d_ff = 32
d_model = 16
d_kv = 8
relative_attention_num_buckets_or_max_pos_seq_len = 32
num_heads = 4
num_layers = 2

[decoder]
_name_or_path = t5
model_type = T5
weight_data_type = fp16
tensor_para_size = 4
vocab_size = 100
decoder_start_token_id = 60
eos_token_id = 61
pad_id = 62
feed_forward_proj = gelu
d_ff = 32
d_model = 16
d_kv = 8
relative_attention_num_buckets_or_max_pos_seq_len = 32
num_heads = 4
num_layers = 3
tie_word_embeddings = False

[structure]
t5_with_bias = True
position_embedding_type = absolute
use_gated_activation = False

[extension]
"""
    )


def test_an_unknown_family_is_answered_with_the_marks_of_the_known(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text("[encoder]\nd_model = 3\n")
    with pytest.raises(CheckpointError, match=r"choices: \[gpt\], \[structure\] t5_with_bias"):
        config_ini.read_config(tmp_path)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("hf_t5_v10_to1", {"logits_scale": 0.25, "gated": False, "num_buckets": 8}),
        ("nemo_t5_tp1_to4", {"bias": True, "max_positions": 32, "start_id": 60, "pad_id": 62}),
        ("hf_t5_encoder_to1", {"encoder_only": True, "num_decoder_layers": 0}),
        ("hf_bloom_to1", {"position_embedding": "alibi", "embedding_norm": True}),
        ("megatron_v3_tp1_to2", {"norm_eps": 1e-5, "ffn_size": 64}),
    ],
)
def test_files_of_the_original_are_read(
    shared_dir: Path, tmp_path: Path, case: str, expected: dict[str, Any]
) -> None:
    folder = tmp_path / "4-gpu"
    folder.mkdir()
    shutil.copy(shared_dir / "golden" / case / "config.ini", folder)
    config = config_ini.read_config(folder).config
    assert {key: dataclasses.asdict(config)[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "section", "said", "words"),
    [
        (GPTConfig(**GPT), "gpt", "prompt_learning_type = 1", r"got '1 \(soft prompts\)'"),
        (GPTConfig(**GPT), "gpt", "prompt_learning_type = 2", r"got '2 \(prefix prompts\)'"),
        (GPTConfig(**GPT), "gpt", "prompt_learning_type = 7", r"got '7 \(unknown\)'"),
        (T5Config(**T5), "encoder", "prompt_learning_type = 2", r"got '2 \(prefix prompts\)'"),
        (GPTConfig(**GPT), "structure", "gpt_with_moe = 1\nexpert_num = 8", "experts of Fast"),
    ],
)
def test_what_the_original_serves_and_this_engine_does_not_is_refused(
    tmp_path: Path, config: Any, section: str, said: str, words: str
) -> None:
    text = config_ini.format_config(config, 1, "fp32")
    if f"[{section}]" not in text:
        text += f"[{section}]\n"
    path = tmp_path / "config.ini"
    path.write_text(text.replace(f"[{section}]\n", f"[{section}]\n{said}\n"))
    with pytest.raises(CheckpointError, match=words):
        config_ini.read_config(tmp_path)


@pytest.mark.parametrize("kind", [0, 3])
def test_kinds_of_prompts_that_are_served(tmp_path: Path, kind: int) -> None:
    text = config_ini.format_config(GPTConfig(**GPT), 1, "fp32")
    said = f"[gpt]\nprompt_learning_type = {kind}\n"
    (tmp_path / "config.ini").write_text(text.replace("[gpt]\n", said))
    config_ini.read_config(tmp_path)
