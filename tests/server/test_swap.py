"""New weights in a running server, by the command, while clients stream."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from launcher_scripts.common.files import DigestChain
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.jobs.__main__ import main
from tests.engine.small_models import random_tensors
from tests.http_requests import send
from tests.server.processes import running
from tests.server.repositories import export, text_config
from tests.server.test_gateway import KEY, ask

pytestmark = pytest.mark.usefixtures("tritonserver")
CONFIG = text_config(max_positions=1024)
BODY = {"prompt": "Hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def folder_of(repository: str) -> Path:
    (manifest,) = Path(repository).glob("*/1/*-gpu/manifest.json")
    return manifest.parent


def test_a_running_server_gets_the_weights_of_another_export(tmp_path: Path, capsys):
    first, second = (
        export(
            tmp_path / name, CONFIG, random_tensors(CONFIG, seed), decoupled=True
        ).model_repository
        for name, seed in (("first", 0), ("second", 1))
    )
    keys = tmp_path / "keys"
    keys.write_text(f"clients=sk-of-clients\ntests={KEY}\n")
    keys.chmod(0o600)
    gateway = DeployedGateway(port=0, api_keys=str(keys), admins=("tests",))
    with running(tmp_path / "job", first, gateway=gateway) as step:
        ready = step.wait_until_ready()
        openai = ready["openai"]
        before = ask(openai, "/v1/completions", BODY)[1]
        assert before["system_fingerprint"] == DigestChain.of(folder_of(first)).fingerprint
        answers, ended = [], threading.Event()

        def stream() -> None:
            while not ended.is_set():
                answers.append(ask(openai, "/v1/completions", BODY))

        threads = [threading.Thread(target=stream) for _ in range(3)]
        for thread in threads:
            thread.start()
        ready_file = str(step.settings.ready_file)
        assert main(["swap", ready_file, str(second), "--mode", "mixed"]) == 0
        ended.set()
        for thread in threads:
            thread.join()
        digests = DigestChain.of(folder_of(second))
        assert f"{digests.fingerprint}, version 1" in capsys.readouterr().out
        assert {status for status, _ in answers} == {200}
        after = ask(openai, "/v1/completions", BODY)[1]
        assert after["system_fingerprint"] == digests.fingerprint
        assert after["choices"] != before["choices"]
        (shown,) = ask(openai, "/version")[1]["models"].values()
        assert shown == digests.values()
        metrics = send(f"{urlsplit(openai).netloc}/servers/metrics", key=KEY).text
        assert f'system_fingerprint="{digests.fingerprint}"' in metrics
        narrow = export(tmp_path / "narrow", text_config(max_positions=512)).model_repository
        assert main(["swap", ready_file, str(narrow)]) == 1
        assert "max_positions is another one" in capsys.readouterr().err
        assert ask(openai, "/v1/completions", BODY)[1]["choices"] == after["choices"]
        body = {"checkpoint": str(second)}
        assert "admins" in str(ask_as("sk-of-clients", openai, body))
        assert step.stop() == 0, step.err


def ask_as(key: str, openai: str, body: dict[str, str]) -> tuple[int, str]:
    response = send(f"{urlsplit(openai).netloc}/admin/weights", body, key=key)
    return response.status_code, response.text
