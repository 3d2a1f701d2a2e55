"""LiteLLM: its library, and its proxy before the gateway, without a network."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched at the import

import litellm
import openai

from benchmarks.clients.target import MESSAGES, PROMPT, TOKENS, Target, Trial, check, same
from launcher_scripts.common.http_client import query

PACKAGES = ("litellm", "openai")
_PORT = 18942
_KEY = "sk-of-the-proxy"  # it starts with none or a short one only where told to
_START_SECONDS = 180


def trials(target: Target) -> list[Trial]:
    asked = {"api_base": target.openai, "api_key": "none", "temperature": 0, "max_tokens": TOKENS}
    vllm, plain = f"hosted_vllm/{target.model}", f"openai/{target.model}"

    def chat(model: str) -> str:
        answer = litellm.completion(model=model, messages=MESSAGES, **asked)
        return same(answer.choices[0].message.content, target.chat)

    def streamed() -> str:
        events = litellm.completion(model=vllm, messages=MESSAGES, stream=True, **asked)
        texts = [event.choices[0].delta.content or "" for event in events]
        return same("".join(texts), target.chat)

    def text() -> str:
        answer = litellm.text_completion(model=vllm, prompt=PROMPT, **asked)
        return same(answer.choices[0].text, target.completion)

    def no_model() -> str:
        try:
            litellm.completion(model="openai/none", messages=MESSAGES, **asked)
        except litellm.NotFoundError:
            return "NotFoundError"
        return check(False, "an answer")

    return [
        ("completion (openai/)", lambda: chat(plain)),
        ("completion (hosted_vllm/)", lambda: chat(vllm)),
        ("completion, stream", streamed),
        ("text_completion", text),
        ("no such model", no_model),
        ("proxy: chat, stream, completion", lambda: through_proxy(target)),
    ]


def through_proxy(target: Target) -> str:
    with (
        proxy(target),
        openai.OpenAI(base_url=f"http://127.0.0.1:{_PORT}/v1", api_key=_KEY) as client,
    ):
        chats, asked = client.chat.completions.create, {"temperature": 0, "max_tokens": TOKENS}
        answer = chats(model="tried", messages=MESSAGES, **asked)
        same(answer.choices[0].message.content or "", target.chat)
        events = chats(model="tried", messages=MESSAGES, stream=True, **asked)
        texts = [event.choices[0].delta.content or "" for event in events if event.choices]
        same("".join(texts), target.chat)
        text = client.completions.create(model="tried", prompt=PROMPT, **asked)
        return same(text.choices[0].text, target.completion)


@contextlib.contextmanager
def proxy(target: Target) -> Iterator[None]:
    """LiteLLM's proxy before the gateway, ready."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = {"model": f"hosted_vllm/{target.model}", "api_base": target.openai}
        parameters["api_key"] = "none"
        served = {"model_name": "tried", "litellm_params": parameters}
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"model_list": [served]}))  # JSON is YAML, too
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
        with (Path(folder) / "log.txt").open("w+") as log:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(_PORT)],
                env={**os.environ, "LITELLM_MASTER_KEY": _KEY},
                stdout=log,
                stderr=log,
            )
            try:
                wait_until_alive(process, Path(log.name))
                yield
            finally:
                process.terminate()
                process.wait(60)


def wait_until_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises WrongAnswer with the proxy's last words when it does not answer."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            if query(f"127.0.0.1:{_PORT}", "/health/liveliness", 10)[0] < 400:
                return
        time.sleep(0.2)
    check(False, log.read_text()[-1000:])
