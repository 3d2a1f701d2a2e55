"""Agm: no transformers class exists, so its state dict is made here and run as its paper says."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.reference_forward_bart import agm_logits

CONFIG = {
    "model_type": "bart",
    "vocab_size": 51,
    "d_model": 16,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 24,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "activation_function": "gelu",
    "scale_attention": True,
    "mup_scale": True,
    "position_bias_per_layer": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
IDS = torch.tensor([[0, 5, 17, 33, 2, 50, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18]])


def make(folder: Path, **values: object) -> dict[str, torch.Tensor]:
    """A random Agm in `folder`; its state dict."""
    torch.manual_seed(2)
    config = {**CONFIG, **values}
    hidden, ffn = config["d_model"], config["decoder_ffn_dim"]
    shapes = {"shared.weight": (51, hidden), "final_logits_bias": (1, 51)}
    for part in ("weight", "bias"):
        shapes[f"decoder.layernorm_output.{part}"] = (hidden,)
    for layer in range(config["decoder_layers"]):
        stem = f"decoder.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{part}.weight": (hidden, hidden) for part in "qkvo"}
        shapes[f"{stem}.self_attn.relative_attention_bias.weight"] = (8, 4)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{stem}.{norm}.{part}": (hidden,) for part in ("weight", "bias")}
        shapes |= {f"{stem}.fc1.weight": (ffn, hidden), f"{stem}.fc1.bias": (ffn,)}
        shapes |= {f"{stem}.fc2.weight": (hidden, ffn), f"{stem}.fc2.bias": (hidden,)}
    state = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = {f"model.{name}": tensor for name, tensor in state.items()}
    stored["final_logits_bias"] = stored.pop("model.final_logits_bias")
    save_file(stored, folder / "model.safetensors")
    return state


def forward(state: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """The model as its own code runs it: per-head loops over the state dict, nothing fused."""
    x = state["shared.weight"][IDS[0]]  # [S, d]
    length, size = len(x), 4
    for layer in range(2):
        stem = f"decoder.layers.{layer}"
        normed = norm(state, f"{stem}.self_attn_layer_norm", x)
        q, k, v = (normed @ state[f"{stem}.self_attn.{part}.weight"].T for part in "qkv")
        table = state[f"{stem}.self_attn.relative_attention_bias.weight"]
        mixed = torch.zeros_like(x)
        for head in range(4):
            at = slice(head * size, (head + 1) * size)
            for i in range(length):
                scores = (k[: i + 1, at] @ q[i, at]) * scale
                scores += torch.stack([table[bucket(i - j), head] for j in range(i + 1)])
                mixed[i, at] = scores.softmax(0) @ v[: i + 1, at]
        x = x + mixed @ state[f"{stem}.self_attn.o.weight"].T
        inner = norm(state, f"{stem}.final_layer_norm", x) @ state[f"{stem}.fc1.weight"].T
        inner = functional.gelu(inner + state[f"{stem}.fc1.bias"])
        x = x + inner @ state[f"{stem}.fc2.weight"].T + state[f"{stem}.fc2.bias"]
    x = norm(state, "decoder.layernorm_output", x)
    return x @ state["shared.weight"].T + state["final_logits_bias"]


def norm(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


def bucket(distance: int) -> int:
    """8 buckets up to distance 12, looking back."""
    if distance < 4:
        return distance
    return min(4 + int(math.log(distance / 4) / math.log(12 / 4) * 4), 7)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(("mup", "scale"), [(True, 2.0), (False, 0.5)])
def test_logits(tmp_path: Path, tp_size: int, mup: bool, scale: float) -> None:
    state = make(tmp_path / "hf", mup_scale=mup)
    weights, config = open_weights(export_folder(tmp_path / "hf", tmp_path, tp_size))
    found = agm_logits(weights, config, IDS)[0]
    assert (found - forward(state, scale)).abs().max() <= 1e-5


def test_the_relative_bias_is_cut_as_its_loader_opens_it(tmp_path: Path) -> None:
    state = make(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, 2)
    name = "decoder.layers.1.self_attn.relative_attention_bias.weight"
    parts = [(folder / f"{name}.{rank}.bin").read_bytes() for rank in range(2)]
    assert b"".join(parts) == state[name].T.contiguous().numpy().tobytes()
    assert not (folder / f"{name}.bin").exists()


def test_one_bias_for_all_layers_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "hf", position_bias_per_layer=False)
    refused_export(tmp_path / "hf", tmp_path, "position_bias_per_layer is not supported")
