"""The task encode: which states are asked for, and how they are compared with transformers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.clients.contract_tensors import (
    States,
    output_names,
    request_tensors,
    row_outputs,
)
from launcher_scripts.common.errors import ConfigError, RequestError
from launcher_scripts.config.evaluation import GenerationSettings, TaskSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.comparison import TimedModel
from launcher_scripts.evaluation.speed import sweep
from launcher_scripts.evaluation.tasks import scored_tasks
from launcher_scripts.evaluation.tasks.task import EvaluatedModel
from tests.evaluation.test_speed import SETTINGS
from tests.evaluation.text_tasks import Words, asked, no_progress

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class Encoder:
    """Gives the states of another encoder, moved by `error` at one place."""

    def __init__(self, model: Any, error: float) -> None:
        self.model, self.error = model, error
        self.rows: list[GenerateRequest] = []

    def hidden_states(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[States]:
        self.in_flight = in_flight
        for row in rows:
            self.rows.append(row)
            with torch.inference_mode():
                states = self.model(torch.tensor([row.input_ids])).last_hidden_state[0].numpy()
            states[-1, 0] += self.error
            yield states


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny random T5 as a folder of Hugging Face's, and its encoder."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4
    )
    folder = tmp_path_factory.mktemp("t5")
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return folder, model.get_encoder()


def task(folder: Path, reference: Path, **changes: Any) -> TaskSettings:
    (folder / "texts").write_text("a house\nthe big dog\na dog\n")
    values: dict[str, Any] = {"batch_size": 3, "reference": str(reference)}
    return TaskSettings("encode", str(folder / "texts"), **values | changes)


def asked_with(model: Any, folder: Path) -> EvaluatedModel:
    return dataclasses.replace(asked([], folder, closing=(1,)), model=model, tokenizer=Words())


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_states_are_compared_token_by_token(
    original: tuple[Path, Any], tmp_path: Path, error: float
) -> None:
    folder, model = original
    encoder = Encoder(model, error)
    timed = TimedModel(encoder)
    settings = task(tmp_path, folder)
    result = scored_tasks.run_encode(settings, asked_with(timed, tmp_path), no_progress)
    assert encoder.in_flight == 3
    assert [row.input_ids for row in encoder.rows] == [(0, 1, 1), (2, 3, 4, 1), (0, 4, 1)]
    assert all(row.return_hidden_state and not row.output_len for row in encoder.rows)
    assert [item["tokens"] for item in result.items] == [3, 4, 3]
    assert (timed.pace.requests, timed.pace.tokens) == (3, 10)
    metrics = result.metrics
    assert metrics["largest_difference"].value == pytest.approx(error, abs=1e-6)
    assert (metrics["cosine_similarity"].value > 0.999999) is (error == 0.0)
    for item in result.items:
        assert item["largest_difference"] == pytest.approx(error, abs=1e-6)
        assert item["relative_difference"] == pytest.approx(error / 6, abs=error / 10 + 1e-6)


def test_texts_are_asked_and_compared_in_parts_that_can_go_on(
    original: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_tasks, "PART", 2)
    folder, model = original
    settings = task(tmp_path, folder)
    whole = scored_tasks.run_encode(
        settings, asked_with(Encoder(model, 0.5), tmp_path), no_progress
    )
    encoder = Encoder(model, 0.5)
    kept = [
        [{key: item[key] for key in whole.metrics} for item in whole.items[:2]],
    ]

    def continued(ask: Any) -> Iterator[Any]:
        yield from kept
        yield from ask(len(kept))

    done: list[tuple[int, int]] = []
    asked = dataclasses.replace(asked_with(encoder, tmp_path), continued=continued)
    result = scored_tasks.run_encode(settings, asked, lambda *counts: done.append(counts))
    assert result == whole
    assert [row.input_ids for row in encoder.rows] == [(0, 4, 1)] and done == [(3, 3)]


def test_agreement_is_of_the_worst_token() -> None:
    reference = np.array([[1, 0], [0, 2]], np.float32)
    agreement = scored_tasks.compare_states(np.array([[1, 1], [0, 4]], np.float32), reference)
    assert agreement == {
        "cosine_similarity": pytest.approx(2**-0.5),
        "largest_difference": 2.0,
        "relative_difference": pytest.approx(1.0),
    }


def test_what_cannot_be_compared_is_refused(original: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = original
    with pytest.raises(ConfigError, match=r"needs a reference; choices: .*tasks.encode.reference"):
        TaskSettings("encode", "texts")
    settings = task(tmp_path, folder, generation=GenerationSettings(ia3_task=1))
    with pytest.raises(ConfigError, match=r"transformers is not a reference for this; got \['ia3"):
        scored_tasks.run_encode(settings, asked_with(Encoder(model, 0.0), tmp_path), no_progress)
    (tmp_path / "empty").write_text("a\n\n")
    with pytest.raises(ConfigError, match="line 2 is empty"):
        scored_tasks.read_encoder_texts(
            dataclasses.replace(settings, data_file=str(tmp_path / "empty"))
        )


def test_states_of_another_size_are_refused(original: tuple[Path, Any], tmp_path: Path) -> None:
    class Other(Encoder):
        def hidden_states(
            self, rows: Iterable[GenerateRequest], in_flight: int = 8
        ) -> Iterator[States]:
            return (states[:, :8] for states in super().hidden_states(rows, in_flight))

    folder, model = original
    with pytest.raises(ConfigError, match=r"states of other sizes; got '\(3, 8\) and \(3, 16\)'"):
        scored_tasks.run_encode(
            task(tmp_path, folder), asked_with(Other(model, 0), tmp_path), no_progress
        )


def test_an_encoder_is_asked_for_states_alone() -> None:
    rows = [GenerateRequest((1, 2), 0, return_hidden_state=True), GenerateRequest((3,), 0)]
    sent = request_tensors(rows, "T5-Encoder")
    assert {name: array.tolist() for name, array in sent.items()} == {
        "input_ids": [[1, 2], [3, 0]],
        "sequence_length": [[2], [1]],
    }
    assert output_names(rows, "T5-Encoder") == ("output_hidden_state",)
    states = np.arange(12, dtype=np.float16).reshape(2, 2, 3)
    first, second = row_outputs(rows, {"output_hidden_state": states})
    assert first.hidden_state.tolist() == states[0].tolist()
    assert second.hidden_state.tolist() == states[1, :1].tolist()
    assert second.hidden_state.dtype == np.float32 and second.output_ids == ()
    with pytest.raises(RequestError, match="generates no tokens"):
        request_tensors([GenerateRequest((1,), 1)], "T5-Encoder")


def test_an_encoders_speed_is_that_of_its_input() -> None:
    now, requests = [0.0], []

    def encoded(rows: Any) -> list[GenerateOutput]:
        now[0] += 0.5
        requests.append(rows)
        return [GenerateOutput((), hidden_state=np.zeros((len(row.input_ids), 2))) for row in rows]

    lengths = ((3, 2), (5, 6), (3, 9))
    settings = dataclasses.replace(SETTINGS, lengths=lengths)
    rows = list(sweep(settings, 50, encoded, lambda: now[0], encodes=True))
    sizes = [(row.input_len, row.output_len, row.batch_size) for row in rows]
    assert sizes == [(3, 0, 1), (3, 0, 4), (5, 0, 1), (5, 0, 4)]
    assert [row.tokens_per_second for row in rows] == [6.0, 24.0, 10.0, 40.0]
    assert all(row.return_hidden_state for rows in requests for row in rows)
