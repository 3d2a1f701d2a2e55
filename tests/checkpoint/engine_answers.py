"""What the engine answers from an exported folder, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings


def answers(folder: Path, *requests: GenerateRequest, tp_size: int = 1) -> list[GenerateOutput]:
    parallelism = Parallelism(tp_size, 1)
    settings = EngineSettings(folder, parallelism=parallelism, device="cpu", max_batch_size=4)
    engine = Engine.load(settings)
    try:
        return [each.result(60) for each in [engine.submit(request) for request in requests]]
    finally:
        engine.close()


def check_continued(model: Any, folder: Path, prompt: tuple[int, ...], length: int) -> None:
    """The logits of a prompt and what follows it are those of transformers' model."""
    request = GenerateRequest(prompt, length, end_id=0, return_context_logits=True)
    (answer,) = answers(folder, request)
    ids = list(prompt)
    with torch.no_grad():
        context = model(input_ids=torch.tensor([ids])).logits[0]
        for _ in answer.output_ids:
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(answer.output_ids) == ids[len(prompt) :]
    found = torch.as_tensor(answer.context_logits)
    torch.testing.assert_close(found, context, rtol=1e-5, atol=1e-5)
