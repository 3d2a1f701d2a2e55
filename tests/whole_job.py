"""The main job on a tiny model: exported, served on two ranks and evaluated, by a chosen Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.checkpoint_maker import Variant, make_nemo, small_config

CHECKOUT = Path(__file__).resolve().parents[1]
TOKENIZER = CHECKOUT / "tests" / "data" / "tokenizers" / "gpt2bpe"
WORDS = ("cat", "dog")


def run_whole_job(
    folder: Path,
    python: Path,
    checkpoint: Path | None = None,
    options: Mapping[str, Any] | None = None,
    report: str = "*",
) -> dict[str, Any]:
    """Run main.py with all stages on this machine; `folder` exists and gets every file.

    python:     runs the steps of the jobs
    checkpoint: None: one that is made here
    options:    further keys of the command line
    report:     pattern of the folder of the report that is meant
    Returns the report. Raises CalledProcessError where the launcher fails.
    """
    own = folder / "tiny.nemo"
    checkpoint = checkpoint or (own if own.exists() else make_checkpoint(own))
    items = [json.dumps({"text": f"This {word} is a {word}"}) for word in WORDS]
    (folder / "items.jsonl").write_text("\n".join(items) + "\n")
    keys = {
        "stages": "[export,deploy,evaluate]",
        "cluster_type": "interactive",
        "cluster.python": python,
        "base_results_dir": folder / "results",
        "export.run.model_train_name": "tiny",
        "export.model.checkpoint_path": checkpoint,
        "export.model.tensor_model_parallel_size": 2,
        "export.model.weight_data_type": "fp32",
        "export.triton_deployment.data_type": "fp32",
        "deploy.server.device": "cpu",
        "deploy.server.host": "127.0.0.1",
        "deploy.server.http_port": 0,
        "deploy.server.grpc_port": 0,
        "deploy.server.metrics_port": 0,
        "evaluate.tasks.lambada.data_file": folder / "items.jsonl",
        "evaluate.tasks.lambada.limit": len(WORDS),
        "evaluate.benchmark": "null",
        **(options or {}),
    }
    command = [sys.executable, str(CHECKOUT / "main.py")]
    subprocess.run([*command, *(f"{key}={value}" for key, value in keys.items())], check=True)
    (path,) = (folder / "results").rglob(f"{report}/report.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def make_checkpoint(path: Path) -> Path:
    """A tiny GPT with a real tokenizer."""
    raw = {"tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"}}
    raw["tokenizer"] |= {"vocab_file": "nemo:vocab.json", "merge_file": "nemo:merges.txt"}
    files = {file.name: file.read_bytes() for file in TOKENIZER.iterdir()}
    config = small_config(vocab_size=491, max_positions=512)
    make_nemo(path, config, Variant(files=files, raw=raw))
    return path
