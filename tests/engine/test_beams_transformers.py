"""Beam search gives the hypotheses of transformers with early_stopping=True, best first."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria, T5ForConditionalGeneration

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS
from tests.engine.test_t5_transformers import items

SOURCES = [(5, 60, 11, 11, 2, 33, 47, 9, 28, 64, 3, 17), (7, 7, 20), (64,), (12, 40, 3, 3, 9, 31)]
MODELS = {
    **DECODERS,
    **ENCODER_DECODERS,
    **{
        name: replace(tiny, values={**tiny.values, "decoder_attention_heads": 4})
        for name, tiny in ENCODER_DECODERS.items()
        if "decoder_attention_heads"
        in tiny.values  # of which the engine runs those with as many heads on both sides
    },
}


class Pair:
    """A model of transformers and an engine that serves it; `end` ends their texts."""

    def __init__(self, model: PreTrainedModel, engine: Engine, end: int) -> None:
        self.model = model
        self.engine = engine
        self.end = end

    def theirs(
        self, ids: tuple[int, ...], width: int, count: int, **more: Any
    ) -> tuple[list[list[int]], list[float]]:
        """Texts without the end's padding, and their scores."""
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=count,
                do_sample=False,
                early_stopping=True,
                use_cache=False,
                eos_token_id=self.end,
                forced_bos_token_id=None,
                forced_eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
                **more,
            )
        start = 1 if self.model.config.is_encoder_decoder else len(ids)
        texts = [row[start:].tolist() for row in out.sequences]
        cut = [
            row[: row.index(self.end) + 1] if self.end in row else row  # padding follows
            for row in texts
        ]
        return cut, out.sequences_scores.tolist()

    def ours(self, ids: tuple[int, ...], width: int, count: int, **more: Any) -> GenerateOutput:
        return self.submit(ids, width, count, **more).result(60)

    def submit(
        self, ids: tuple[int, ...], width: int, count: int, **more: Any
    ) -> Future[GenerateOutput]:
        words = {name: more.pop(name) for name in ("bad_words", "stop_words") if name in more}
        sampling = SamplingParameters(beam_width=width, **more)
        request = GenerateRequest(
            ids, count, sampling, end_id=self.end, return_log_probs=True, **words
        )
        return self.engine.submit(request)


def load(name: str, folder: Path) -> Pair:
    model = MODELS[name].save(folder / "hf")
    engine = Engine.load(EngineSettings(export_folder(folder / "hf", folder), device="cpu"))
    free = Pair(model, engine, end=1000).ours(SOURCES[0], 4, 8)
    return Pair(model, engine, end=max(free.beams[1].output_ids[2:5]))  # one that comes


@pytest.fixture(
    scope="module", params=[pytest.param("t5_v1_0", marks=pytest.mark.slow), "t5_v1_1", "gpt2"]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Pair]:
    pair = load(request.param, tmp_path_factory.mktemp(request.param))
    yield pair
    pair.engine.close()


def check(output: GenerateOutput, theirs: Any, penalty: float) -> None:
    texts, scores = theirs
    assert [list(beam.output_ids) for beam in output.beams] == texts
    for beam, score in zip(output.beams, scores, strict=True):
        length = len(beam.output_ids)
        assert beam.cum_log_probs / length**penalty == pytest.approx(score, rel=1e-5, abs=1e-6)
        assert sum(beam.output_log_probs) == pytest.approx(beam.cum_log_probs, abs=1e-4)
    assert output.output_ids == output.beams[0].output_ids


@pytest.mark.parametrize(
    ("width", "penalty"),
    [
        *((2, 0.0), (3, 2.5), (5, -1.0), (16, 1.0), (64, 0.0)),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                *((2, -1.0), (3, 1.0), (5, 0.0), (5, 1.0)),
                *((5, 2.5), (16, -1.0), (64, 2.5)),
            )
        ),
    ],
)
def test_width_and_length_penalty(pair: Pair, width, penalty):
    for ids in SOURCES if width < 16 else SOURCES[:1]:  # transformers is slow
        for count in (1, 8):
            ours = pair.ours(ids, width, count, len_penalty=penalty)
            check(ours, pair.theirs(ids, width, count, length_penalty=penalty), penalty)


