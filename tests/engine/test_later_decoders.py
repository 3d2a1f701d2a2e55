"""Exports of today's Hugging Face decoders: the logits and the text of transformers, for prompts
longer than attention's window and than the positions before rotary scaling."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashAttention

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from launcher_scripts.engine.runner.tracing import TracedModel
from tests.checkpoint.exporting import change_json, export_folder
from tests.checkpoint.tiny_models import GPT2, LATER_DECODERS, LLAMA, LLAMA_31_ROPE, UNTIED
from tests.engine.test_beams_transformers import Pair

SHORT = (5, 17, 2, 40, 66, 31, 8)
LONG = (*SHORT, 9, 9, 50, 21, 3, 60, 44, 12, 13, 37, 5, 28, 1, 64, 30, 7)
LENGTH = 24
SHORT_LENGTH = 9  # still more tokens than attention's window
NO_END = 67
SHAPES = [
    (1, 1),
    pytest.param((2, 1), marks=pytest.mark.slow),
    pytest.param((1, 2), marks=pytest.mark.slow),
]


def rotation_grows(model: PreTrainedModel) -> bool:
    """Return whether the speeds of rotation depend on the length of the row."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type") in ("dynamic", "longrope")


def followed(
    model: PreTrainedModel, prompt: tuple[int, ...], answer: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt [T, vocab], and the ids that transformers appends to it greedily.

    One pass over prompt and answer tells whether every id of the answer is the likeliest one. Where
    the speeds of rotation depend on how long the row is by then, generate appends them one by one,
    in a copy of the model: it keeps the speeds of the longest row so far.
    """
    grows = rotation_grows(model)
    model = copy.deepcopy(model) if grows else model
    ids = torch.tensor([prompt if grows else (*prompt, *answer[:-1])])
    with torch.no_grad():
        logits = model(ids).logits[0]
    if not grows:
        return logits[: len(prompt)], logits[len(prompt) - 1 :].argmax(-1).tolist()
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=len(answer), do_sample=False)
    return logits, out[0, len(prompt) :].tolist()


class Replaced(nn.Module):
    """A linear layer in place of attention or of an MLP, or nothing in its place."""

    def __init__(self, name: str | None, size: int, is_attention: bool) -> None:
        super().__init__()
        self.name, self.is_attention = name, is_attention
        if name is not None:
            self.add_module(name, nn.Linear(size, size, bias=False))

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        if self.name is None:
            out = torch.zeros_like(hidden_states)
        else:
            out = self.get_submodule(self.name)(hidden_states)
        return (out, None) if self.is_attention else out


# Heads in a group of each layer, "linear" or None, and what the MLP's width follows from, too.
NAS_LAYERS: list[tuple[int | str | None, float | str | None]] = [
    (2, 5.3),
    (None, 14.0),
    (4, None),
    ("linear", 5.3),
    (1, "linear"),
    (None, None),
]
NAS_WIDTHS = {5.3: 256, 14.0: 512}  # of 32 hidden features, rounded up to 256


def save_nas(folder: Path) -> LlamaForCausalLM:
    """A Llama-Nemotron made of a Llama's parts, and its folder as it is published."""
    torch.manual_seed(5)
    values = {**LLAMA, **UNTIED, "hidden_size": 32, "num_key_value_heads": 4}
    values |= {"num_hidden_layers": len(NAS_LAYERS), "rope_parameters": LLAMA_31_ROPE}
    config = LlamaConfig(**{**values, "max_position_embeddings": 128})
    model = LlamaForCausalLM(config).eval()
    blocks, gone = [], []
    for index, (group, factor) in enumerate(NAS_LAYERS):
        layer, own = model.model.layers[index], copy.deepcopy(config)
        if isinstance(group, int):
            own.num_key_value_heads = config.num_attention_heads // group
            layer.self_attn = LlamaAttention(own, index)
        else:
            layer.self_attn = Replaced(group and "linear_attn", 32, is_attention=True)
        if isinstance(factor, float):
            own.intermediate_size = NAS_WIDTHS[factor]
            layer.mlp = LlamaMLP(own)
        else:
            layer.mlp = Replaced(factor and "linear_mlp", 32, is_attention=False)
        gone += [f"{index}.input_layernorm."] if group is None else []
        gone += [f"{index}.post_attention_layernorm."] if factor is None else []
        parts = [("attention", "n_heads_in_group", group), ("ffn", "ffn_mult", factor)]
        blocks.append(
            {
                part: {
                    size: None if isinstance(value, str) else value,
                    "no_op": value is None,
                    "replace_with_linear": value == "linear",
                    "sparsify": None,
                }
                for part, size, value in parts
            }
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.05, 0.3)
    folder.mkdir()
    tensors = {
        name: values
        for name, values in model.state_dict().items()
        if not any(part in name for part in gone)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads(config.to_json_string()) | {"block_configs": blocks}
    said |= {"num_key_value_heads": None, "intermediate_size": None, "model_type": "nemotron-nas"}
    said |= {"architectures": ["DeciLMForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(said))
    return model


def save_gemma4(folder: Path) -> Gemma4ForCausalLM:
    """A Gemma 4 of more than ten layers: its file writes their numbers with zeros before them."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        sliding_window=7,
        max_position_embeddings=128,
    )
    model = Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.7)
    model.save_pretrained(folder)
    assert "05" in json.loads((folder / "config.json").read_text())["per_layer_config"]
    return model


GEMMA: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "max_position_embeddings": 600,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 67,
    "num_kv_shared_layers": 3,
}
GEMMA4: dict[str, Any] = {**GEMMA, "global_head_dim": 16, "use_double_wide_mlp": True}


def save_gemma4_inputs(folder: Path) -> PreTrainedModel:
    """As E2B and E4B: embeddings of every layer, and the last half sharing keys and values."""
    return saved(Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA4)), folder)


def save_gemma4_experts(folder: Path) -> PreTrainedModel:
    """As 26B-A4B: experts beside the MLP, and values made of keys in layers without a window."""
    values = GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    values |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    experts = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
    config = Gemma4TextConfig(**values, enable_moe_block=True, **experts)
    return saved(Gemma4ForCausalLM(config), folder)


def save_gemma3n(folder: Path) -> PreTrainedModel:
    """With ids behind the table of every layer, which transformers takes for the first one."""
    config = Gemma3nTextConfig(
        **{
            **GEMMA,
            "vocab_size_per_layer_input": 60,
            "intermediate_size": [48, 48, 64, 64, 48, 48],
        },
        laurel_rank=4,
        activation_sparsity_pattern=[0.95, 0.5, 0.0, 0.0, 0.0, 0.0],
    )
    return saved(Gemma3nForCausalLM(config), folder)


def saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with random weights, so that every term of its formulas shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1 if parameter.dim() == 1 else 0.0, 0.4)
    for name, values in model.named_buffers():
        if name.endswith("layer_scalar"):
            values.fill_(0.7)
    model.eval().save_pretrained(folder)
    return model


def save_gpt2_by_layer(folder: Path) -> PreTrainedModel:
    """The scores of its layers are divided by their numbers."""
    values = {**GPT2, "n_positions": 96, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True}
    return saved(GPT2LMHeadModel(GPT2Config(**values)), folder)


def save_mimo_of_other_groups(folder: Path) -> PreTrainedModel:
    """Layers with a window have half as many keys as the others, which transformers' class makes of
    a quarter as many, and does not read from config.json."""
    model = LATER_DECODERS["mimo_v2_flash"].make()
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = 1
    model.config.num_key_value_heads = 4
    for index, kind in enumerate(config.layer_types):
        settings = config if kind == "sliding_attention" else model.config
        model.model.layers[index].self_attn = MiMoV2FlashAttention(settings, index)
    saved(model, folder)
    change_json(folder / "config.json", swa_num_key_value_heads=2)
    return model


MADE: dict[str, Callable[[Path], PreTrainedModel]] = {
    "nemotron-nas": save_nas,
    "gemma4_text": save_gemma4,
    "gemma4_inputs": save_gemma4_inputs,
    "gemma4_experts": save_gemma4_experts,
    "gemma3n_text": save_gemma3n,
    "gpt2_by_layer": save_gpt2_by_layer,
    "mimo_of_other_groups": save_mimo_of_other_groups,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*LATER_DECODERS, *MADE])
def test_logits_and_tokens_are_those_of_transformers(
    tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    if name in LATER_DECODERS:
        model = LATER_DECODERS[name].save(tmp_path / "hf")
    else:
        model = MADE[name](tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, shape[0])
    engine = Engine.load(EngineSettings(folder, parallelism=Parallelism(*shape), device="cpu"))
    # LongRoPE looks at how long a row may become, so a short one stays below 16 here.
    length = LENGTH if rotation_grows(model) else SHORT_LENGTH
    counts = {SHORT: SHORT_LENGTH if name == "phi3_long" else length, LONG: length}
    try:
        answers = {
            prompt: engine.submit(
                GenerateRequest(prompt, count, end_id=NO_END, return_context_logits=True)
            )
            for prompt, count in counts.items()
        }
        answers = {prompt: answer.result(120) for prompt, answer in answers.items()}
    finally:
        engine.close()
    for prompt, answer in answers.items():
        ids = list(answer.output_ids)
        assert len(ids) == counts[prompt]
        context, expected = followed(model, prompt, ids)
        assert float((torch.as_tensor(answer.context_logits) - context).abs().max()) <= 2e-4
        assert ids == expected


def test_layers_that_read_others_are_not_traced(tmp_path: Path) -> None:
    save_gemma4_inputs(tmp_path / "hf")
    checkpoint = FTCheckpoint.open(export_folder(tmp_path / "hf", tmp_path), verify=False)
    with pytest.raises(CheckpointError, match=r"one by one; got \['layer_input_size', 'layer_kv"):
        TracedModel(checkpoint)


@pytest.mark.parametrize("name", ["gemma4_inputs", "gemma3n_text"])
def test_a_stage_of_layers_that_all_share_gets_keys_and_values(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stages: the last one reads keys of the first and of the second. Prompts come in
    chunks, and the second begins with tokens that the first one left in the cache."""
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 5)
    model = MADE[name](tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    engine = Engine.load(
        EngineSettings(
            folder, parallelism=Parallelism(1, 3), device="cpu", enable_prefix_caching=True
        )
    )
    try:
        for prompt in (LONG, (*LONG, 4, 2)):
            request = GenerateRequest(prompt, LENGTH, end_id=NO_END)
            ids = list(engine.submit(request).result(120).output_ids)
            assert ids == followed(model, prompt, ids)[1]
    finally:
        engine.close()


GEMMAS = ("gemma4_text", "gemma4_inputs", "gemma4_experts", "gemma3n_text")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", GEMMAS)
def test_a_gemma_s_weights_in_bytes_stay_near(name: str, quantization: Any, tmp_path: Path) -> None:
    model = MADE[name](tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    settings = EngineSettings(folder, device="cpu", quantization=quantization)
    engine = Engine.load(settings)
    try:
        request = GenerateRequest(LONG, 4, end_id=NO_END, return_context_logits=True)
        found = torch.as_tensor(engine.submit(request).result(120).context_logits)
    finally:
        engine.close()
    with torch.no_grad():
        expected = model(torch.tensor([LONG])).logits[0]
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()
    assert 1e-5 < float(error) < (0.15 if quantization == "int8" else 0.35)


@pytest.mark.slow
@pytest.mark.parametrize("name", GEMMAS)
def test_a_gemma_s_rows_lose_their_place_and_its_beams_part(name: str, tmp_path: Path) -> None:
    """Rows that do not fit the cache together, a beam search, and 500 tokens of one row."""
    model = MADE[name](tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    limit = 96 if name == "gemma4_text" else 500
    engine = Engine.load(EngineSettings(folder, device="cpu", max_batch_size=4, max_tokens=530))
    try:
        prompts = [(*LONG, *range(1, 2 + n)) for n in range(4)]
        requests = [GenerateRequest(each, min(limit, 150), end_id=NO_END) for each in prompts]
        futures = [engine.submit(request) for request in requests]
        rows = [list(future.result(300).output_ids) for future in futures]
        sampling = SamplingParameters(beam_width=3, len_penalty=1.0)
        request = GenerateRequest(LONG, 12, end_id=NO_END - 1, sampling=sampling)
        beams = [list(beam.output_ids) for beam in engine.submit(request).result(120).beams]
        request = GenerateRequest(SHORT, limit, end_id=NO_END)
        long = list(engine.submit(request).result(300).output_ids)
        pair = Pair(model, engine, NO_END - 1)
        assert beams == pair.theirs(LONG, 3, 12)[0]
    finally:
        engine.close()
    for prompt, row in (*zip(prompts, rows, strict=True), (SHORT, long)):
        assert row == followed(model, prompt, row)[1]
    assert len(long) == limit
