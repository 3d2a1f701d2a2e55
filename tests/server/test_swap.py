"""New weights in a running server, by the command, while clients stream."""

from __future__ import annotations

import socket
import stat
import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from safetensors.torch import load_file, save_file

from launcher_scripts.clients.refit import RefitClient
from launcher_scripts.clients.refit import main as refit_main
from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.files import DigestChain
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.jobs.__main__ import main
from tests.checkpoint.test_huggingface_out import convert
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


def ask_as(
    key: str, openai: str, body: dict[str, str], path: str = "/admin/weights"
) -> tuple[int, str]:
    response = send(f"{urlsplit(openai).netloc}{path}", body, key=key)
    return response.status_code, response.text


def test_a_trainer_gives_ranks_new_weights_and_their_memory(tmp_path: Path):
    """At TP 2: by a folder, by a socket, and a sleep in between."""
    served = export(
        tmp_path / "served", CONFIG, random_tensors(CONFIG, 0), decoupled=True, tp=2
    ).model_repository
    trained = convert(folder_of(served), tmp_path / "hf" / "m")
    tensors = load_file(trained / "model.safetensors")
    keys = tmp_path / "keys"
    keys.write_text(f"clients=sk-of-clients\ntests={KEY}\n")
    keys.chmod(0o600)
    gateway = DeployedGateway(port=0, api_keys=str(keys), admins=("tests",))
    with running(tmp_path / "job", served, gateway=gateway) as step:
        openai = step.wait_until_ready()["openai"]
        before = ask(openai, "/v1/completions", BODY)[1]
        moved = {name: (values * 1.3).contiguous() for name, values in tensors.items()}
        save_file(moved, trained / "model.safetensors", {"format": "pt"})
        for path in ("/admin/refit", "/admin/refit_socket", "/sleep", "/wake_up"):
            assert ask_as("sk-of-clients", openai, {}, path)[0] == 403
        body = {"folder": str(trained), "version": "step-1", "probe": True}
        status, reply = ask(openai, "/admin/refit", body)
        assert status == 200, reply
        assert reply["servers"][0]["difference"] <= reply["servers"][0]["max_difference"]
        after = ask(openai, "/v1/completions", BODY)[1]
        assert after["weights_version"] == "step-1"
        assert after["system_fingerprint"] != before["system_fingerprint"]
        assert after["choices"] != before["choices"]
        assert ask(openai, "/version")[1]["models"]["tiny"]["weights_version"] == "step-1"

        (server,) = ask(openai, "/admin/refit_socket", {"model": "tiny"})[1]["servers"]
        assert stat.S_IMODE(Path(server["socket"]).parent.stat().st_mode) == 0o700
        content = (trained / "model.safetensors").read_bytes()
        with closing(socket.socket(socket.AF_UNIX)) as half:
            half.connect(server["socket"])
            half.sendall(content[: len(content) // 2])
        fewer = {name: tensors[name] for name in tensors if "wte" not in name}
        with RefitClient(server["socket"]) as client, pytest.raises(ServerError, match="wte"):
            client.send(fewer)
        assert ask(openai, "/v1/completions", BODY)[1]["choices"] == after["choices"]
        with RefitClient(server["socket"]) as client:
            numbers = {name: values.numpy() for name, values in tensors.items()}
            assert client.send(numbers, "step-2")["version"] == 2
            assert client.send(tensors, "step-3", "drain")["version"] == 3
        assert refit_main([server["socket"], str(trained / "model.safetensors")]) == 0
        assert ask(openai, "/v1/completions", BODY)[1]["choices"] == after["choices"]
        with RefitClient(server["socket"]) as client:
            client.send(tensors, "step-5")
        again = ask(openai, "/v1/completions", BODY)[1]
        assert (again["choices"], again["weights_version"]) == (before["choices"], "step-5")
        assert [path.name for path in Path(server["socket"]).parent.iterdir()] == ["socket"]

        assert ask(openai, "/is_sleeping")[1] == {"is_sleeping": False}
        assert ask_as(KEY, openai, {}, "/sleep?level=1")[0] == 200
        assert ask(openai, "/is_sleeping")[1] == {"is_sleeping": True}
        status, answer = ask(openai, "/v1/completions", BODY)
        assert status == 503
        assert "POST /wake_up" in answer["error"]["message"]
        assert ask(openai, "/admin/refit", body)[0] == 409
        assert ask_as(KEY, openai, {}, "/wake_up")[0] == 200
        assert ask(openai, "/v1/completions", BODY)[1]["choices"] == before["choices"]
        assert step.stop() == 0, step.err
    assert not Path(server["socket"]).exists()
