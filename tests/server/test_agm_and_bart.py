"""An Agm and a BART in one server: total lengths, prompts in the answer, n-grams, and text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tritonclient.utils import InferenceServerException

from launcher_scripts.clients.model_client import Client as EvaluationClient
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.evaluation import BenchmarkSettings, GenerationSettings, TaskSettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.steps import measure_accuracy, measure_speed
from tests.engine.small_agm import agm_config, agm_tensors, plain_greedy, plain_logits
from tests.engine.small_bart import bart_config
from tests.engine.small_bart import plain_greedy as bart_greedy
from tests.engine.small_bart import plain_logits as bart_logits
from tests.engine.small_models import random_tensors
from tests.server import repositories
from tests.server.processes import running
from tests.server.repositories import TOKENIZERS, VOCAB_SIZE
from tests.server.requests import Client, t5_request, text_rows

pytestmark = pytest.mark.usefixtures("tritonserver")
PROMPTS = [(5, 6, 7, 8), (400,)]
CONFIG = agm_config(vocab_size=VOCAB_SIZE, end_id=3)
BART = bart_config(vocab_size=VOCAB_SIZE)


def export(folder: Path, name: str, config: Any, tensors: dict[str, np.ndarray], tp: int) -> Path:
    """A model of its family's name."""
    settings = repositories.export(folder, config, tensors, name=name, tp=tp, model_type=name)
    return settings.model_repository


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("forks")
    repository = export(folder, "agm", CONFIG, agm_tensors(CONFIG), tp=2)
    export(folder, "bart", BART, random_tensors(BART), tp=1)
    with running(folder / "job", repository) as step:
        yield {**step.wait_until_ready(), "ready_file": str(step.settings.ready_file)}
        assert step.stop() == 0, step.err


def request(full: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {**t5_request(PROMPTS, max_output_len=full), **more}


def test_logits_and_tokens(client: Client) -> None:
    tensors = agm_tensors(CONFIG)
    answer = client.infer("agm", **request(9, is_return_context_logits=np.ones((2, 1), np.bool_)))
    assert answer["output_ids"].shape == (2, 1, 9)
    for row, prompt in enumerate(PROMPTS):
        expected = plain_logits(CONFIG, tensors, prompt).numpy()
        got = answer["context_logits"][row, : len(prompt)]
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4)
        end = int(answer["sequence_length"][row, 0])
        tokens = answer["output_ids"][row, 0, :end].tolist()
        wanted = plain_greedy(CONFIG, tensors, prompt, end - len(prompt))
        assert tokens == [*prompt, *wanted]
        assert end == 9 or tokens[-1] == CONFIG.end_id


def test_no_ngram_comes_twice(client: Client) -> None:
    size = np.full((2, 1), 1, np.uint32)
    answer = client.infer("agm", **request(30, no_repeat_ngram_size=size))
    for row in range(2):
        tokens = answer["output_ids"][row, 0, : int(answer["sequence_length"][row, 0])].tolist()
        assert len(tokens) == len(set(tokens))


def test_the_whole_length_must_hold_the_prompt(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="counts the prompt's tokens, too; got 3"):
        client.infer("agm", **request(3))


def test_text(client: Client, served: dict[str, Any]) -> None:
    text_models = {"preprocessing", "postprocessing", "ensemble", "text"}
    of_bart = {f"bart_{role}" for role in text_models}
    assert set(served["models"]) == {"agm", "bart", *text_models, *of_bart}
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    text = "The quick brown"
    prompt = tuple(tokenizer.encode(text))
    whole = len(prompt) + 5
    answer = client.infer(
        "ensemble", INPUT_0=text_rows(text), INPUT_1=np.array([[whole]], np.uint32)
    )
    wanted = plain_greedy(CONFIG, agm_tensors(CONFIG), prompt, 5)
    assert answer["sequence_length"][0, 0] == whole
    generated = tokenizer.decode([*prompt, *wanted]).removeprefix(tokenizer.decode(prompt))
    assert answer["OUTPUT_0"][0, 0, 0].decode() == generated
    told = client.infer("text", text_input=text_rows(text), max_tokens=np.array([[5]], np.int32))
    assert told["text_output"][0].decode() == generated


