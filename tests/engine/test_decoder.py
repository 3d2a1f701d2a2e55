"""The decoder against transformers' models of the same weights, and its variants against each
other's definitions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from launcher_scripts.engine.model.rotary import alibi_slopes
from launcher_scripts.models.family import ACTIVATIONS
from launcher_scripts.models.gpt import GPTConfig
from tests.engine.small_models import (
    LATENT,
    context_logits,
    engine_for,
    generate,
    random_tensors,
    small_config,
)

IDS = (5, 60, 11, 11, 2, 33, 47, 0, 9, 28, 64, 3, 17)


def hugging_face_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0]


def hugging_face_tokens(model: torch.nn.Module, count: int) -> list[int]:
    out = model.generate(torch.tensor([IDS]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(IDS) :].tolist()


def randomized(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The model's tensors, with norms and biases that matter."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.3)
        if "norm" in name or "ln_" in name:
            parameter.data += 1
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def gpt2() -> tuple[torch.nn.Module, GPTConfig, dict[str, np.ndarray]]:
    config = small_config(end_id=0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=67,
            n_positions=96,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=48,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            bos_token_id=65,
            eos_token_id=0,
        )
    )
    source = randomized(model)
    tensors = {
        "wte": source["transformer.wte.weight"],
        "wpe": source["transformer.wpe.weight"],
    }
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "attention.query_key_value",
        "attn.c_proj": "attention.dense",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    for part in ("weight", "bias"):
        tensors[f"final_layernorm.{part}"] = source[f"transformer.ln_f.{part}"]
        for layer in range(2):
            for theirs, ours in names.items():
                key = f"transformer.h.{layer}.{theirs}.{part}"
                tensors[f"layers.{layer}.{ours}.{part}"] = source[key]
    return model, config, tensors


def llama(**changes: object) -> tuple[torch.nn.Module, GPTConfig, dict[str, np.ndarray]]:
    config = small_config(
        position_embedding="rope",
        normalization="rmsnorm",
        activation="silu",
        gated=True,
        attention_bias=False,
        mlp_bias=False,
        num_kv_heads=2,
        head_size=16,
        tied_embeddings=False,
        norm_eps=1e-6,
        end_id=0,
        **changes,
    )
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=96,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            bos_token_id=65,
            eos_token_id=0,
        )
    )
    source = randomized(model)
    tensors = {
        "wte": source["model.embed_tokens.weight"],
        "lm_head.weight": source["lm_head.weight"],
        "final_layernorm.weight": source["model.norm.weight"],
    }
    names = {
        "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_proj",
        "mlp.dense_h_to_4h_2": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    }
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{ours}{norm}.weight"] = source[f"{theirs}{norm}.weight"]
        for name, key in names.items():
            tensors[f"{ours}{name}.weight"] = source[f"{theirs}{key}.weight"].T
        qkv = [source[f"{theirs}self_attn.{part}_proj.weight"].T for part in "qkv"]
        tensors[f"{ours}attention.query_key_value.weight"] = np.concatenate(qkv, axis=1)
    return model, config, tensors


@pytest.mark.parametrize("family", [gpt2, llama])
def test_logits_and_greedy_tokens_equal_transformers(family):
    model, config, tensors = family()
    engine = engine_for(config, tensors)
    got = context_logits(engine, IDS)
    assert got.dtype == torch.float32
    assert (got - hugging_face_logits(model)).abs().max() <= 1e-5 * got.abs().max()
    assert generate(engine, IDS, 12) == hugging_face_tokens(model, 12)
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_embedding": "rope", "rotary_percentage": 0.5},
        {"position_embedding": "rope", "rotary_interpolation_factor": 4.0},
        {"position_embedding": "alibi", "alibi_layer_scaling": True, "num_heads": 6,
         "num_kv_heads": 3},
        {"position_embedding": "none"},
        {"norm_placement": "post", "final_norm": False},
        {"embedding_norm": True, "gated": True, "tied_embeddings": False},
        {"normalization": "rmsnorm", "attention_bias": False, "mlp_bias": False},
        LATENT,
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "sliding_window": 3},
        *({"activation": name, "gated": True} for name in ACTIVATIONS),
    ],
    ids=str,
)  # fmt: skip
def test_every_variant_decodes_as_it_prefills(changes):
    """Generated token by token, each is what a fresh pass over the text so far puts first."""
    config = small_config(**changes, end_id=67)
    engine = engine_for(config, random_tensors(config))
    tokens = generate(engine, IDS, 6)
    logits = context_logits(engine, (*IDS, *tokens))
    assert tokens == logits[len(IDS) - 1 : -1].argmax(-1).tolist()
    engine.close()


def test_variants_differ():
    """Every hyperparameter reaches the computation."""
    outputs = {}
    for name, changes in {
        "plain": {},
        "rope": {"position_embedding": "rope"},
        "half": {"position_embedding": "rope", "rotary_percentage": 0.5},
        "slow": {"position_embedding": "rope", "rotary_interpolation_factor": 4.0},
        "base": {"position_embedding": "rope", "rotary_base": 100.0},
        "alibi": {"position_embedding": "alibi"},
        "scaled": {"position_embedding": "alibi", "alibi_layer_scaling": True},
        "none": {"position_embedding": "none"},
        "post": {"norm_placement": "post"},
        "embedding norm": {"embedding_norm": True},
        "eps": {"norm_eps": 0.1},
        **{name: {"activation": name, "gated": True} for name in ACTIVATIONS},
    }.items():
        config = small_config(**changes)
        engine = engine_for(config, random_tensors(config))
        outputs[name] = context_logits(engine, IDS)
        engine.close()
    names = list(outputs)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            assert not torch.allclose(outputs[name], outputs[other], atol=1e-5), (name, other)


def test_alibi_slopes():
    assert alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    assert alibi_slopes(6) == pytest.approx([0.25, 1 / 16, 1 / 64, 1 / 256, 0.5, 0.125])


def test_alibi_moves_scores_by_slope_times_distance():
    """One head, constant queries and keys: attention weights are the softmax of the bias."""
    from launcher_scripts.kernels import reference
    from launcher_scripts.kernels.operands import AttentionScores, LayerCache

    keys = torch.zeros(1, 4, 2)
    values = torch.eye(4)[None]
    slopes = torch.tensor([0.5])
    scores = AttentionScores(1.0, slopes=slopes)
    out = reference.context_attention(
        torch.ones(4, 1, 2), LayerCache(keys, values[..., :2]), 0, 0, scores
    )
    expected = (slopes * torch.tensor([-3.0, -2, -1, 0])).softmax(-1)
    assert torch.allclose(out[3], expected[:2])


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_low_precision_is_near(data_type):
    model, config, tensors = llama()
    engine = engine_for(config, tensors, data_type=data_type)
    want = hugging_face_logits(model)
    error = (context_logits(engine, IDS) - want).norm() / want.norm()
    assert error < (0.003 if data_type == "fp16" else 0.02)
    engine.close()
