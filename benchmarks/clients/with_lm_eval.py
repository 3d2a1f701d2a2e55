"""lm_eval's `local-completions` and `local-chat-completions`, by tasks of one item each.

lm_eval_agreement.py compares tasks of many items with lm_eval's own `hf` model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.target import PROMPT, QUESTION, TOKENS, Target, Trial, check, same

PACKAGES = ("lm_eval",)
_SECONDS = 500
_CHOICES = [" Paris", " Rome"]


def trials(target: Target) -> list[Trial]:
    def generated() -> str:
        text = _sample(target, "local-completions", "completions", PROMPT, _until())["resps"][0][0]
        return same(text, target.completion)

    def chat() -> str:
        sample = _sample(
            target, "local-chat-completions", "chat/completions", QUESTION, _until(), chat=True
        )
        return same(sample["resps"][0][0], target.chat)

    def chosen() -> str:
        task = {"output_type": "multiple_choice", "doc_to_choice": _CHOICES, "doc_to_target": 0}
        sample = _sample(target, "local-completions", "completions", PROMPT, task)
        likelihoods = [float(response[0][0]) for response in sample["resps"]]
        return check(sample["acc"] == 1.0 and likelihoods[0] > likelihoods[1], likelihoods)

    return [
        ("local-completions, generate_until", generated),
        ("local-completions, multiple_choice", chosen),
        ("local-chat-completions, generate_until", chat),
    ]


def _until() -> dict[str, Any]:
    options = {"until": ["\n\n\n"], "max_gen_toks": TOKENS, "do_sample": False}
    return {"output_type": "generate_until", "doc_to_target": "", "generation_kwargs": options}


def _sample(
    target: Target, kind: str, route: str, text: str, task: dict[str, Any], *, chat: bool = False
) -> dict[str, Any]:
    """The only item of a task, as lm_eval records it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
        content = {
            "task": "tried",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            **task,
        }
        (folder / "tried.yaml").write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        arguments = f"model={target.model},base_url={target.openai}/{route},max_retries=1"
        if not chat:
            arguments += ",tokenizer_backend=remote"
        command = [
            *(sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", "tried"),
            *("--model_args", arguments, "--include_path", str(folder), "--log_samples"),
            *("--output_path", str(folder / "results")),
            *(["--apply_chat_template"] if chat else []),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        ran = subprocess.run(
            command,
            env={**environment, "HF_HOME": str(folder / "hub")},
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        check(ran.returncode == 0, ran.stderr[-1500:])
        (file,) = (folder / "results").rglob("samples_tried_*.jsonl")
        return dict(json.loads(file.read_text(encoding="utf-8").splitlines()[0]))