def test_bart(client: Client) -> None:
    answer = client.infer("bart", **request(6))
    for row, source in enumerate(PROMPTS):
        assert answer["output_ids"][row, 0].tolist() == bart_greedy(BART, source, 6)


def test_log_probabilities_of_a_barts_tokens(client: Client) -> None:
    """The decoder's first token is one of the prompt's and has none."""
    counts = {
        name: np.full((2, 1), 2, np.int32) for name in ("num_log_probs", "num_prompt_log_probs")
    }
    answer = client.infer("bart", **request(6, **counts))
    for row, source in enumerate(PROMPTS):
        text = [BART.start_id, *answer["output_ids"][row, 0].tolist()]
        wanted = bart_logits(BART, source, text[:-1]).log_softmax(-1)
        own = wanted[range(6), text[1:]]
        np.testing.assert_allclose(answer["token_log_probs"][row, 0], own, atol=2e-4)
        assert answer["top_log_prob_ids"][row, 0].tolist() == wanted.topk(2).indices.tolist()
        assert answer["prompt_log_probs"][row].tolist() == [0.0]


@pytest.mark.parametrize("name", ["agm", "bart"])
def test_a_family_is_evaluated(
    name: str, served: dict[str, Any], checkout: Path, tmp_path: Path
) -> None:
    """The tasks of its file in conf/, with small data; the texts are those of a plain forward."""
    file = checkout / "conf" / "evaluate" / name / f"evaluate_{name}.yaml"
    chosen = yaml.safe_load(file.read_text())["tasks"]
    template = chosen["summarization"]["generation"]["template"]
    (tmp_path / "articles.csv").write_text("id,article,highlights\n1,The quick brown fox,A fox\n")
    (tmp_path / "lambada.jsonl").write_text('{"text": "The quick brown fox"}\n')
    generation = GenerationSettings(template, output_len=4)
    tasks = {
        "lambada": TaskSettings("lambada", str(tmp_path / "lambada.jsonl")),
        "summarization": TaskSettings(
            "summarization", str(tmp_path / "articles.csv"), generation=generation
        ),
    }
    settings = EvaluateSettings(
        ready_file=served["ready_file"],
        results_dir=str(tmp_path / "results"),
        model_name=name,
        tokenizer_dir=str(TOKENIZERS / "gpt2bpe"),
        tasks=tuple(task for key, task in tasks.items() if key in chosen),
        benchmark=BenchmarkSettings(lengths=((6, 3),), requests=2, warmup=0),
    )
    write_settings(settings, tmp_path / "settings.yaml")
    for step in (measure_accuracy, measure_speed):
        assert step.main(["--settings", str(tmp_path / "settings.yaml")]) == 0
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    assert set(report["tasks"]) == {"summarization", *(["lambada"] if name == "agm" else [])}
    (item,) = report["tasks"]["summarization"]["items"]
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    prompt = tuple(tokenizer.encode(template.replace("{article}", "The quick brown fox")))
    if name == "agm":
        ids = plain_greedy(CONFIG, agm_tensors(CONFIG), prompt, 4)
        (scored,) = report["tasks"]["lambada"]["items"]
        text = tokenizer.encode("The quick brown fox")
        start = len(tokenizer.encode("The quick brown"))
        logits = plain_logits(CONFIG, agm_tensors(CONFIG), text[:-1])[start - 1 :]
        wanted = logits.log_softmax(-1)[range(len(text) - start), text[start:]].sum()
        assert scored["log_likelihood"] == pytest.approx(float(wanted), abs=1e-3)
    else:
        with EvaluationClient(served["grpc"], name, protocol="grpc") as client:
            source = client.special_ids.surround(prompt)
        ids = bart_greedy(BART, source, 4)
    assert item["prediction"] == tokenizer.decode(ids).strip()
    (row,) = report["speed"]["rows"]
    assert (row["input_len"], row["output_len"]) == (6, 3)
