"""LAMBADA's measures by values worked out by hand, and item by item against transformers."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.evaluation.tasks import TASKS, scored_tasks
from launcher_scripts.evaluation.tasks.scored_tasks import Item
from launcher_scripts.evaluation.tasks.task import EvaluatedModel, fraction
from tests.evaluation.fake_server import FAVOUR, VOCAB, logits_after

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "launcher_scripts" / "evaluation" / "data" / "lambada_first200.jsonl"
REFERENCE = SHIPPED.with_name("smollm2_lambada_first200_reference.json")


class Letters:
    """A tokenizer of letters: a is 0, b is 1, ...; a blank and its letter are one token."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text if letter != " "]


class Counting:
    """The fake server's model, without a server."""

    def score(self, rows, in_flight=8):
        self.in_flight = in_flight
        return (logits_after(row) for row in rows)


def write_items(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_target_is_the_last_word_with_its_blank():
    assert scored_tasks.split_target('he said "no, Jim"') == ('he said "no,', ' Jim"')


def test_tokens_are_split_where_the_context_alone_ends():
    def characters(text):
        return [ord(character) for character in text]

    tokens, target_length = scored_tasks.encode_pair(characters, "ab ", " c")
    assert tokens == tuple(map(ord, "ab  c"))
    assert target_length == 3  # the context's own blanks belong to the target


def test_an_item_is_right_when_all_its_target_tokens_are_the_likeliest():
    # abc: the model expects b after a and c after b.
    log_p = FAVOUR - math.log(math.exp(FAVOUR) + VOCAB - 1)
    other = -math.log(math.exp(FAVOUR) + VOCAB - 1)
    cases = [
        ((0, 1, 2), 2, True, 2 * log_p, True),
        ((0, 5, 6), 2, False, other + log_p, True),
        ((0, 1, 5), 2, False, log_p + other, False),
        ((4, 0, 1), 1, True, log_p, True),
    ]
    for tokens, length, correct, log_likelihood, last in cases:
        item = Item(index=7, target=" x", tokens=tokens, target_length=length)
        result = scored_tasks.score_item(item, logits_after(tokens[:-1]))
        assert result == {
            "index": 7,
            "target": " x",
            "correct": correct,
            "log_likelihood": pytest.approx(log_likelihood),
            "last_token_correct": last,
        }


def test_large_logits_do_not_overflow():
    logits = np.array([[4e4, 4e4 - 1]], np.float32)
    result = scored_tasks.score_item(Item(0, " b", (0, 1), 1), logits)
    assert result["log_likelihood"] == pytest.approx(-1 - math.log1p(math.exp(-1)))


def test_summary_of_three_items():
    results = [
        {"correct": correct, "log_likelihood": log_likelihood, "last_token_correct": last}
        for correct, log_likelihood, last in [(1, -1.0, 1), (0, -2.0, 1), (0, -6.0, 1)]
    ]
    metrics = scored_tasks.summarise_lambada(results)
    # Deviations of (-1, -2, -6) from -3 are 2, 1 and -3: variance 7, standard error sqrt(7 / 3).
    half_width = 1.959964 * math.sqrt(7 / 3)
    assert metrics["perplexity"].value == pytest.approx(math.exp(3))
    assert metrics["perplexity"].low == pytest.approx(math.exp(3 - half_width), rel=1e-5)
    assert metrics["perplexity"].high == pytest.approx(math.exp(3 + half_width), rel=1e-5)
    # Wilson's interval: (p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n).
    accuracy = metrics["accuracy"]
    assert accuracy.value == pytest.approx(1 / 3)
    assert (accuracy.low, accuracy.high) == pytest.approx((0.061492, 0.792345), rel=1e-4)
    last = metrics["last_token_accuracy"]
    assert (last.value, last.low, last.high) == pytest.approx((1.0, 0.438503, 1.0), rel=1e-4)


def test_a_share_of_no_right_items_has_an_interval():
    none = fraction([False] * 40, "right answers")
    assert (none.value, none.low, none.high) == pytest.approx((0.0, 0.0, 0.0876), rel=1e-3)


def test_one_item_has_no_interval_of_its_perplexity():
    item = {"correct": True, "log_likelihood": -1.0, "last_token_correct": True}
    metrics = scored_tasks.summarise_lambada([item])
    assert metrics["perplexity"].low is None
    assert metrics["accuracy"].low == pytest.approx(0.206549, rel=1e-4)


def test_run_reads_scores_and_sums_up(tmp_path):
    file = write_items(tmp_path / "items.jsonl", ["a b", "c d e", "a f", "g h"])
    seen = []
    model = Counting()
    result = TASKS["lambada"](
        TaskSettings("lambada", str(file), limit=3, batch_size=2),
        EvaluatedModel(model, Letters(), tmp_path),
        lambda done, total: seen.append((done, total)),
    )
    assert [item["correct"] for item in result.items] == [True, True, False]
    assert [item["target"] for item in result.items] == [" b", " e", " f"]
    assert result.metrics["accuracy"].value == pytest.approx(2 / 3)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert model.in_flight == 2


def test_missing_positions_are_an_error_of_the_server():
    with pytest.raises(ServerError, match="logits at 1 positions of LAMBADA's item 0, which has 2"):
        list(scored_tasks.score_items([Item(0, " c", (0, 1, 2), 1)], [logits_after([0])]))


def test_a_text_beyond_the_models_positions_loses_its_beginning():
    items = [Item(0, " c", (0, 1, 2), 1), Item(1, " fg", (0, 3, 4, 5, 6), 2)]
    assert scored_tasks.fitting(items, None) == items
    cut = scored_tasks.fitting(items, 3)
    assert [item.tokens for item in cut] == [(0, 1, 2), (3, 4, 5, 6)]
    assert list(scored_tasks.rows_to_score(cut)) == [(0, 1), (3, 4, 5)]
    assert all(
        result["correct"]
        for result in scored_tasks.score_items(cut, map(logits_after, [(0, 1), (3, 4, 5)]))
    )
    with pytest.raises(ConfigError, match="item 1 has a last word of too many tokens; got ' fg'"):
        scored_tasks.fitting(items, 1)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ("[gpt]\nmax_pos_seq_len = 8\n", 8),
        ("[gpt]\nmax_pos_seq_len = 8\n[extension]\nposition_embedding = learned\n", 8),
        ("[gpt]\nmax_pos_seq_len = 8\n[extension]\nposition_embedding = rope\n", None),
        ("[gpt]\nmax_pos_seq_len = 8\nhas_positional_encoding = False\n", None),
        ("[gpt]\nvocab_size = 8\n", None),
        ("", None),
    ],
)
def test_positions_end_where_the_table_does(config, positions, tmp_path):
    (tmp_path / "config.ini").write_text(config)
    assert scored_tasks.max_positions_of(tmp_path) == positions