def test_searches_end_at_different_lengths(pair: Pair):
    """Or the comparison above would say little about what has ended."""
    lengths = {
        len(beam.output_ids)
        for ids in SOURCES
        for beam in pair.ours(ids, 16, 8, len_penalty=1.0).beams
    }
    assert len(lengths) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(tmp_path: Path, name):
    pair = load(name, tmp_path)
    for ids in SOURCES:
        ours = pair.ours(ids, 4, 7, len_penalty=1.0, no_repeat_ngram_size=3)
        check(ours, pair.theirs(ids, 4, 7, length_penalty=1.0, no_repeat_ngram_size=3), 1.0)
    pair.engine.close()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"min_length": 5}, {"min_new_tokens": 5}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"bad_words": ((9,), (3, 9), (20, 4))}, {"bad_words_ids": [[9], [3, 9], [20, 4]]}),
        (
            {"min_length": 3, "no_repeat_ngram_size": 1},
            {"min_new_tokens": 3, "no_repeat_ngram_size": 1},
        ),
    ],
    ids=["min_length", "ngrams", "bad_words", "both"],
)
def test_what_may_not_come(pair: Pair, ours, theirs):
    for ids in SOURCES:
        got = pair.ours(ids, 4, 8, len_penalty=1.0, **ours)
        check(got, pair.theirs(ids, 4, 8, length_penalty=1.0, **theirs), 1.0)


class Words(StoppingCriteria):
    """Ends texts that end in a word."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self.words = words

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        ends = [any(tuple(row[-len(w) :]) == w for w in self.words) for row in input_ids.tolist()]
        return torch.tensor(ends)


@pytest.mark.parametrize("position", [1, 2])
def test_stop_words_end_a_hypothesis(pair: Pair, position):
    changed = 0
    for ids in SOURCES:
        free = pair.ours(ids, 3, 8, len_penalty=1.0)
        text = free.beams[1].output_ids
        words = (text[position - 1 : position + 1], (66, 66, 66))
        got = pair.ours(ids, 3, 8, len_penalty=1.0, stop_words=words)
        texts, _ = pair.theirs(ids, 3, 8, length_penalty=1.0, stopping_criteria=[Words(words)])
        stripped = [list(beam.output_ids) for beam in got.beams]
        assert stripped == [row[: len(ours)] for row, ours in zip(texts, stripped, strict=True)]
        for row, text in zip(texts, stripped, strict=True):
            assert set(row[len(text) :]) <= {pair.end}  # which fills texts that ended early
        changed += got.beams != free.beams
    assert changed


def translate(
    shared_dir: Path, folder: Path, rows: int, width: int, tp: int = 1, pp: int = 1
) -> None:
    """All searches in flight at once against transformers' one after the other."""
    trained = shared_dir / "fixtures" / "hf" / "t5_multi30k"
    shards = export_folder(trained, folder, tp, tokenizer=TokenizerSettings("auto"))
    settings = EngineSettings(shards, parallelism=Parallelism(tp, pp), device="cpu")
    model = T5ForConditionalGeneration.from_pretrained(trained, dtype=torch.float32).eval()
    pair = Pair(model, Engine.load(settings), end=1)
    sources = [source for source, _ in islice(items(shared_dir, trained, shards), rows)]
    futures = [pair.submit(ids, width, 48, len_penalty=1.0) for ids in sources]
    assert len(futures) == rows
    for ids, future in zip(sources, futures, strict=True):
        check(future.result(600), pair.theirs(ids, width, 48, length_penalty=1.0), 1.0)
    pair.engine.close()


def test_first_searches_of_a_trained_model(shared_dir: Path, tmp_path: Path):
    translate(shared_dir, tmp_path, rows=4, width=4)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "tp", "pp"), [(4, 1, 1), (5, 2, 1), (2, 1, 2)])
def test_searches_of_a_trained_model(shared_dir: Path, tmp_path: Path, width, tp, pp):
    translate(shared_dir, tmp_path, rows=100, width=width, tp=tp, pp=pp)
