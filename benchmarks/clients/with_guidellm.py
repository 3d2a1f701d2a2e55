"""The load generator guidellm, with the tokenizer of the served model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.clients.target import Target, Trial, check, tokenizer_folder

PACKAGES = ("guidellm",)
_REQUESTS = 8


def trials(target: Target) -> list[Trial]:
    return [
        ("run, /v1/completions", lambda: run(target, "/v1/completions")),
        ("run, /v1/chat/completions", lambda: run(target, "/v1/chat/completions")),
    ]


def run(target: Target, route: str) -> str:
    """A short load of two streams; every request has to succeed."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_folder(target, Path(folder))
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={target.address},model={target.model}"
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
            *("--backend", f"{backend},request_format={route}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={_REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--output", f"kind=json,path={report}"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        check(ran.returncode == 0, ran.stderr[-1000:])
        (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        return check(
            totals["successful"] >= _REQUESTS and not totals["errored"],
            f"{totals['successful']} succeeded, {totals['errored']} failed",
        )
