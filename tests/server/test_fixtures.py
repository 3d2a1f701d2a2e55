"""NeMo's own checkpoints through export, repository and server give NeMo's own logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.common.parallelism import Parallelism
from tests.server.fixture_table import (
    DIVISIONS,
    FIXTURES,
    Cell,
    export,
    fixture_names,
)
from tests.server.processes import running
from tests.server.requests import Client, text_rows

TEXT = "The quick brown fox jumps over the lazy dog."

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]


@pytest.mark.parametrize("parallelism", DIVISIONS, ids=lambda p: f"tp{p.tp_size}_pp{p.pp_size}")
@pytest.mark.parametrize("name", fixture_names())
def test_served_logits_are_nemos(name: str, parallelism: Parallelism) -> None:
    cell = Cell(name, parallelism)
    assert cell.measure() <= cell.allowed


@pytest.mark.parametrize(
    "name",
    sorted(
        {"gpt_gpt2bpe_learned_nemo1.18.1", "gpt_sp_rope_swiglu_nemo1.18.1"} & {*fixture_names()}
    ),
)
def test_text_goes_through_the_checkpoints_own_tokenizer(tmp_path: Path, name: str) -> None:
    settings = export(name, Parallelism(), tmp_path, tokenizer="auto")
    with np.load(FIXTURES / name / "reference.npz") as reference:
        ids = reference["text_ids"].tolist()
    output_len = np.array([[3]], np.uint32)
    with running(tmp_path / "job", settings.model_repository) as step:
        with Client(step.wait_until_ready(), "http") as client:
            before = client.infer(
                "preprocessing", QUERY=text_rows(TEXT), REQUEST_OUTPUT_LEN=output_len
            )
            answer = client.infer(
                "ensemble",
                INPUT_0=text_rows(TEXT),
                INPUT_1=output_len,
                is_return_prompt=np.array([[True]]),
            )
        assert step.stop() == 0
    assert before["INPUT_ID"][0].tolist() == ids
    assert answer["OUTPUT_0"][0, 0, 0].decode().startswith(TEXT)
    assert len(ids) < answer["sequence_length"][0, 0] <= len(ids) + 3
