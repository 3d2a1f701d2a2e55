"""The metrics of a real server as Prometheus' own client library reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from launcher_scripts.contract import metric_names as names
from launcher_scripts.jobs.status import query_load
from tests.engine.small_models import random_tensors, write_checkpoint
from tests.http_requests import metric_families
from tests.processes import wait_for
from tests.server.processes import running
from tests.server.repositories import END_ID, NO_TEXT, export, text_config
from tests.server.requests import Client, ids_request

pytestmark = pytest.mark.usefixtures("tritonserver")

PROMPTS = [(5, 6, 7), (400,), (12, 13, 14, 15, 16)]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A model whose draft model is its twin."""
    folder, config = tmp_path_factory.mktemp("metrics"), text_config()
    draft = write_checkpoint(folder / "draft", config, random_tensors(config), 1)
    settings = export(
        folder,
        config,
        tokenizer=NO_TEXT,
        enable_prefix_caching=True,
        draft_model_dir=str(draft),
    )
    with running(folder / "job", settings.model_repository) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err


def samples(served: dict[str, Any]) -> Samples:
    """The samples of the project's metrics by name and labels, the model's left out."""
    found = {}
    for family in metric_families(f"{served['metrics']}/metrics").values():
        for sample in family.samples:
            if sample.name.startswith("launcher_"):
                labels = dict(sample.labels)
                assert labels.pop("model_name", labels.pop("model", None)) == "tiny"
                given_up = sample.name.removesuffix("_total") == names.PREEMPTED.name
                name = names.PREEMPTED.name if given_up else sample.name  # the parser adds _total
                key = (name, frozenset(labels.items()))
                assert key not in found
                found[key] = sample.value
    return found


def value(found: Samples, metric: names.MetricSpec, part: str = "", **labels: str) -> float:
    return found[metric.name + part, frozenset(labels.items())]


@pytest.fixture(scope="module", autouse=True)
def at_start(served: dict[str, Any]) -> Samples:
    """What was there before the first request, whichever test comes first."""
    wait_for(lambda: value(samples(served), names.CACHE_TOKENS) > 0)
    return samples(served)


def test_every_metric_is_there_before_the_first_request(at_start: Samples) -> None:
    found = at_start
    assert {name for name, _ in found} == {
        name for metric in names.MODEL_METRICS for name in metric.samples
    }
    for metric in names.MODEL_METRICS:
        kinds = {frozenset(dict(labels)) for name, labels in found if name == metric.samples[0]}
        bucket = {"le"} if metric.kind == names.HISTOGRAM else set()
        assert kinds == {frozenset({*metric.labels[1:], *bucket})}
        bounds = {
            float(dict(labels)["le"]) for name, labels in found if name == f"{metric.name}_bucket"
        }
        assert bounds == ({*metric.buckets, math.inf} if bucket else set())
    kept = (names.CACHE_TOKENS.name, names.WEIGHTS_INFO.name)
    assert {name for (name, _), count in found.items() if count} == set(kept)


def test_what_is_counted_is_what_was_asked_and_answered(served: dict[str, Any]) -> None:
    before = samples(served)
    with Client(served, "http") as client:
        answers = [client.infer("tiny", **ids_request([prompt], 9)) for prompt in PROMPTS]
        with pytest.raises(InferenceServerException, match="outside of the vocabulary"):
            client.infer("tiny", **ids_request([(9999,)], 9))
        with pytest.raises(InferenceServerException, match="temperature"):
            client.infer("tiny", **{**ids_request([(1,)], 9), "temperature": np.float32([[-1.0]])})
    wait_for(lambda: value(samples(served), names.REQUEST, "_count") >= len(PROMPTS))
    refused = {"reason": names.REJECTED}  # counted after the answers
    wait_for(lambda: value(samples(served), names.FAILURE, **refused) >= 2)
    found = samples(served)
    grown = {key: found[key] - before[key] for key in found}
    texts = [
        answer["output_ids"][0, 0, len(prompt) : answer["sequence_length"][0, 0]].tolist()
        for answer, prompt in zip(answers, PROMPTS, strict=True)
    ]
    tokens, stopped = sum(map(len, texts)), sum(text[-1] == END_ID for text in texts)
    assert value(grown, names.PROMPT_TOKENS) == sum(map(len, PROMPTS))
    assert value(grown, names.GENERATION_TOKENS) == tokens
    assert value(grown, names.SUCCESS, finished_reason=names.STOP) == stopped
    assert value(grown, names.SUCCESS, finished_reason=names.LENGTH) == len(PROMPTS) - stopped
    assert value(grown, names.FAILURE, **refused) == 2
    for metric in (names.FIRST_TOKEN, names.QUEUE, names.PREFILL, names.REQUEST):
        assert value(grown, metric, "_count") == len(PROMPTS)
    assert value(grown, names.INTER_TOKEN, "_count") == tokens - len(PROMPTS)


