"""What the gateway learns of a model from its server's ready file and its repository."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError, LauncherError, ServerError
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.gateway import fleet
from launcher_scripts.gateway.fleet import load_models
from launcher_scripts.gateway.served_model import ServedModel
from launcher_scripts.gateway.service import ready_lines, serve_gateway_settings
from launcher_scripts.steps.start_gateway import main
from tests.gateway.fakes import CHATML, GPT2, TOKENIZERS, FakeBackend, served
from tests.server.repositories import export, text_config


class FakeServer:
    """Takes the place of a TritonServer, with the models of a repository."""

    configs: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    def __init__(self, address: str, _tls: Any = None) -> None:
        self.address = address

    async def is_ready(self, model: str) -> bool:
        return model in self.configs

    async def models(self) -> list[str]:
        return sorted(self.configs)

    async def model_config(self, model: str) -> dict[str, Any]:
        return self.configs[model]


def config(name: str, backend: str = "fastertransformer", **parameters: str) -> dict[str, Any]:
    values = {key: {"string_value": value} for key, value in parameters.items()}
    inputs = [{"name": "input_lengths", "data_type": "TYPE_UINT32"}]
    return {"name": name, "backend": backend, "parameters": values, "input": inputs}


@pytest.fixture(params=["learned"])
def repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """An exported model, and a ready file beside it that says where it is."""
    settings = export(tmp_path, text_config(max_positions=77, position_embedding=request.param))
    configs = {
        "tiny": config("tiny", model_type="GPT"),
        "ensemble": config(
            "ensemble",
            "python",
            token_model="tiny",
            opening_id="7",
            closing_id="8 9",
            end_ids="11 12",
        ),
    }
    monkeypatch.setattr(FakeServer, "configs", configs)
    monkeypatch.setattr(fleet, "TritonServer", FakeServer)
    write_ready(tmp_path, model_repository=str(settings.model_repository))
    return settings.model_repository


def write_ready(folder: Path, **facts: Any) -> None:
    now = datetime.now(timezone.utc).isoformat()
    content = {"grpc": "nowhere:1", "alive_at": now, **facts}
    (folder / "ready.json").write_text(json.dumps(content))


def load(*folders: Path, **more: Any) -> list[ServedModel]:
    settings = GatewaySettings(tuple(map(str, folders)), **{"ready_timeout": 0.0, **more})

    async def loaded() -> list[ServedModel]:
        return await load_models(settings, fleet.Fleet(settings))

    return asyncio.run(loaded())


def test_a_model_is_what_its_repository_says(repository: Path, tmp_path: Path) -> None:
    (model,) = load(tmp_path)
    assert model.name == "tiny"
    assert model.encode("Hello") == [7, *GPT2.encode("Hello"), 8, 9]
    assert model.end_ids == (0, 11, 12)
    assert model.max_len == 77
    assert not model.encodes
    assert model.template is None
    assert model.token_names == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert repository.is_dir()


@pytest.mark.parametrize(
    ("repository", "positions"),
    [("learned", 77), ("rope", 77), ("alibi", None)],
    indirect=["repository"],
)
def test_positions_limit_a_model_that_has_so_many(
    repository: Path, tmp_path: Path, positions: int | None
) -> None:
    (model,) = load(tmp_path)
    assert model.max_len == positions
    assert repository.is_dir()


def test_the_checkpoints_template_and_defaults_count(repository: Path, tmp_path: Path) -> None:
    (folder,) = repository.glob("tiny/1/*-gpu")
    config = {"chat_template": "own {{ bos_token }}", "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {"temperature": 0.6, "top_k": 50, "eos_token_id": [0], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (model,) = load(tmp_path, max_model_len=50)
    assert model.template is not None
    assert model.template.render([{"role": "user", "content": "a"}]) == "own <s>"
    assert model.defaults == {"temperature": 0.6, "top_k": 50}
    assert model.max_len == 50


def test_the_gateways_template_replaces_the_models(repository: Path, tmp_path: Path) -> None:
    (folder,) = repository.glob("tiny/1/*-gpu")
    own = [{"name": "default", "template": "own"}, {"name": "tool_use", "template": "own"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}))
    (tmp_path / "other.jinja").write_text(CHATML)
    (model,) = load(tmp_path, chat_template=str(tmp_path / "other.jinja"))
    assert model.template is not None
    assert model.template.text == CHATML
    assert model.template.render([], tools=[{}], add_generation_prompt=False) == ""
    (tmp_path / "other.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"other\.jinja is not a valid Jinja template: line 1"):
        load(tmp_path, chat_template=str(tmp_path / "other.jinja"))
    assert repository.is_dir()


def test_a_tokenizer_may_lie_elsewhere(repository: Path, tmp_path: Path) -> None:
    shutil.rmtree(repository)
    with pytest.raises(ConfigError, match=r"where the tokenizer .* is not known; change --tok"):
        load(tmp_path)
    (model,) = load(tmp_path, tokenizer_dir=str(TOKENIZERS / "gpt2bpe"))
    assert (model.max_len, model.end_ids) == (None, (GPT2.end_id, 11, 12))


def test_only_models_that_are_named_are_served(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {name: config(name) for name in ("first", "tiny")}
    monkeypatch.setattr(FakeServer, "configs", configs)
    tokenizer = str(next(repository.glob("tiny/1/*-gpu")))
    assert [model.name for model in load(tmp_path, tokenizer_dir=tokenizer)] == ["first", "tiny"]
    (model,) = load(tmp_path, tokenizer_dir=tokenizer, models=("tiny",))
    assert model.name == "tiny"
    with pytest.raises(ConfigError, match=r"'second'.*choices: first, tiny; change --models"):
        load(tmp_path, models=("second",))


def test_an_encoder_is_served_for_embeddings_and_an_agm_is_not(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "configs", {"tiny": config("tiny", model_type="T5-Encoder")})
    (model,) = load(tmp_path)
    assert model.embeds and model.encodes
    monkeypatch.setattr(FakeServer, "configs", {"tiny": config("tiny", model_type="Agm")})
    with pytest.raises(ConfigError, match="no server serves a model that generates or encodes"):
        load(tmp_path)
    assert repository.is_dir()


def test_ready_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="is not there; change --ready"):
        load(tmp_path / "nothing")
    (tmp_path / "ready.json").write_text("{")
    with pytest.raises(ServerError, match="cannot be read"):
        load(tmp_path)
    old = (datetime.now(timezone.utc) - timedelta(hours=1)).isoformat()
    write_ready(tmp_path, alive_at=old)
    with pytest.raises(ServerError, match="its server was killed"):
        load(tmp_path)
    (tmp_path / "ready.json").write_text('{"http": "nowhere:2"}')
    with pytest.raises(ServerError, match="gives no grpc address"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ready": ()}, "--ready"),
        ({"port": 65536}, "--port"),
        ({"max_running": 0}, "--max-running"),
        ({"max_waiting": -1}, "--max-waiting"),
        ({"ready_timeout": -1.0}, "--ready-timeout"),
        ({"drain_timeout": math.nan}, "--drain-timeout"),
        ({"request_timeout": -1.0}, "--request-timeout"),
        ({"max_model_len": -1}, "--max-model-len"),
        ({"tls_certificate": "a.pem"}, "--tls-certificate"),
        ({"tls_key": "a.pem"}, "a key its certificate"),
        ({"server_key": "a.pem"}, "--server-ca"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GatewaySettings(**{"ready": ("ready.json",), **changes})


def test_all_files_that_are_missing_are_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    settings = GatewaySettings(
        ("ready.json",), chat_template=gone, api_keys=gone, tokenizer_dir=gone, server_ca=gone
    )
    with pytest.raises(LauncherError) as failed:
        serve_gateway_settings(settings)
    for flag in ("--chat-template", "--api-keys", "--tokenizer-dir", "--server-ca"):
        assert flag in str(failed.value)


def test_a_port_in_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--ready", "nothing", "--port", str(port)]) == 1
    assert f"'127.0.0.1:{port}'; change --host or --port" in capsys.readouterr().err


def test_a_host_that_is_none_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ready", "nothing", "--host", "no.such.host.invalid"]) == 1
    assert "cannot listen: the host's name stands for no address" in capsys.readouterr().err


def test_keys_that_others_can_read_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice=sk-secret\n")
    keys.chmod(0o644)
    assert main(["--ready", "nothing", "--api-keys", str(keys)]) == 1
    err = capsys.readouterr().err
    assert "chmod 600" in err
    assert "sk-secret" not in err


def test_the_ready_lines() -> None:
    name = "a 'model'"
    lines = ready_lines("http://here:1", [served(FakeBackend(), name)], keyed=True).splitlines()
    assert json.loads(lines[0].removeprefix("ready: ")) == {
        "openai": "http://here:1/v1",
        "models": [name],
    }
    assert lines[1].startswith("try: curl http://here:1/v1/completions -H 'Content-Type: ")
    assert lines[1].endswith('-H "Authorization: Bearer $OPENAI_API_KEY"')
