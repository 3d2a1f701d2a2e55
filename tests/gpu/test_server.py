"""A real tritonserver on CUDA: the tokens of the engine on the CPU, request by request."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher_scripts.checkpoint.repository.model_repository import ModelRepository
from launcher_scripts.common.errors import ServerError
from launcher_scripts.config.settings import (
    DeploySettings,
    ExportSettings,
    TokenizerSettings,
    write_settings,
)
from launcher_scripts.server.installation import find_installation
from tests.engine.small_models import (
    context_logits,
    engine_for,
    generate,
    random_tensors,
    write_checkpoint,
)
from tests.gpu.test_engine import LENGTHS, MODERN, PROMPTS, wider

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
    url = f"http://{address}/v2/models/tiny/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
        return {output["name"]: output["data"] for output in json.load(response)["outputs"]}


def test_served_float32_tokens_equal_the_cpu(tmp_path: Path, checkout: Path):
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
    write_repository(tmp_path / "repository", config, tensors)
    settings = DeploySettings(
        str(tmp_path / "repository"),
        str(tmp_path / "results"),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        host="127.0.0.1",
        device="cuda",
    )
    write_settings(settings, tmp_path / "deploy.yaml")
    command = [sys.executable, "-m", "launcher_scripts.steps.start_server", "--settings"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, str(tmp_path / "deploy.yaml")], cwd=checkout, stdout=log, stderr=log
        )
    try:
        ready = wait_for(settings.ready_file, server, tmp_path / "log")
        assert "cuda:0" in ready["ranks"][0]["device"]
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda one: infer(ready["http"], *one), zip(PROMPTS, LENGTHS, strict=True))
            )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    for prompt, tokens, want, answer in zip(PROMPTS, expected, logits, answers, strict=True):
        assert answer["output_ids"][len(prompt) : answer["sequence_length"][0]] == tokens
        difference = max(
            abs(got - value)
            for got, value in zip(answer["context_logits"], want.flatten().tolist(), strict=True)
        )
        assert difference <= 2e-4


def write_repository(root: Path, config, tensors) -> None:
    write_checkpoint(root / "tiny" / "1" / "1-gpu", config, tensors, 1)
    ModelRepository(root).write(
        ExportSettings(
            model_name="tiny",
            model_type="gpt3",
            checkpoint_path="unused",
            triton_model_dir=str(root / "tiny"),
            tokenizer=TokenizerSettings(source="none"),
            max_batch_size=8,
        )
    )


def wait_for(ready_file: Path, server: subprocess.Popen, log: Path) -> dict:
    deadline = time.monotonic() + 120
    while not ready_file.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the server did not become ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)
    return json.loads(ready_file.read_text())
