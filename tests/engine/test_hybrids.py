"""Hybrids, whose layers keep a state of each row: the logits and texts of transformers, for prompts
in one piece and in many, found in the cache, in sessions, drafts and beam searches, and for rows
that lose their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core import row_allocator
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner import loading
from tests.checkpoint.exporting import export_folder
from tests.engine.test_beams_transformers import Pair
from tests.engine.test_statistics import values

NO_END = 97
COMMON = {
    "vocab_size": NO_END,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "head_dim": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 10,
    "chunk_size": 16,
    "conv_kernel": 3,
    "intermediate_size": 40,
}
DELTA = {
    "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "intermediate_size": 40,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": (
        "NemotronH",
        {
            **NEMOTRON,
            "n_groups": 4,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        },
    ),
    "nemotron_h latent": (
        "NemotronH",
        {
            **NEMOTRON,
            "n_groups": 2,
            "use_bias": True,
            "use_conv_bias": False,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "moe"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "routed_scaling_factor": 1.5,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **MAMBA,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "time_step_limit": [0.9, 1.5],
            "intermediate_size": 40,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **MAMBA,
            "head_dim": 12,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_n_groups": 2,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "ssm_multipliers": [0.7, 0.5, 0.35, 0.9, 1.2],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
            "mlp_multipliers": [0.88, 0.6],
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "mamba_n_groups": 1,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "intermediate_size": 24,
            "shared_intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 4.0,
            "residual_multiplier": 0.5,
            "rms_norm_eps": 1e-2,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoehybrid dense": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "mamba_n_groups": 2,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "nope",
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "attention_multiplier": 0.3,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**DELTA, **EXPERTS, "mlp_only_layers": [1], "num_key_value_heads": 2},
    ),
    "qwen3_5_text": ("Qwen3_5Text", {**DELTA, "linear_num_key_heads": 4}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**DELTA, **EXPERTS}),
    "kimi_linear": (
        "KimiLinear",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_expert_group": 2,
            "linear_head_dim": 6,
            "linear_num_heads": 4,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "intermediate_size": 60,
            "block_multiple_of": 8,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
}


def made(name: str) -> PreTrainedModel:
    """A model whose weights are all random, so that each term of its formulas shows."""
    kind, fields = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **fields})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "dt_bias", ".D", "A_log", "bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def text(count: int, seed: int = 1) -> tuple[int, ...]:
    ids = torch.randint(1, NO_END, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(ids.tolist())


def check(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    """Every token of the answer is the likeliest one after what comes before."""
    with torch.no_grad():
        ids = torch.tensor([(*prompt, *answer[:-1])])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1).tolist()
    near = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert float(near.max()) <= 1e-3, (best, answer)


def hits(engine: Engine) -> float:
    """Prompt tokens that were found in the cache."""
    (found,) = values(engine.statistics, names.PREFIX_HITS).values()
    return found


class Served:
    """A model of transformers, and engines over its export."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.engine = self.load()

    def load(self, **more: Any) -> Engine:
        settings = {"device": "cpu", "max_batch_size": 4, "enable_prefix_caching": True, **more}
        return Engine.load(EngineSettings(self.folder, **settings))

    def ask(self, prompt: tuple[int, ...], count: int, **more: Any) -> tuple[int, ...]:
        request = GenerateRequest(prompt, count, end_id=NO_END, **more)
        return self.engine.submit(request).result(120).output_ids


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hybrid")
    model = made(request.param)
    model.save_pretrained(folder / "hf")
    patch = pytest.MonkeyPatch()
    patch.setattr(row_allocator, "SNAPSHOT_TOKENS", 32)
    result = Served(model, export_folder(folder / "hf", folder))
    yield result
    result.engine.close()
    patch.undo()


# Mamba-2, delta nets, latent attention, convolutions: the slow ones have states of these kinds.
KINDS = ("nemotron_h", "qwen3_next", "kimi_linear", "lfm2")
of_every_kind = pytest.mark.parametrize(
    "served",
    [
        pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow], id=name)
        for name in FAMILIES
    ],
    indirect=True,
    scope="module",
)


def test_logits_and_tokens_are_those_of_transformers(served: Served) -> None:
    prompt = text(150)
    request = GenerateRequest(prompt, 12, end_id=NO_END, return_context_logits=True)
    answer = served.engine.submit(request).result(120)
    with torch.no_grad():
        expected = served.model(torch.tensor([prompt])).logits[0]
    got = torch.as_tensor(answer.context_logits)
    assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-4
    check(served.model, prompt, answer.output_ids)


@of_every_kind
def test_prompts_are_found_as_far_as_states_were_kept(served: Served) -> None:
    """The same prompt, one that parts from it, and one that goes on where its answer ended."""
    first = text(90, 2)
    answer = served.ask(first, 50)
    check(served.model, first, answer)
    for prompt in (first, (*first[:70], *text(9, 3)), (*first, *answer, *text(5, 4))):
        before = hits(served.engine)
        check(served.model, prompt, served.ask(prompt, 6))
        assert hits(served.engine) - before in (64, 80, 128)


def test_a_session_goes_on(served: Served) -> None:
    session, whole = Session(256, 256), ()
    for turn in range(3):
        prompt = text(11 + turn, 5 + turn)
        request = GenerateRequest(prompt, 7, end_id=NO_END)
        answer = served.engine.submit(request, session=session).result(60).output_ids
        check(served.model, (*whole, *prompt), answer)
        whole = (*whole, *prompt, *answer)
    served.engine.close_session(session)


@of_every_kind
def test_drafts_change_nothing(served: Served) -> None:
    prompt = text(6, 9) * 7
    plain = served.ask(prompt, 40)
    assert served.ask(prompt, 40, num_speculative_tokens=4) == plain
    check(served.model, prompt, plain)


@of_every_kind
def test_beams_are_those_of_transformers(served: Served) -> None:
    pair = Pair(served.model, served.engine, NO_END - 1)
    prompt = text(13, 10)
    sampling = SamplingParameters(beam_width=3, len_penalty=1.0)
    request = GenerateRequest(prompt, 12, end_id=pair.end, sampling=sampling)
    output = served.engine.submit(request).result(120)
    texts, _ = pair.theirs(prompt, 3, 12)
    assert [list(beam.output_ids) for beam in output.beams] == texts


@of_every_kind
def test_rows_that_lose_their_place_and_prompts_in_pieces(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loading.PREFILL_TOKENS, "cpu", 19)
    engine = served.load(max_tokens=300)
    try:
        prompts = [text(40 + 7 * n, 20 + n) for n in range(4)]
        futures = [engine.submit(GenerateRequest(each, 60, end_id=NO_END)) for each in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            check(served.model, prompt, future.result(120).output_ids)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_share_the_model(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, shape[0])
    engine = Engine.load(EngineSettings(folder, parallelism=Parallelism(*shape), device="cpu"))
    try:
        prompt = text(70)
        request = GenerateRequest(prompt, 20, end_id=NO_END, return_context_logits=True)
        answer = engine.submit(request).result(120)
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        got = torch.as_tensor(answer.context_logits)
        assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-4
        check(model, prompt, answer.output_ids)
    finally:
        engine.close()
