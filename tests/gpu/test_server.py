"""A real tritonserver on CUDA: the tokens of the engine on the CPU, request by request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.server.installation import find_installation
from tests.engine.small_models import context_logits, engine_for, generate, random_tensors
from tests.gpu.test_engine import LENGTHS, MODERN, PROMPTS, wider
from tests.http_requests import receive
from tests.server.processes import running
from tests.server.repositories import export

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def infer(address: str, prompt: tuple[int, ...], output_len: int) -> dict[str, list]:
    """One request in Triton's JSON: output name -> flat data."""
    inputs = [
        ("input_ids", "UINT32", [1, len(prompt)], list(prompt)),
        ("input_lengths", "UINT32", [1, 1], [len(prompt)]),
        ("request_output_len", "UINT32", [1, 1], [output_len]),
        ("is_return_context_logits", "BOOL", [1, 1], [True]),
    ]
    body = {
        "inputs": [
            {"name": name, "datatype": kind, "shape": shape, "data": data}
            for name, kind, shape, data in inputs
        ]
    }
    outputs = receive(f"{address}/v2/models/tiny/infer", body)["outputs"]
    return {output["name"]: output["data"] for output in outputs}


def test_served_float32_tokens_equal_the_cpu(tmp_path: Path):
    try:
        find_installation(None)
    except ServerError as error:
        pytest.skip(str(error))
    config = wider(**MODERN)
    tensors = random_tensors(config)
    reference = engine_for(config, tensors)
    expected = [
        generate(reference, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    logits = [context_logits(reference, prompt) for prompt in PROMPTS]
    reference.close()
    settings = export(tmp_path, config, tensors, tokenizer=TokenizerSettings("none"))
    with running(tmp_path / "job", settings.model_repository, device="cuda") as step:
        ready = step.wait_until_ready()
        assert "cuda:0" in ready["ranks"][0]["device"]
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda one: infer(ready["http"], *one), zip(PROMPTS, LENGTHS, strict=True))
            )
        assert step.stop() == 0, step.err
    for prompt, tokens, want, answer in zip(PROMPTS, expected, logits, answers, strict=True):
        assert answer["output_ids"][len(prompt) : answer["sequence_length"][0]] == tokens
        difference = max(
            abs(got - value)
            for got, value in zip(answer["context_logits"], want.flatten().tolist(), strict=True)
        )
        assert difference <= 2e-4
