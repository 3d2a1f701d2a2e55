"""A tiny GGUF file of the llama architecture, made from weights in Hugging Face's row order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, LAYERS = 24, 6, 2, 4, 32, 10, 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENS = ["a", "b", "ab", "c", "d", "e", "f", "g", "h", "i"]


def hf_weights() -> dict[str, np.ndarray]:
    """Random weights of one layer in the order that rotates by halves, rows as outputs."""
    generator = np.random.default_rng(5)
    shapes = {
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    return {
        name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }


def _neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is row i of its first half and row 2i+1 of its second, as GGUF has it."""
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(HEAD // 2):
            for half in range(2):
                out[head * HEAD + 2 * i + half] = weight[head * HEAD + half * HEAD // 2 + i]
    return out


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", leave_out: str = ""
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(16)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template(TEMPLATE)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, weight in weights.items():
            if name == leave_out:
                continue
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            stored = weight if heads is None else _neighbours(weight, heads)
            writer.add_tensor(f"blk.{layer}.{name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
