"""Real NeMo checkpoints, exported and served: how far the logits are from NeMo's own.

    python3 -m tests.server.fixture_table [NAME ...]

prints one line per checkpoint with the largest absolute difference at each division.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launcher_scripts.parallel import Parallelism
from launcher_scripts.settings import ExportSettings, TokenizerSettings, write_settings
from launcher_scripts.steps import convert_checkpoint, write_model_repository
from tests.server.processes import running
from tests.server.requests import Client, ids_request

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "nemo"
DIVISIONS = (Parallelism(1, 1), Parallelism(2, 1), Parallelism(1, 2))
# Training folders, prompts and adapters are no plain models.
EXCLUDED = ("_ptl_", "_ptuning_", "_ia3_", "_adapter_")
FP32_TOLERANCE = 2e-4
BF16_TOLERANCE = 8e-2  # their reference ran in bf16


def fixture_names() -> list[str]:
    """The plain GPT checkpoints of the shared fixtures; [] where there are none."""
    if not FIXTURES.is_dir():
        return []
    return sorted(
        path.name
        for path in FIXTURES.iterdir()
        if path.name.startswith(("gpt_", "mcore_gpt_"))
        and not any(part in path.name for part in EXCLUDED)
    )


def tolerance(name: str) -> float:
    """By the precision NeMo computed the reference in, which the fixture's manifest tells."""
    manifest = json.loads((FIXTURES / name / "MANIFEST.json").read_text(encoding="utf-8"))
    overrides = manifest.get("config_overrides") or {}
    return BF16_TOLERANCE if overrides.get("precision") == "bf16" else FP32_TOLERANCE


def checkpoint_path(name: str) -> Path:
    """The archive, or the folder that is an unpacked one."""
    candidates = [FIXTURES / name / member for member in ("model.nemo", "model")]
    return next((path for path in candidates if path.exists()), FIXTURES / name)


def export(
    name: str, parallelism: Parallelism, folder: Path, tokenizer: str = "none"
) -> ExportSettings:
    """Both steps of the export stage, as its job runs them."""
    settings = ExportSettings(
        model_name="model",
        model_type="gpt3",
        checkpoint_path=str(checkpoint_path(name)),
        triton_model_dir=str(folder / "model_repo" / "model"),
        parallelism=parallelism,
        processes=2,
        max_batch_size=8,
        tokenizer=TokenizerSettings(tokenizer),
    )
    write_settings(settings, folder / "export.yaml")
    for step in (convert_checkpoint, write_model_repository):
        with contextlib.redirect_stdout(sys.stderr):
            failed = step.main(["--settings", str(folder / "export.yaml")])
        if failed:
            raise RuntimeError(f"{step.__name__} failed for {name}")
    return settings


def largest_difference(name: str, parallelism: Parallelism, folder: Path) -> float:
    """max |served - NeMo| over every prompt position and every real token of the vocabulary."""
    settings = export(name, parallelism, folder)
    reference = np.load(FIXTURES / name / "reference.npz")
    with running(folder / "job", settings.model_repository) as step:
        ready = step.wait_until_ready()
        with Client(ready, "http") as client:
            answer = client.infer(
                "model",
                **ids_request(reference["tokens"].tolist(), 1, is_return_context_logits=True),
            )
        if step.stop() or step.survivors():
            raise RuntimeError(f"the server of {name} did not end well: {step.err}")
    served = answer["context_logits"]  # [B, T, vocab]
    expected = reference["logits"][..., : served.shape[-1]]
    if served.shape != expected.shape:
        raise RuntimeError(f"served {served.shape}, NeMo {expected.shape}")
    return float(np.abs(served - expected).max())


def main(names: Sequence[str]) -> int:
    heads = [f"TP {p.tp_size}, PP {p.pp_size}" for p in DIVISIONS]
    print("| checkpoint | " + " | ".join(heads) + " | allowed |")
    print("|---" * (len(heads) + 2) + "|")
    failed = 0
    for name in names or fixture_names():
        cells = []
        for parallelism in DIVISIONS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    difference = largest_difference(name, parallelism, Path(folder))
                    cells.append(f"{difference:.1e}")
                    failed += difference > tolerance(name)
                except Exception as error:
                    cells.append(f"{type(error).__name__}: {error}".splitlines()[0])
                    failed += 1
        print(f"| {name} | " + " | ".join(cells) + f" | {tolerance(name):.0e} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
