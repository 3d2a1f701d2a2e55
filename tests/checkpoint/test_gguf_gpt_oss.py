"""A gpt-oss as GGUF, with the tensors' names of llama.cpp's own package, gives what the folder of
transformers gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from tests.checkpoint.exporting import export_folder, weight_bytes
from tests.checkpoint.gguf_maker import finish
from tests.checkpoint.tiny_models import LATER_DECODERS

Tensors = Iterator[tuple[str, np.ndarray]]


def renamed(model: PreTrainedModel) -> Tensors:
    """As the converter changes names before it looks them up: every part of the experts has outputs
    first, and gate and up are apart."""
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
        part = ".bias" if bias else ".weight"
        if stem.endswith("down_proj"):
            yield stem + part, values if bias else values.swapaxes(1, 2)
        elif stem.endswith("gate_up_proj"):
            rows = values if bias else values.swapaxes(1, 2)
            yield stem.replace("gate_up", "gate") + part, rows[:, ::2]
            yield stem.replace("gate_up", "up") + part, rows[:, 1::2]
        else:
            yield (f"{name}.weight" if name.endswith("sinks") else name), values


def write(model: PreTrainedModel, path: Path, **more: Any) -> None:
    config, rope = model.config, model.config.rope_parameters
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT_OSS])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in more.items():
        writer.add_uint32(f"gpt-oss.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    for name, values in renamed(model):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(found, np.ascontiguousarray(values))
    finish(writer)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_it_is_the_folder_of_transformers(tmp_path: Path, tp_size: int) -> None:
    model = LATER_DECODERS["gpt_oss"].make()
    model.save_pretrained(tmp_path / "hf")
    write(model, tmp_path / "m.gguf")
    folders = [
        export_folder(tmp_path / source, tmp_path / f"of {source}", tp_size)
        for source in ("hf", "m.gguf")
    ]
    want, got = map(weight_bytes, folders)
    assert len(want) > 60 * tp_size
    assert got == want
    assert read_config(folders[1]).config == read_config(folders[0]).config
