"""LoRA adapters that a gateway adds to a real server of two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.gateway import DeployedGateway
from tests.checkpoint.test_lora_stack import CASES, peft
from tests.checkpoint.tiny_models import LLAMA, TinyModel
from tests.http_requests import send
from tests.server.processes import RunningStep, running
from tests.server.repositories import TOKENIZERS, VOCAB_SIZE, export_settings
from tests.server.test_gateway import KEY

pytestmark = pytest.mark.usefixtures("tritonserver")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[RunningStep]:
    """A model that streams, exported with the adapter sql, and room for one more."""
    values = {**LLAMA, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    model = TinyModel("LlamaForCausalLM", "LlamaConfig", values).save(folder / "base")
    sql = peft(folder / "sql", model, CASES["llama"][0], 4)
    files = TOKENIZERS / "gpt2bpe"
    settings = export_settings(
        folder,
        tp=2,
        checkpoint_path=str(folder / "base"),
        tokenizer=TokenizerSettings(
            "files",
            library="megatron",
            vocab_file=str(files / "vocab.json"),
            merge_file=str(files / "merges.txt"),
        ),
        lora_checkpoints=(sql,),
        max_loras=1,
        decoupled=True,
    )
    export(settings)
    ModelRepository(settings.model_repository).write(settings)
    keys = folder / "keys"
    keys.write_text(f"tests={KEY}\n")
    keys.chmod(0o600)
    gateway = DeployedGateway(port=0, api_keys=str(keys), admins=("tests",))
    with running(folder / "job", settings.model_repository, gateway=gateway) as step:
        step.wait_until_ready()
        yield step
        assert step.stop() == 0, step.err


def ask(step: RunningStep, path: str, **body: Any) -> tuple[int, str]:
    openai = json.loads(step.settings.ready_file.read_text())["openai"]
    response = send(f"{urlsplit(openai).netloc}{path}", body or None, key=KEY)
    return response.status_code, response.text


def text(step: RunningStep, model: str) -> str:
    body = {"model": model, "prompt": "Hello the people", "max_tokens": 12, "temperature": 0}
    status, answer = ask(step, "/v1/completions", **body)
    assert status == 200, answer
    return str(json.loads(answer)["choices"][0]["text"])


def test_an_adapter_comes_and_goes(served: RunningStep, folder: Path) -> None:
    base, sql = text(served, "tiny"), text(served, "sql")
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    again = {"lora_name": "again", "lora_path": str(folder / "sql")}
    assert ask(served, load, **again) == (200, "Success: LoRA adapter 'again' added successfully.")
    names = [card["id"] for card in json.loads(ask(served, "/v1/models")[1])["data"]]
    assert names == ["tiny", "sql", "again"]
    assert text(served, "again") == sql != base == text(served, "tiny")
    status, answer = ask(served, load, lora_name="third", lora_path=str(folder / "sql"))
    assert (status, "all 1 slots for adapters are taken" in answer) == (400, True), answer
    assert ask(served, unload, lora_name="again")[0] == 200
    status, answer = ask(served, load, lora_name="none", lora_path=str(folder / "none"))
    assert (status, "the adapter is not there" in answer) == (400, True), answer
    assert ask(served, load, **again)[0] == 200
    assert text(served, "again") == sql
    assert ask(served, unload, lora_name="again")[0] == 200
