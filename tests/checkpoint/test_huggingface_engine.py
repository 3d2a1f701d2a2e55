"""The engine on exports of Hugging Face's decoders: the logits and the text of transformers."""

from pathlib import Path

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint.engine_answers import answers, check_continued
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS

PROMPT = (5, 17, 2, 40, 66, 31, 8)
LENGTH = 6


@pytest.mark.parametrize("name", DECODERS)
def test_the_engine_continues_as_transformers_does(tmp_path: Path, name: str) -> None:
    model = DECODERS[name].save(tmp_path / "hf")
    check_continued(model, export_folder(tmp_path / "hf", tmp_path), PROMPT, LENGTH)


@pytest.mark.parametrize("name", ["bart", "mbart", "m2m_100", "pegasus", "marian"])
def test_the_engine_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    model = ENCODER_DECODERS[name].make().eval()
    model.save_pretrained(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path)
    decoder = (2, 9, 33, 4)
    request = GenerateRequest(
        PROMPT, output_len=0, decoder_input_ids=decoder, return_context_logits=True
    )
    got = answers(folder, request)[0].context_logits
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([decoder])).logits
    torch.testing.assert_close(torch.as_tensor(got), expected[0], rtol=1e-6, atol=1e-5)
