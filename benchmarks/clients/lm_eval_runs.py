"""lm-eval of this environment, on the tasks of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CHECKOUT = FOLDER.parents[1]


def gateway_model(address: str, model: str, concurrent: int = 4) -> tuple[str, dict[str, Any]]:
    """lm-eval's model type and its arguments for a model behind a gateway, which tokenizes."""
    arguments = {
        "model": model,
        "base_url": address.rstrip("/") + "/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": concurrent,
    }
    return "local-completions", arguments


def samples_of(
    task: str, kind: str, arguments: Mapping[str, Any], limit: int | None = None
) -> list[dict[str, Any]]:
    """Run a task; what lm-eval noted of each item, in the items' order.

    kind: lm-eval's type of model, whose `arguments` are its --model_args
    """
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", task),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--include_path", str(FOLDER), "--output_path", output, "--log_samples"),
            *(() if limit is None else ("--limit", str(limit))),
        ]
        # The data sets are local files, and nothing is to be asked of a hub.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        subprocess.run(command, cwd=CHECKOUT, env={**os.environ, **offline}, check=True)
        (file,) = Path(output).rglob(f"samples_{task}_*.jsonl")
        return read_samples(file)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of samples, in the items' order."""
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))
