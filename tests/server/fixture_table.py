"""Real NeMo checkpoints, exported and served: how far the logits are from NeMo's own.

    python3 -m tests.server.fixture_table [--device cuda] [--data-type bf16] [--servers N] [NAME]

prints one line per checkpoint with the largest absolute difference at each division; in bf16 and
fp16 the difference is relative, of the whole tensors' norms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from tests.server.processes import run_export, running
from tests.server.requests import Client, ids_request

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "nemo"
DIVISIONS = (Parallelism(1, 1), Parallelism(2, 1), Parallelism(1, 2))
FAMILIES = ("gpt_", "mcore_gpt_", "t5_", "peft_")
START_SECONDS = 120.0  # many may start at the same time
TRAININGS = "_ptl_"
# What a checkpoint of adapters is for an export, by a part of its name.
PARTS = {
    "_ptuning_": "prompt_checkpoints",
    "_ia3_": "ia3_checkpoints",
    "_adapter_": "adapter_checkpoints",
    "peft_": "adapter_checkpoints",
}
FP32_TOLERANCE = 2e-4
BF16_TOLERANCE = 8e-2  # their reference ran in bf16
RELATIVE_TOLERANCE = 1e-2  # served in bf16 or fp16


def fixture_names() -> list[str]:
    """The shared fixtures but the training folders; [] where there are none."""
    if not FIXTURES.is_dir():
        return []
    return sorted(
        path.name
        for path in FIXTURES.iterdir()
        if path.name.startswith(FAMILIES) and TRAININGS not in path.name
    )


def manifest(name: str) -> dict[str, Any]:
    """What the fixture says of itself."""
    content: dict[str, Any] = json.loads(
        (FIXTURES / name / "MANIFEST.json").read_text(encoding="utf-8")
    )
    return content


def tolerance(name: str) -> float:
    """By the precision NeMo computed the reference in, which the fixture's manifest tells."""
    overrides = manifest(name).get("config_overrides") or {}
    return BF16_TOLERANCE if overrides.get("precision") == "bf16" else FP32_TOLERANCE


def checkpoint_path(name: str) -> Path:
    """The archive, or the folder that is an unpacked one."""
    candidates = [FIXTURES / name / member for member in ("model.nemo", "model")]
    return next((path for path in candidates if path.exists()), FIXTURES / name)


def export(
    name: str,
    parallelism: Parallelism,
    folder: Path,
    tokenizer: str = "none",
    data_type: str = "fp32",
) -> ExportSettings:
    """Both steps of the export stage, as its job runs them; adapters with their base."""
    kind = next((key for part, key in PARTS.items() if part in name), None)
    base = manifest(name)["base_model_fixture"] if kind else name
    settings = ExportSettings(
        model_name="model",
        model_type="t5" if "t5_" in base else "gpt3",
        checkpoint_path=str(checkpoint_path(base)),
        triton_model_dir=str(folder / "model_repo" / "model"),
        parallelism=parallelism,
        processes=2,
        max_batch_size=8,
        tokenizer=TokenizerSettings(tokenizer),
        data_type=data_type,
        **({kind: (str(checkpoint_path(name)),)} if kind else {}),
    )
    with contextlib.redirect_stdout(sys.stderr):
        run_export(settings, folder)
    return settings


def request_tensors(
    name: str, reference: Mapping[str, np.ndarray], config: Any
) -> dict[str, np.ndarray]:
    """What NeMo was given, as one request; virtual tokens by this project's ids."""
    more: dict[str, Any] = {"is_return_context_logits": True}
    ids = reference["tokens" if "tokens" in reference else "encoder_tokens"]
    if "_ptuning_" in name:
        ids = reference["full_tokens"].copy()
        count = len(reference["virtual_embeddings"])
        ids[:, :count] = config.parts.prompt_start_id + np.arange(count)
        more["prompt_learning_task_name_ids"] = 0
    if "_ia3_" in name:
        more["ia3_tasks"] = 0
    tensors = ids_request(ids.tolist(), 1, **more)
    if "decoder_tokens" in reference:
        tensors["sequence_length"] = tensors.pop("input_lengths")
        tensors["max_output_len"] = tensors.pop("request_output_len")
        tensors["decoder_input_ids"] = reference["decoder_tokens"].astype(np.uint32)
    return tensors


def served_and_expected(
    name: str,
    parallelism: Parallelism,
    folder: Path,
    *,
    data_type: str,
    device: str,
) -> tuple[np.ndarray, np.ndarray]:
    """The logits of a served fixture and NeMo's own, [B, T, vocab] both."""
    settings = export(name, parallelism, folder, data_type=data_type)
    with np.load(FIXTURES / name / "reference.npz") as arrays:
        reference = dict(arrays)
    tensors = request_tensors(name, reference, read_config(settings.checkpoint_dir).config)
    with running(folder / "job", settings.model_repository, device=device) as step:
        ready = step.wait_until_ready(START_SECONDS)
        with Client(ready, "grpc") as client:
            answer = client.infer("model", **tensors)
        if step.stop() or step.survivors():
            raise RuntimeError(f"the server of {name} did not end well: {step.err}")
    served = answer["context_logits"]
    expected = reference["logits"][..., : served.shape[-1]]
    if served.shape != expected.shape:
        raise RuntimeError(f"served {served.shape}, NeMo {expected.shape}")
    return served, expected


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    name: str
    parallelism: Parallelism
    data_type: str = "fp32"
    device: str = "cpu"

    @property
    def allowed(self) -> float:
        return tolerance(self.name) if self.data_type == "fp32" else RELATIVE_TOLERANCE

    def measure(self) -> float:
        """The largest or, below fp32, the relative difference."""
        with tempfile.TemporaryDirectory() as folder:
            served, expected = served_and_expected(
                self.name,
                self.parallelism,
                Path(folder),
                data_type=self.data_type,
                device=self.device,
            )
        if self.data_type == "fp32":
            return float(np.abs(served - expected).max())
        return float(np.linalg.norm(served - expected) / np.linalg.norm(expected))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="fixture_table", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures [all]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data-type", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--servers", type=int, default=1, help="servers at the same time [1]")
    flags = parser.parse_args(argv)
    heads = [f"TP {p.tp_size}, PP {p.pp_size}" for p in DIVISIONS]
    print("| checkpoint | " + " | ".join(heads) + " | allowed |")
    print("|---" * (len(heads) + 2) + "|")
    failed = 0
    with ProcessPoolExecutor(flags.servers) as pool:
        rows = {
            name: [
                pool.submit(Cell(name, division, flags.data_type, flags.device).measure)
                for division in DIVISIONS
            ]
            for name in flags.names or fixture_names()
        }
        for name, row in rows.items():
            allowed = Cell(name, DIVISIONS[0], flags.data_type, flags.device).allowed
            texts = []
            for future in row:
                try:
                    failed += not future.result() <= allowed
                    texts.append(f"{future.result():.1e}")
                except Exception as error:
                    texts.append(f"{type(error).__name__}: {error}".splitlines()[0])
                    failed += 1
            print(f"| {name} | " + " | ".join(texts) + f" | {allowed:.0e} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
