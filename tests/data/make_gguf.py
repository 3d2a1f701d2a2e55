"""Make tests/data/gguf: random tiny models of transformers, as llama.cpp's converter writes them.

    python3 -m tests.data.make_gguf <a checkout of llama.cpp>

The vocabulary is left out. logits.npz has the ids and, by the name of a file, what transformers
makes of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).with_name("gguf")
LENGTH = 24
SIZES = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
PAIR = {"original_max_position_embeddings": 16, "rope_theta": 100.0}
LLAMA_31 = {
    **PAIR,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {**PAIR, "rope_type": "yarn", "factor": 2.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    **PAIR,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
# Name of the file -> name of the classes, and what their configuration says.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama_tied": ("Llama", {**SIZES, "tie_word_embeddings": True, "head_dim": 6}),
    "llama_biased": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama_31": ("Llama", {**SIZES, "rope_parameters": LLAMA_31}),
    "llama_linear": ("Llama", {**SIZES, "rope_parameters": LINEAR}),
    "llama_yarn": ("Llama", {**SIZES, "rope_parameters": YARN}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2moe": (
        "Qwen2Moe",
        {**SIZES, **SPARSE, "num_experts": 4, "shared_expert_intermediate_size": 20},
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 6}),
    "qwen3moe": (
        "Qwen3Moe",
        {**SIZES, **SPARSE, "num_experts": 4, "head_dim": 6, "norm_topk_prob": True},
    ),
    "gemma": ("Gemma", {**SIZES, "tie_word_embeddings": True, "head_dim": 6}),
    "gemma2": (
        "Gemma2",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "head_dim": 6,
            "query_pre_attn_scalar": 6,
            "sliding_window": 5,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "num_hidden_layers": 7,
            "head_dim": 6,
            "query_pre_attn_scalar": 6,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3", {**SIZES, "pad_token_id": 0, "sliding_window": 5}),
    "phi3_partial": ("Phi3", {**SIZES, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "phi3_longrope": ("Phi3", {**SIZES, "pad_token_id": 0, "rope_parameters": LONG}),
    "starcoder2": ("Starcoder2", SIZES),
    "gptneox": ("GPTNeoX", {**SIZES, "rotary_pct": 0.5}),
    "gptneox_sequential": ("GPTNeoX", {**SIZES, "use_parallel_residual": False}),
    "falcon": (
        "Falcon",
        {**SIZES, "ffn_hidden_size": 64, "tie_word_embeddings": True, "num_kv_heads": 1},
    ),
    "falcon_new": (
        "Falcon",
        {**SIZES, "ffn_hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "granite": (
        "Granite",
        {
            **SIZES,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        },
    ),
    "nemotron": ("Nemotron", {**SIZES, "partial_rotary_factor": 0.5}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 67, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "bloom": ("Bloom", {"vocab_size": 67, "hidden_size": 24, "n_layer": 2, "n_head": 6}),
}


def make(name: str) -> transformers.PreTrainedModel:
    """A model with random weights, norms and biases too."""
    kind, values = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    kind_of_config = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config = getattr(transformers, kind_of_config)(**values)
    model = getattr(transformers, kind + suffix)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.05, 0.3)
    return model.eval()


def convert(folder: Path, target: Path) -> None:
    """Write a folder of transformers as GGUF, by llama.cpp's converter."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT), mmproj=False)
    kind.set_vocab = lambda _: None
    with torch.inference_mode():
        writer = kind(folder, gguf.LlamaFileType.ALL_F32, target, eager=True, model_name="tiny")
        # Names that transformers 5 has no more.
        writer.hparams["rotary_pct"] = writer.rope_parameters.get("partial_rotary_factor")
        writer.hparams["n_ctx"] = writer.hparams.get("n_positions")
        writer.write()


def main() -> None:
    checkout = Path(sys.argv[1])
    sys.path[:0] = [str(checkout / "gguf-py"), str(checkout)]
    ids = np.random.default_rng(1).integers(0, 67, (1, LENGTH))
    results = {"ids": ids}
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        model = make(name)
        with torch.no_grad():
            results[name] = model(torch.from_numpy(ids)).logits[0].numpy()
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            model.save_pretrained(folder)
            # The converter asks how many tokens there are where it cuts the table.
            vocabulary = {str(token): token for token in range(67)}
            tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
            convert(folder, FOLDER / f"{name}.gguf")
    np.savez_compressed(FOLDER / "logits.npz", **results)


if __name__ == "__main__":
    main()
