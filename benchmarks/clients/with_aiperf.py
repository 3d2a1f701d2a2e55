"""The load generator AIPerf, with the tokenizer of the served model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.clients.target import Target, Trial, check, tokenizer_folder

PACKAGES = ("aiperf",)
_REQUESTS = 6
_SECONDS = 400
_ENDPOINTS = ("completions", "chat", "responses", "messages")


def trials(target: Target) -> list[Trial]:
    return [
        (
            f"profile, {kind}, {'streamed' if stream else 'whole'}",
            partial(run, target, kind, stream),
        )
        for kind in _ENDPOINTS
        for stream in (False, True)
    ]


def run(target: Target, endpoint: str, stream: bool) -> str:
    """A short load of two clients; every request has to succeed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            *(str(Path(sys.executable).with_name("aiperf")), "profile", "--ui", "none"),
            *("--model", target.model, "--url", target.address, "--endpoint-type", endpoint),
            *("--tokenizer", str(tokenizer_folder(target, folder))),
            *("--concurrency", "2", "--request-count", str(_REQUESTS)),
            *("--prompt-input-tokens-mean", "16", "--prompt-output-tokens-mean", "8"),
            *("--output-artifact-dir", str(folder / "results")),
            *(["--streaming"] if stream else []),
        ]
        # Offline, it looks for a tokenizer in the hub's cache alone.
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        ran = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        check(ran.returncode == 0, (ran.stdout + ran.stderr)[-1500:])
        (file,) = (folder / "results").rglob("profile_export_aiperf.json")
        report = json.loads(file.read_text(encoding="utf-8"))
        failed = report.get("error_summary") or []
        count = int(report["request_count"]["avg"])
        return check(count == _REQUESTS and not failed, f"{count} succeeded, {len(failed)} failed")
