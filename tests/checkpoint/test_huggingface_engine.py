"""The engine on exports of Hugging Face's decoders: the logits and the text of transformers."""

from pathlib import Path

import pytest
import torch

from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.errors import ConfigError
from launcher_scripts.protocol import GenerateRequest
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


def test_a_family_it_does_not_serve_is_refused_by_name(tmp_path: Path) -> None:
    ENCODER_DECODERS["bart"].make().save_pretrained(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    with pytest.raises(ConfigError, match="got 'family bart'; choices: gpt, t5"):
        Engine.load(EngineSettings(folder, device="cpu"))
