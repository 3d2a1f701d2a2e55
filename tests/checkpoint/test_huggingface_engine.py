"""The engine on exports of Hugging Face's decoders: the logits and the text of transformers."""

from pathlib import Path

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS

PROMPT = (5, 17, 2, 40, 66, 31, 8)
LENGTH = 6


@pytest.mark.parametrize("name", DECODERS)
def test_the_engine_continues_as_transformers_does(tmp_path: Path, name: str) -> None:
    model = DECODERS[name].save(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    engine = Engine.load(EngineSettings(folder, device="cpu"))
    try:
        request = GenerateRequest(PROMPT, LENGTH, end_id=0, return_context_logits=True)
        answer = engine.submit(request).result(60)
    finally:
        engine.close()
    ids = list(PROMPT)
    with torch.no_grad():
        context = model(torch.tensor([ids])).logits[0]
        for _ in answer.output_ids:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(answer.output_ids) == ids[len(PROMPT) :]
    assert (torch.as_tensor(answer.context_logits) - context).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["bart", "mbart", "m2m_100", "pegasus", "marian"])
def test_the_engine_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    model = ENCODER_DECODERS[name].make().eval()
    model.save_pretrained(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    decoder = (2, 9, 33, 4)
    engine = Engine.load(EngineSettings(folder, device="cpu"))
    try:
        request = GenerateRequest(
            PROMPT, output_len=0, decoder_input_ids=decoder, return_context_logits=True
        )
        got = engine.submit(request).result(60).context_logits
    finally:
        engine.close()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([decoder])).logits
    torch.testing.assert_close(torch.as_tensor(got), expected[0], rtol=1e-6, atol=1e-5)
