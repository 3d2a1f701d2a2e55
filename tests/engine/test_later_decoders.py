"""Exports of today's Hugging Face decoders: the logits and the text of transformers, for prompts
longer than attention's window and than the positions before rotary scaling."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import LATER_DECODERS

SHORT = (5, 17, 2, 40, 66, 31, 8)
LONG = (*SHORT, 9, 9, 50, 21, 3, 60, 44, 12, 13, 37, 5, 28, 1, 64, 30, 7)
LENGTH = 64
NO_END = 67
SHAPES = [
    (1, 1),
    pytest.param((2, 1), marks=pytest.mark.slow),
    pytest.param((1, 2), marks=pytest.mark.slow),
]


def followed(
    model: PreTrainedModel, prompt: tuple[int, ...], answer: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt [T, vocab], and the ids that transformers appends to it greedily.

    One pass over prompt and answer tells whether every id of the answer is the likeliest one. Where
    the speeds of rotation depend on how long the row is by then, generate appends them one by one,
    in a copy of the model: it keeps the speeds of the longest row so far.
    """
    model = copy.deepcopy(model)
    parameters = getattr(model.config, "rope_parameters", None) or {}
    grows = parameters.get("rope_type") in ("dynamic", "longrope")
    ids = torch.tensor([prompt if grows else (*prompt, *answer[:-1])])
    with torch.no_grad():
        logits = model(ids).logits[0]
    if not grows:
        return logits[: len(prompt)], logits[len(prompt) - 1 :].argmax(-1).tolist()
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=len(answer), do_sample=False)
    return logits, out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LATER_DECODERS)
def test_logits_and_tokens_are_those_of_transformers(
    tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    model = LATER_DECODERS[name].save(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, shape[0])
    engine = Engine.load(EngineSettings(folder, parallelism=Parallelism(*shape), device="cpu"))
    # LongRoPE looks at how long a row may become, so a short one stays below 16 here.
    counts = {SHORT: 9 if name == "phi3_long" else LENGTH, LONG: LENGTH}
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