def test_prompt_tokens_are_copied_for_the_same_salt_only(served: dict[str, Any]) -> None:
    prompt, salt = tuple(range(5, 45)), np.array([[7]], np.uint64)
    asked = ids_request([prompt], 3)
    before = samples(served)
    with Client(served, "grpc") as client:
        texts = [client.infer("tiny", **asked, **more) for more in ({}, {}, {"cache_salt": salt})]
    assert len({text["output_ids"].tobytes() for text in texts}) == 1
    searched = value(before, names.PREFIX_QUERIES) + 3 * len(prompt)
    wait_for(lambda: value(samples(served), names.PREFIX_QUERIES) == searched)
    found = samples(served)
    assert value(found, names.PREFIX_HITS) - value(before, names.PREFIX_HITS) == 32


def test_drafts_change_no_token_and_are_counted(served: dict[str, Any]) -> None:
    asked = ids_request([(7, 8, 9) * 5], 24)
    before = samples(served)
    drafts = {"num_speculative_tokens": np.array([[4]], np.uint32)}
    with Client(served, "grpc") as client:
        texts = [client.infer("tiny", **asked, **more) for more in ({}, drafts)]
        with pytest.raises(InferenceServerException, match="not for beam searches"):
            client.infer("tiny", **asked, **drafts, beam_width=np.array([[2]], np.uint32))
    assert len({text["output_ids"].tobytes() for text in texts}) == 1
    tried, came = names.DRAFT_TOKENS, names.ACCEPTED_TOKENS
    wait_for(lambda: value(samples(served), tried) > value(before, tried))
    found = samples(served)
    assert 0 <= value(found, came) - value(before, came) <= value(found, tried)


def test_a_draft_model_proposes_tokens_to_a_server(served: dict[str, Any]) -> None:
    asked = ids_request([(31, 5, 77)], 24)
    before = samples(served)
    drafts = {"num_speculative_tokens": np.array([[4]], np.uint32)}
    with Client(served, "grpc") as client:
        texts = [client.infer("tiny", **asked, **more) for more in ({}, drafts)]
    assert len({text["output_ids"].tobytes() for text in texts}) == 1
    count = int(texts[0]["sequence_length"].item()) - 3
    assert count > 8  # the first of them come from no draft
    came = names.ACCEPTED_TOKENS
    wait_for(lambda: value(samples(served), came) - value(before, came) >= count // 2)


def test_buckets_are_cumulative_and_the_last_has_all(served: dict[str, Any]) -> None:
    found = samples(served)
    for metric in names.HISTOGRAMS:
        bounds = [*map(str, metric.buckets), "+Inf"]
        counts = [value(found, metric, "_bucket", le=bound) for bound in bounds]
        assert counts == sorted(counts)
        assert counts[-1] == value(found, metric, "_count")


def test_status_reads_the_same_numbers(served: dict[str, Any]) -> None:
    with Client(served, "http") as client:
        client.infer("tiny", **ids_request([PROMPTS[0]], 3))

    def requests() -> int | None:
        return query_load(served["metrics"]).requests

    def answered() -> float:
        return value(samples(served), names.REQUEST, "_count")

    wait_for(lambda: requests() == answered() > 0)
