"""BART and mBART on the engine, as the plain forward and as transformers have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import RequestError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.models.bart import BartConfig
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import BART, TinyModel
from tests.engine.small_bart import bart_config, plain_greedy, plain_logits
from tests.engine.small_models import engine_for, generate, load_engine, random_tensors
from tests.engine.small_t5 import DECODER, SOURCE, decoder_logits

TOLERANCE = 2e-4
SOURCES = (SOURCE, (7,), tuple(range(3, 30)))
VARIANTS: dict[str, dict[str, Any]] = {
    "bart": {},
    "other_heads": {"num_decoder_heads": 2},
    "mbart": {"norm_placement": "pre", "activation": "relu", "logits_bias": False},
    "m2m_100": {"norm_placement": "pre", "embedding_norm": False, "logits_bias": False},
    "marian": {"embedding_norm": False, "activation": "silu"},
}


def check(engine: Engine, config: BartConfig) -> None:
    for source in SOURCES:
        expected = plain_logits(config, source, DECODER)
        got = decoder_logits(engine, source, DECODER)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    answer = engine.submit(GenerateRequest(SOURCE, 6)).result(60)
    assert list(answer.output_ids) == plain_greedy(config, SOURCE, 6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens(variant: str) -> None:
    config = bart_config(**VARIANTS[variant])
    engine = engine_for(config, random_tensors(config))
    try:
        check(engine, config)
        with pytest.raises(RequestError, match="the encoder has 40 positions"):
            engine.submit(GenerateRequest((5,) * 41, 1)).result(60)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("variant", "tp", "pp"),
    [
        ("bart", 2, 1),
        pytest.param("mbart", 1, 2, marks=pytest.mark.slow),
        pytest.param("bart", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_several_ranks(tmp_path: Path, variant: str, tp: int, pp: int) -> None:
    config = bart_config(**VARIANTS[variant])
    engine = load_engine(tmp_path, config, random_tensors(config), tp, pp)
    try:
        check(engine, config)
    finally:
        engine.close()


def mbart_config() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.MBartConfig(
        vocab_size=67,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=40,
        scale_embedding=True,
        activation_function="relu",
    )


def test_transformers_own_logits_and_tokens(tmp_path: Path) -> None:
    """An mBART with scaled embeddings, exported; decoder_input_ids hold the forced first token."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.MBartForConditionalGeneration(mbart_config()).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(tmp_path / "hf")
    ids, targets = torch.tensor([SOURCE]), torch.tensor([DECODER])
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=targets).logits[0]
        tokens = model.generate(
            ids,
            decoder_input_ids=torch.tensor([[0, 9]]),
            max_new_tokens=6,
            do_sample=False,
            forced_eos_token_id=None,
        )
    folder = export_folder(tmp_path / "hf", tmp_path, 1)
    engine = Engine.load(EngineSettings(folder, device="cpu", max_batch_size=2))
    try:
        got = decoder_logits(engine, SOURCE, DECODER)
        request = GenerateRequest(SOURCE, 6, decoder_input_ids=(0, 9))
        answer = engine.submit(request).result(60).output_ids
    finally:
        engine.close()
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    assert list(answer) == tokens[0, 2:].tolist()


def rightly_mixed(self: Any, hidden: torch.Tensor, _: Any, weights: torch.Tensor) -> torch.Tensor:
    """Experts by their routers' weights [N, experts] as the paper has it: transformers 5 takes a
    mask of the first choice for the numbers of experts, and sends every token to the first two.
    """
    out = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        rows = weights[:, expert].nonzero()[:, 0]
        result = self[f"expert_{expert}"](hidden[rows]) * weights[rows, expert, None]
        out[rows] += result * (1 - self.moe_token_dropout)
    return out


@pytest.mark.parametrize(
    ("tp", "pp", "bias"),
    [
        (1, 1, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(1, 2, True, marks=pytest.mark.slow),
    ],
)
def test_two_of_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, bias: bool
) -> None:
    modeling = pytest.importorskip("transformers.models.nllb_moe.modeling_nllb_moe")
    monkeypatch.setattr(modeling.NllbMoeExperts, "forward", rightly_mixed)
    values = {**BART, "num_experts": 5, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    values |= {"router_bias": bias, "decoder_start_token_id": 2, "max_position_embeddings": 80}
    tiny = TinyModel("NllbMoeForConditionalGeneration", "NllbMoeConfig", values)
    model = tiny.make()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    model.save_pretrained(tmp_path / "hf")
    ids, targets = torch.tensor([SOURCE]), torch.tensor([DECODER])
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=targets).logits[0]
        tokens = model.generate(
            ids, max_new_tokens=24, eos_token_id=None, do_sample=False, use_cache=False
        )
    folder = export_folder(tmp_path / "hf", tmp_path, tp)
    engine = Engine.load(EngineSettings(folder, parallelism=Parallelism(tp, pp), device="cpu"))
    try:
        got = decoder_logits(engine, SOURCE, DECODER)
        text = generate(engine, SOURCE, 24, end_id=expected.shape[1])
    finally:
        engine.close()
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    assert text == tokens[0, 1:].tolist()
    assert len(set(text)) > 1