def test_lines_are_read_as_json_means_them(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_bytes(b'{"text": "a\xe2\x80\xa8b c"}\n')
    assert scored_tasks.read_passages(file) == ["a\u2028b c"]
    file.write_bytes(b'{"text": "caf\xe9 c"}\n')
    with pytest.raises(ConfigError, match=r"cannot read .*change evaluate.tasks.lambada.data_file"):
        scored_tasks.read_passages(file)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(value):
    logits = logits_after([0, 1])
    logits[1, 3] = value
    with pytest.raises(ServerError, match="logits of LAMBADA's item 0 are not numbers"):
        list(scored_tasks.score_items([Item(0, " c", (0, 1, 2), 1)], [logits]))
    logits[1, 3] = -np.inf  # of a token that never comes
    (result,) = scored_tasks.score_items([Item(0, " c", (0, 1, 2), 1)], [logits])
    assert result["correct"]


def test_bad_items_are_all_named(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text('{"text": "a b"}\nnonsense\n{"text": "word"}\n{"text": "a "}\n{"other": 1}\n')
    with pytest.raises(ConfigError) as error:
        scored_tasks.read_passages(file)
    message = str(error.value)
    assert "4 problems" in message
    for number in (2, 3, 4, 5):
        assert f"line {number} " in message
    assert scored_tasks.read_passages(file, limit=1) == ["a b"]


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"items.jsonl.*change evaluate.tasks.lambada.data_file"):
        scored_tasks.read_passages(tmp_path / "items.jsonl")
    (tmp_path / "items.jsonl").write_text("")
    with pytest.raises(ConfigError, match="the file is empty"):
        scored_tasks.read_passages(tmp_path / "items.jsonl")


def test_the_shipped_items_are_those_of_the_reference():
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))["tasks"]["lambada"]
    texts = scored_tasks.read_passages(SHIPPED)
    assert len(texts) == 200
    assert [scored_tasks.split_target(text)[1] for text in texts] == [
        item["target"] for item in reference["items"]
    ]
    metrics = scored_tasks.summarise_lambada(reference["items"])
    assert {name: dataclasses.asdict(metric) for name, metric in metrics.items()} == {
        name: pytest.approx(metric) for name, metric in reference["metrics"].items()
    }
    assert metrics["accuracy"].value == 0.34
    assert round(metrics["perplexity"].value, 2) == 44.14
    assert metrics["last_token_accuracy"].value == 0.51


def test_the_shipped_items_are_the_data_sets_first(shared_dir):
    whole = (shared_dir / "data" / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8")
    assert SHIPPED.read_text(encoding="utf-8").splitlines() == whole.splitlines()[:200]
