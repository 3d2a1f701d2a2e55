"""The quickstart's own logic; the way itself is run by `make quickstart`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from launcher_scripts.checkpoint.sources.nemo_writer import GGUFLlama
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.packages import ERROR
from launcher_scripts.config.options import build
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.evaluation import gate
from launcher_scripts.evaluation.comparison import compare
from launcher_scripts.evaluation.journal import read_content
from launcher_scripts.evaluation.tasks.task import Metric, TaskResult
from launcher_scripts.steps import quickstart
from tests.processes import wait_for


def _verdict(change: dict[str, Any]) -> gate.Verdict:
    """The verdict on the reference's own answers, but for the second item's `change`."""
    section = read_content(quickstart.REFERENCE, "the quickstart")["tasks"]["lambada"]
    metrics = {name: Metric(**metric) for name, metric in section["metrics"].items()}
    reference = TaskResult(metrics, section["items"])
    items = [dict(item) for item in section["items"]]
    items[1] |= change
    served = replace(reference, items=items)
    served = replace(served, reference=compare(served, reference, "transformers"))
    content = json.loads(json.dumps({"tasks": {"lambada": asdict(served)}}))
    arguments = quickstart.main_command(Path("model.nemo"), Path("results"))
    (asked,) = (one for one in arguments if one.startswith("evaluate.policy.reference="))
    value = OverridesParser.create().parse_override(asked).value()
    policy = build(PolicySettings, {"reference": value}, "the quickstart's policy")
    return gate.judge(content, policy, Path())


def test_the_same_answers_are_a_go() -> None:
    verdict = _verdict({})
    assert (verdict.verdict, verdict.exit_code) == ("GO", 0)
    assert verdict.reasons[0].text.endswith("is 100 %; at least 100 % is asked; 200 of 200 items")


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"correct": True}, "reference.min_agreement"),
        ({"last_token_correct": False}, "reference.min_agreement"),
        ({"log_likelihood": -50.0}, "reference.max_log_likelihood_difference"),
    ],
)
def test_one_differing_item_is_a_no_go(change: dict[str, Any], bound: str) -> None:
    verdict = _verdict(change)
    assert (verdict.verdict, verdict.exit_code) == ("NO-GO", 1)
    assert [one.bound for one in verdict.reasons if one.level == "fail"] == [bound]


def test_an_item_of_other_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"transformers does not have every item; got \[1\]"):
        _verdict({"target": " Ann"})


def test_paths_survive_hydras_command_line(tmp_path: Path) -> None:
    nasty = tmp_path / "a 'b' \\c\\'d, $(e) ${f}=[g]\\"
    parser = OverridesParser.create()
    arguments = {
        argument.partition("=")[0]: argument for argument in quickstart.main_command(nasty, nasty)
    }
    for key in ("base_results_dir", "export.model.checkpoint_path"):
        value = str(parser.parse_override(arguments[key]).value())
        assert OmegaConf.create({"path": value}).path == str(nasty)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cpu"), (2, "auto")])
def test_two_ranks_want_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str
) -> None:
    lines = "".join(f"echo '{number}, GPU-{number}, 143771, 9.0'\n" for number in range(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert quickstart.device() == device


def test_without_a_driver_the_ranks_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert quickstart.device() == "cpu"


def test_the_shipped_model_is_the_one_described() -> None:
    llama = GGUFLlama(quickstart.gguf_file())
    shape = llama.shape
    assert (shape.num_layers, shape.hidden_size, shape.ffn_size) == (30, 576, 1536)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_size) == (9, 3, 64)
    assert (shape.vocab_size, shape.rotary_base, shape.norm_eps) == (49152, 100000.0, 1e-5)
    assert llama.tied_embeddings


def test_the_launchers_exit_code_is_handed_on() -> None:
    assert quickstart.run_deployment([sys.executable, "-c", "raise SystemExit(3)"]) == 3


class _Gateway(BaseHTTPRequestHandler):
    """Answers every chat; a model called otherwise is not found."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = body["model"] == quickstart.MODEL_NAME and self.path == "/v1/chat/completions"
        message = {"content": f"{body['messages'][0]['content']} Paris."}
        answer = {"choices": [{"message": message}]} if known else {"error": "unknown"}
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Gateway)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_chat_is_asked_when_the_server_is_ready_and_printed(
    tmp_path: Path, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = quickstart.QuickstartChat(tmp_path / "ready.json")
    program = f"import time, pathlib; ready = pathlib.Path({str(tmp_path / 'ready.json')!r})\n"
    program += f"ready.write_text({json.dumps({'openai': gateway})!r})\n"
    program += f"while not pathlib.Path({str(tmp_path / 'asked')!r}).exists(): time.sleep(0.01)"

    def meanwhile() -> None:
        chat.ask_once()
        if chat.answer:
            (tmp_path / "asked").touch()

    code = quickstart.run_deployment([sys.executable, "-c", program], meanwhile)
    assert chat.report(code) == 0
    assert "assistant: What is the capital of France? Paris." in capsys.readouterr().out
    assert chat.report(3) == 3


def test_a_failed_chat_is_an_error(
    tmp_path: Path, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart.QuickstartChat(tmp_path / "ready.json").report(0) == ERROR
    assert "did not appear" in capsys.readouterr().err
    chat = quickstart.QuickstartChat(tmp_path / "ready.json")
    (tmp_path / "ready.json").write_text(json.dumps({"openai": f"{gateway}/elsewhere"}))
    chat.ask_once()
    assert chat.report(0) == ERROR
    assert "HTTP Error 404" in capsys.readouterr().err


def test_a_signal_ends_the_launcher_too(tmp_path: Path) -> None:
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
    child += f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(600)"
    parent = (
        "import sys; from launcher_scripts.steps import quickstart; "
        f"sys.exit(quickstart.run_deployment([sys.executable, '-c', {child!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=quickstart.CHECKOUT)
    try:
        wait_for((tmp_path / "up").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 7
    finally:
        process.kill()
        process.wait()
