"""Real checkpoints served in every way: does a prompt have one answer?

    python3 -m tests.server.determinism_table [NAME ...]

prints, for each checkpoint and division, how many of the prompts have the tokens they have alone
on one rank: alone, in a batch, streamed alone and streamed in a batch. Half of them are sampled.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.config_ini import read_config
from launcher_scripts.parallel import Parallelism
from launcher_scripts.settings import ExportSettings
from tests.server import fixture_table
from tests.server.processes import running
from tests.server.requests import Client, Stream, ids_request

CHECKPOINTS = (
    "gpt_gpt2bpe_learned_nemo1.18.1",
    "gpt_sp_rope_swiglu_nemo1.18.1",
    "gpt_gpt2bpe_alibi_nemo1.23.0",
    "t5_sp_learned_shared_nemo1.18.1",
    "t5_sp_relative_geglu_untied_nemo1.18.1",
)
WAYS = ("alone", "batch of 8", "streamed", "streamed batch of 8")
ROWS = 8
OUTPUT_LEN = 24
READY_SECONDS = 240.0

Answers = dict[str, list[list[int]]]


def checkpoints() -> list[str]:
    """Those of CHECKPOINTS that are there."""
    there = fixture_table.fixture_names()
    return [name for name in CHECKPOINTS if name in there]


def answers(name: str, parallelism: Parallelism, folder: Path) -> Answers:
    """Way -> the generated tokens of every prompt."""
    folder.mkdir(exist_ok=True)
    settings = fixture_table.export(name, parallelism, folder)
    add_streaming_copy(settings)
    config = read_config(settings.checkpoint_dir).config
    t5 = settings.model_type == "t5"
    batch = request(config.vocab_size, t5=t5)
    singles = [{key: value[[row]] for key, value in batch.items()} for row in range(ROWS)]
    with running(folder / "job", settings.model_repository) as step:
        ready = step.wait_until_ready(READY_SECONDS)
        with Client(ready, "grpc") as client, Stream(ready) as stream:
            whole = client.infer("model", **batch)
            streamed = stream.ask("model_stream", **batch)[-1]
            found = {
                "alone": [tokens(client.infer("model", **single), 0) for single in singles],
                "batch of 8": [tokens(whole, row) for row in range(ROWS)],
                "streamed": [
                    tokens(stream.ask("model_stream", **single)[-1], 0) for single in singles
                ],
                "streamed batch of 8": [tokens(streamed, row) for row in range(ROWS)],
            }
        if step.stop() or step.survivors():
            raise RuntimeError(f"the server of {name} did not end well: {step.err}")
    return found


def add_streaming_copy(settings: ExportSettings) -> None:
    """The model once more, decoupled by hand."""
    model = Path(settings.triton_model_dir)
    copy = model.with_name("model_stream")
    shutil.copytree(model, copy)
    text = (copy / "config.pbtxt").read_text()
    text = text.replace('name: "model"', 'name: "model_stream"', 1)
    (copy / "config.pbtxt").write_text(text.replace("decoupled: false", "decoupled: True"))


def request(vocab_size: int, *, t5: bool) -> dict[str, np.ndarray]:
    """Eight prompts of different lengths; every other one is sampled."""
    source = random.Random(0)
    prompts = [
        [source.randrange(vocab_size) for _ in range(source.randrange(1, 24))] for _ in range(ROWS)
    ]
    tensors: dict[str, Any] = ids_request(prompts, OUTPUT_LEN)
    if t5:
        tensors["sequence_length"] = tensors.pop("input_lengths")
        tensors["max_output_len"] = tensors.pop("request_output_len")
    rows = np.arange(ROWS, dtype=np.uint32)[:, None]
    return {
        **tensors,
        "runtime_top_k": rows % 2 * 20,
        "random_seed": rows.astype(np.uint64),
        "temperature": np.where(rows % 2, 1.3, 1.0).astype(np.float32),
    }


def tokens(answer: dict[str, np.ndarray], row: int) -> list[int]:
    start = answer.get("response_input_lengths", np.zeros((ROWS, 1), int))[row, 0]
    return answer["output_ids"][row, 0, start : answer["sequence_length"][row, 0]].tolist()


def same(found: Answers, expected: list[list[int]]) -> dict[str, int]:
    """Way -> how many prompts have the expected tokens."""
    return {way: sum(a == b for a, b in zip(found[way], expected, strict=True)) for way in WAYS}


def main(names: Sequence[str]) -> int:
    print(f"| checkpoint | TP x PP | {' | '.join(WAYS)} |")
    print(f"|---|---|{'---|' * len(WAYS)}")
    differing = 0
    for name in names or checkpoints():
        expected: list[list[int]] = []
        for parallelism in fixture_table.DIVISIONS:
            with tempfile.TemporaryDirectory() as folder:
                found = answers(name, parallelism, Path(folder))
            expected = expected or found["alone"]
            counts = same(found, expected)
            differing += sum(ROWS - count for count in counts.values())
            cells = " | ".join(f"{count} of {ROWS}" for count in counts.values())
            print(f"| {name} | {parallelism.tp_size} x {parallelism.pp_size} | {cells} |")
            sys.stdout.flush()
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
