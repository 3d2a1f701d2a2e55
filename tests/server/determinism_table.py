"""The same prompts asked in every way, at every division: how many rows get the same tokens.

    python3 -m tests.server.determinism_table [CHECKPOINT ...]

exports each checkpoint (the shared fixtures' trained T5 and a NeMo GPT by default), serves it, and
prints one line per division. A row counts when its tokens are those of tp 1, pp 1, asked alone.
Half of the rows are greedy, half sampled with a seed of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.contract_tensors import request_tensors, row_outputs
from launcher_scripts.clients.remote import RemoteServer, ServerModels, find_models
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from tests.server.processes import run_export, running

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
CHECKPOINTS = (
    FIXTURES / "hf" / "t5_multi30k",
    FIXTURES / "nemo" / "gpt_gpt2bpe_learned_nemo1.18.1" / "model.nemo",
)
DIVISIONS = (Parallelism(1, 1), Parallelism(2, 1), Parallelism(1, 2))
BATCH = 8
ROWS = 32
VOCAB_SIZE = 400  # of the smallest fixture

Answers = list[tuple[int, ...]]


def rows() -> list[GenerateRequest]:
    """The same prompts every time."""
    random = np.random.default_rng(5)
    made = []
    for number in range(ROWS):
        ids = tuple(map(int, random.integers(5, VOCAB_SIZE, random.integers(2, 12))))
        sampling = SamplingParameters(top_k=40 if number % 2 else 0, random_seed=number)
        made.append(GenerateRequest(ids, int(random.integers(8, 24)), sampling))
    return made


def alone(server: RemoteServer, plain: ServerModels, _: ServerModels) -> Answers:
    return [answer for row in rows() for answer in _answers([row], _ask(server, plain, [row]))]


def in_one_request(server: RemoteServer, plain: ServerModels, _: ServerModels) -> Answers:
    """Requests of eight rows."""
    return [answer for part in _parts() for answer in _answers(part, _ask(server, plain, part))]


def at_once(server: RemoteServer, plain: ServerModels, _: ServerModels) -> Answers:
    """Eight requests in flight."""
    found: Answers = []
    for part in _parts():
        waiting = [
            server.submit(plain.name, request_tensors([row], plain.model_type)) for row in part
        ]
        for row, answer in zip(part, waiting, strict=True):
            found += _answers([row], answer())
    return found


def streamed(server: RemoteServer, _: ServerModels, live: ServerModels) -> Answers:
    return [answer for row in rows() for answer in _answers([row], _ask(server, live, [row]))]


WAYS: dict[str, Callable[[RemoteServer, ServerModels, ServerModels], Answers]] = {
    "alone": alone,
    "rows of a request of 8": in_one_request,
    "8 requests at once": at_once,
    "streamed": streamed,
}


def _parts() -> list[list[GenerateRequest]]:
    whole = rows()
    return [whole[start : start + BATCH] for start in range(0, ROWS, BATCH)]


def _ask(server: RemoteServer, models: ServerModels, part: Sequence[GenerateRequest]) -> Tensors:
    tensors = request_tensors(part, models.model_type)
    return server.infer(models.name, tensors)


def _answers(part: Sequence[GenerateRequest], tensors: Tensors) -> Answers:
    return [output.output_ids for output in row_outputs(part, tensors)]


def export(checkpoint: Path, parallelism: Parallelism, folder: Path) -> Path:
    """The checkpoint as two models, `plain` and `live`, which streams; their repository."""
    for name in ("plain", "live"):
        settings = ExportSettings(
            model_name=name,
            model_type="t5" if "t5" in str(checkpoint) else "gpt3",
            checkpoint_path=str(checkpoint),
            triton_model_dir=str(folder / "model_repo" / name),
            parallelism=parallelism,
            processes=2,
            max_batch_size=BATCH,
            tokenizer=TokenizerSettings("none"),
            decoupled=name == "live",
            weight_data_type="fp32",
            data_type="fp32",
        )
        with contextlib.redirect_stdout(sys.stderr):
            run_export(settings, folder)
    return settings.model_repository


def ask_all(checkpoint: Path, parallelism: Parallelism, folder: Path) -> dict[str, Answers]:
    """way -> every row's tokens."""
    repository = export(checkpoint, parallelism, folder)
    with running(folder / "job", repository) as step:
        ready: dict[str, Any] = step.wait_until_ready()
        with RemoteServer(ready["grpc"], protocol="grpc") as server:
            plain, live = (find_models(server, name) for name in ("plain", "live"))
            found = {name: way(server, plain, live) for name, way in WAYS.items()}
        if step.stop():
            raise RuntimeError(f"the server did not end well: {step.err}")
    return found


def counts(checkpoint: Path) -> dict[Parallelism, dict[str, int]]:
    """division -> way -> how many rows have the tokens of tp 1, pp 1, asked alone."""
    expected: Answers = []
    table = {}
    for parallelism in DIVISIONS:
        with tempfile.TemporaryDirectory() as folder:
            found = ask_all(checkpoint, parallelism, Path(folder))
        expected = expected or found["alone"]
        table[parallelism] = {
            way: sum(map(tuple.__eq__, answers, expected)) for way, answers in found.items()
        }
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="determinism_table", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "checkpoints",
        nargs="*",
        type=Path,
        metavar="CHECKPOINT",
        default=CHECKPOINTS,
        help="what the export reads [the fixtures' trained T5 and a NeMo GPT]",
    )
    checkpoints = parser.parse_args(argv).checkpoints
    print("| checkpoint | TP, PP | " + " | ".join(WAYS) + " |")
    print("|---" * (len(WAYS) + 2) + "|")
    same = True
    for checkpoint in checkpoints:
        name = checkpoint.parent.name if checkpoint.suffix else checkpoint.name
        for parallelism, cells in counts(checkpoint).items():
            same = same and set(cells.values()) == {ROWS}
            shown = " | ".join(f"{count} of {ROWS}" for count in cells.values())
            print(
                f"| {name} | {parallelism.tp_size}, {parallelism.pp_size} | {shown} |", flush=True
            )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
