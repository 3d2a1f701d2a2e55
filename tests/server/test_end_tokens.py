"""Text models of a Hugging Face export: its start token, and every one of its end tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from tests.checkpoint.test_generation_files import repository, save_fast
from tests.checkpoint.tiny_models import DECODERS
from tests.http_requests import receive
from tests.server.processes import running

pytestmark = pytest.mark.usefixtures("tritonserver")
PROMPT = "the fox"


def ask(served: dict[str, Any], model: str, **body: Any) -> dict[str, Any]:
    return receive(f"{served['http']}/v2/models/{model}/generate", body)


def test_texts_start_and_end_as_in_transformers(tmp_path: Path) -> None:
    model = DECODERS["llama"].save(tmp_path / "hf")
    save_fast(tmp_path / "hf", starts=True)
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        free = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=66)[0]
    answer = free[ids.shape[1] :].tolist()
    end = answer[4]
    length = answer.index(end) + 1
    GenerationConfig(eos_token_id=[2, end]).save_pretrained(tmp_path / "hf")
    root = repository(tmp_path)
    with running(tmp_path / "job", root) as step:
        served = step.wait_until_ready()
        asked = {"INPUT_0": PROMPT, "INPUT_1": 12}
        assert ask(served, "ensemble", **asked)["sequence_length"] == ids.shape[1] + length
        own = ask(served, "ensemble", **asked, end_id=66)["sequence_length"]
        assert own == ids.shape[1] + len(answer)
        assert ask(served, "ensemble", **asked, INPUT_3="hello")["sequence_length"] == (
            ids.shape[1] + length
        )
        assert step.stop() == 0, step.err
