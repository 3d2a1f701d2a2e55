"""A trained translator through export, repository and server: English text in, German out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.settings import ExportSettings
from tests.server.processes import run_export, running
from tests.server.requests import Client, text_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]
ITEMS = 32


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_translations_are_transformers_own(
    shared_dir: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    trained = shared_dir / "fixtures" / "hf" / "t5_multi30k"
    settings = ExportSettings(
        model_name="translator",
        model_type="t5",
        checkpoint_path=str(trained),
        triton_model_dir=str(tmp_path / "model_repo" / "translator"),
        parallelism=Parallelism(tp, pp),
        processes=2,
        max_batch_size=ITEMS,
        weight_data_type="fp32",
        data_type="fp32",
    )
    run_export(settings, tmp_path)
    answers = json.loads((trained / "reference_greedy.json").read_text())
    expected = answers["test_2016_flickr_greedy_token_ids_first_100"][:ITEMS]
    lines = shared_dir / "data" / "multi30k_en-de" / "test_2016_flickr.en.gz"
    with gzip.open(lines, "rt", encoding="utf-8") as file:
        english = [next(file).strip() for _ in range(ITEMS)]
    tokenizer = load_tokenizer(settings.checkpoint_dir)
    with running(tmp_path / "job", settings.model_repository) as step:
        with Client(step.wait_until_ready(), "grpc") as client:
            answer = client.infer(
                "ensemble",
                INPUT_0=text_rows(*english),
                INPUT_1=np.full((ITEMS, 1), 64, np.uint32),
            )
        assert step.stop() == 0, step.err
    german = [text.decode() for text in answer["OUTPUT_0"][:, 0, 0]]
    assert german == [tokenizer.decode(ids) for ids in expected]
    assert answer["sequence_length"][:, 0].tolist() == [len(ids) for ids in expected]
