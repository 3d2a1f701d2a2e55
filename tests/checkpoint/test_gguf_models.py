"""GGUF files that llama.cpp's converter wrote of tiny models give the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint.engine_answers import answers
from tests.checkpoint.exporting import export_folder, weight_bytes
from tests.checkpoint.gguf_maker import finish
from tests.checkpoint.tiny_models import LATER_DECODERS, TinyModel

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
FILES = sorted(path.stem for path in FOLDER.glob("*.gguf"))


@pytest.mark.parametrize("name", FILES)
def test_logits(name: str, tmp_path: Path) -> None:
    with np.load(FOLDER / "logits.npz") as reference:
        ids, expected = reference["ids"][0], reference[name]
    folder = export_folder(FOLDER / f"{name}.gguf", tmp_path)
    request = GenerateRequest(tuple(map(int, ids)), 0, return_context_logits=True)
    (answer,) = answers(folder, request)
    assert np.abs(np.asarray(answer.context_logits) - expected).max() <= 1e-5


def _llama(**changes: Any) -> Any:
    return lambda tiny: TinyModel(tiny.model, tiny.config, {**tiny.values, **changes})


# Architecture -> the model of transformers, what llama.cpp cannot say of it is changed, and the
# fields that the converter writes besides those of every model.
PLAIN: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "olmo2": ("olmo2", _llama(num_key_value_heads=2), {}),
    "smollm3": ("smollm3", _llama(no_rope_layer_interval=4, use_sliding_window=False), {}),
    "stablelm": ("stablelm", _llama(), {"use_parallel_residual": True}),  # if it is not said
    "glm4": ("glm4", _llama(attention_bias=True), {}),
    "ernie4_5": ("ernie4_5", _llama(), {}),
    "cohere2": ("cohere2", _llama(), {"logit_scale": 0.5, "attention.sliding_window": 5}),
    "mistral3": (
        "ministral3",
        _llama(),
        {
            "attention.temperature_scale": 0.1,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 2.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 2.0,
            "rope.scaling.yarn_beta_slow": 0.5,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
}
# The architectures whose rows of queries and keys the converter brings into llama.cpp's order.
NEIGHBOURS = ("smollm3", "mistral3")


def _write(architecture: str, model: PreTrainedModel, path: Path, more: dict[str, Any]) -> None:
    """As llama.cpp's converter does."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, architecture)
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        **more,
    }
    for kind in ("rms_norm_eps", "layer_norm_eps"):
        if hasattr(config, kind):
            name = "layer_norm_rms_epsilon" if kind == "rms_norm_eps" else "layer_norm_epsilon"
            fields[f"attention.{name}"] = float(getattr(config, kind))
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in fields.items():
        adders.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    writer.add_bos_token_id(config.bos_token_id or 1)
    writer.add_eos_token_id(config.eos_token_id)
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture in NEIGHBOURS and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, size // 2, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, name
        writer.add_tensor(stored, np.ascontiguousarray(values))
    finish(writer)


@pytest.mark.parametrize("architecture", PLAIN)
def test_a_file_with_the_names_of_llama_cpp_gives_what_the_folder_gives(
    tmp_path: Path, architecture: str
) -> None:
    name, changed, more = PLAIN[architecture]
    model = changed(LATER_DECODERS[name]).make()
    model.save_pretrained(tmp_path / "hf")
    _write(architecture, model, tmp_path / "m.gguf", more)
    folders = [
        export_folder(tmp_path / source, tmp_path / f"of {source}") for source in ("hf", "m.gguf")
    ]
    want, got = map(weight_bytes, folders)
    assert want
    assert got == want
    configs = [read_config(folder).config for folder in folders]
    same = [{**vars(each), "start_id": 0} for each in configs]
    assert same[1] == same[0]
