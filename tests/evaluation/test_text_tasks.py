"""The tasks of generated text: files read, prompts asked, and scores worked out by hand."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.config.evaluation import GenerationSettings, TaskSettings
from launcher_scripts.contract.requests import GenerateOutput
from launcher_scripts.evaluation.tasks import TASKS, prompts, text_tasks
from launcher_scripts.evaluation.tasks import text_tasks as boolq_generate
from launcher_scripts.evaluation.tasks import text_tasks as squad
from tests.evaluation.text_tasks import asked, no_progress

ARTICLE = "The river rose. Two bridges were closed."
PARTS = """\
[gpt]
num_tasks = 2
prompt_learning_start_id = 900
[task_0]
task_name = a
prompt_length = 3
[task_1]
task_name = b
prompt_length = 2
"""


def settings(name: str, data_file: Path, **more: object) -> TaskSettings:
    return TaskSettings(name, str(data_file), **more)


def test_translation_scores_all_lines_together(data_dir: Path, tmp_path: Path) -> None:
    from sacrebleu import corpus_bleu

    files = data_dir / "tasks"
    sources = (files / "newstest2017.en").read_text(encoding="utf-8").splitlines()
    targets = (files / "newstest2017.de").read_text(encoding="utf-8").splitlines()
    packed = tmp_path / "source.gz"
    packed.write_bytes(gzip.compress((files / "newstest2017.en").read_bytes()))
    predictions = [*targets[:4], *(line.rpartition(" ")[0] for line in targets[4:6])]
    model = asked(predictions, tmp_path, closing=(7,))
    task = settings(
        "translation",
        packed,
        limit=6,
        batch_size=3,
        generation=GenerationSettings("to German: {source}", str(files / "newstest2017.de")),
    )
    result = TASKS["translation"](task, model, no_progress)
    wanted = corpus_bleu(predictions, [targets[:6]]).score
    assert result.metrics["bleu"].value == pytest.approx(wanted) and 80 < wanted < 100
    assert result.metrics["bleu"].low < wanted < result.metrics["bleu"].high
    assert "tok:13a" in result.metrics["bleu"].meaning
    assert result.items[5]["prediction"] == predictions[5] != targets[5]
    assert [item["source"] for item in result.items] == sources[:6]
    assert model.model.in_flight == 3
    assert {row.input_ids[-1] for row in model.model.rows} == {7}
    first = model.tokenizer.decode(model.model.rows[0].input_ids[:-1])
    assert first == f"to German: {sources[0]}"


def test_sources_without_targets_are_refused(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "de").write_text("ein Satz\n")
    data = data_dir / "tasks" / "newstest2017.en"
    task = settings(
        "translation", data, generation=GenerationSettings(target_file=str(tmp_path / "de"))
    )
    with pytest.raises(ConfigError, match=r"same number of lines.*got '8 and 1'"):
        text_tasks.read_pairs(task)
    with pytest.raises(ConfigError, match="translation needs a target_file"):
        settings("translation", data)


def test_one_line_has_no_interval() -> None:
    metrics = text_tasks.corpus_scores(["ein Satz hat Wörter"], ["ein Satz hat Wörter"])
    assert metrics["bleu"].value == pytest.approx(100)
    assert metrics["bleu"].low is None


def test_rouge_of_overlapping_words() -> None:
    # 3 of 4 words each; one shared pair of 3; the longest common subsequence has 3 words.
    scores = text_tasks.score("the river rose fast", "the river has rose")
    assert scores["rouge1"] == pytest.approx(3 / 4)
    assert scores["rouge2"] == pytest.approx(1 / 3)
    assert scores["rougeL"] == pytest.approx(3 / 4)
    # rougeLsum takes sentences one by one, in whatever order they come.
    turned = text_tasks.score("Two were closed. It rose.", "It rose.\nTwo were closed.")
    assert turned["rougeLsum"] == 1.0 and turned["rougeL"] < 1.0


def test_summaries_of_a_csv_file(tmp_path: Path) -> None:
    file = tmp_path / "articles.csv"
    file.write_text(f'article,highlights,id\n"{ARTICLE}","It rose.\nClosed.",x1\n{ARTICLE},b,x2\n')
    model = asked(["It rose. Closed."], tmp_path)
    result = TASKS["summarization"](settings("summarization", file, limit=1), model, no_progress)
    assert model.model.prompts == [f"summarize: {ARTICLE}"]
    assert result.items[0]["id"] == "x1" and result.items[0]["target"] == "It rose.\nClosed."
    assert {name: metric.value for name, metric in result.metrics.items()} == {
        name: pytest.approx(1.0) for name in text_tasks.MEASURES
    }
    limit = csv.field_size_limit()
    file.write_text(f"article,highlights,id\n{'x' * 2 * limit},b,x1\n")
    assert len(text_tasks.read_articles(settings("summarization", file))) == 1
    assert csv.field_size_limit() == limit
    file.write_text("article,id\nabc,1\n,2\n")
    with pytest.raises(ConfigError, match=r"2 problems.*\n.*lacks columns; got \['highlights'\]"):
        text_tasks.read_articles(settings("summarization", file))


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "overlap"),
    [
        ("The Guru!", "guru", True, 1.0),
        ("a guru of the West", "guru", False, 0.5),
        ("", "guru", False, 0.0),
        ("an", "the", True, 0.0),
        ("two two", "two", False, 2 / 3),
    ],
)
def test_answers_are_compared_as_squads_own_script_does(
    prediction: str, answer: str, exact: bool, overlap: float
) -> None:
    assert (squad.normalised(prediction) == squad.normalised(answer)) is exact
    assert squad.f1(prediction, answer) == pytest.approx(overlap)


def test_questions_with_a_learned_prompt(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(PARTS)
    generated = ["Guru\nQuestion: more", "high", "disciples", "in the West"]
    model = asked(generated, tmp_path)
    generation = GenerationSettings(prompt_task=1, output_len=5, max_input_len=40)
    task = settings("squad", data_dir / "tasks" / "squad.json", generation=generation)
    result = TASKS["squad"](task, model, no_progress)
    assert [item["prediction"] for item in result.items] == ["Guru", *generated[1:]]
    assert [item["exact_match"] for item in result.items] == [True, False, False, False]
    assert [item["f1"] for item in result.items] == [
        1.0,
        pytest.approx(2 / 3),  # one of one word, one of two
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
    ]
    assert result.metrics["exact_match"].value == 0.25
    assert result.metrics["f1"].value == pytest.approx(0.75)
    questions = squad.read_squad(task)
    for row, question in zip(model.model.rows, questions, strict=True):
        assert row.input_ids[:2] == (900, 901) and row.prompt_task == 1
        assert len(row.input_ids) == 40 and row.output_len == 5
        text = model.tokenizer.decode(row.input_ids[2:])
        assert text.startswith(f"Context: {question.context[:20]}")
        assert text.endswith(f"Question: {question.question}\n\nAnswer:")


def test_a_prompt_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(PARTS)
    assert prompts.read_virtual_tokens(tmp_path, 0) == (900, 901, 902)
    with pytest.raises(ConfigError, match="no learned prompt task_2; choices: task_0, task_1"):
        prompts.read_virtual_tokens(tmp_path, 2)
    with pytest.raises(ConfigError, match="no learned prompt task_0"):
        prompts.read_virtual_tokens(tmp_path / "nowhere", 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("Yes, it is", True), ("FALSE.", False), ("no", False), ("Maybe yes", None), ("", None)],
)
def test_the_first_word_is_the_answer(text: str, answer: bool | None) -> None:
    assert boolq_generate.understood(text) is answer


def test_yes_or_no_questions(data_dir: Path, tmp_path: Path) -> None:
    generated = ["yes", "no", "False", "it is", "true", "Yes."]
    model = asked(generated, tmp_path)
    task = settings("boolq_generate", data_dir / "tasks" / "boolq.jsonl")
    result = TASKS["boolq_generate"](task, model, no_progress)
    assert [item["target"] for item in result.items] == [True, True, False, True, True, True]
    assert [item["correct"] for item in result.items] == [True, False, True, False, True, True]
    assert result.metrics["accuracy"].value == pytest.approx(4 / 6)
    assert result.metrics["answered"].value == pytest.approx(5 / 6)
    assert model.model.prompts[0].startswith("Passage: Skunks as pets -- It is")
    assert model.model.prompts[0].endswith("\nQuestion: can you own a skunk in the uk\nAnswer:")


def test_bad_questions_are_all_named(tmp_path: Path) -> None:
    file = tmp_path / "boolq.jsonl"
    good = {"passage": "a", "question": "b", "answer": True}
    lines = [json.dumps(good), "nonsense", json.dumps({**good, "answer": "perhaps"})]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="2 problems") as error:
        boolq_generate.read_boolq(settings("boolq_generate", file))
    assert "line 2 needs" in str(error.value) and "got 'perhaps'" in str(error.value)
    assert len(boolq_generate.read_boolq(settings("boolq_generate", file, limit=1))) == 1
    file.write_text("")
    with pytest.raises(ConfigError, match="there are no items"):
        boolq_generate.read_boolq(settings("boolq_generate", file))


@pytest.mark.parametrize(
    ("paragraph", "says"),
    [
        ({"context": 5, "qas": []}, None),
        ({"context": 5, "qas": [{"id": 7, "question": "q", "answers": []}]}, "context must be"),
        ({"context": "c", "qas": [{"id": 7, "question": [], "answers": []}]}, "question must be"),
        ({"context": "c", "qas": [{"id": 7, "answers": [{"text": 1}]}]}, "text must be text"),
    ],
)
def test_what_is_no_text_is_refused(
    paragraph: dict[str, object], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    with pytest.raises(ConfigError, match=says or "there are no items"):
        squad.read_squad(settings("squad", file))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "de"
    file.write_bytes(b"\xef\xbb\xbfein\xe2\x80\xa8Satz\n")
    assert prompts.read_lines(str(file), "key") == ["ein\u2028Satz"]


def test_an_item_that_is_refused_is_named(tmp_path: Path) -> None:
    model = asked(["one", "two"], tmp_path)

    class Refusing:
        def generate_rows(self, rows: object, in_flight: int) -> Iterator[GenerateOutput]:  # noqa: ARG002
            yield GenerateOutput(())
            raise ServerError("refused: too long")

    task = settings("boolq_generate", tmp_path)
    rows = [prompts.TaskPrompt("a"), prompts.TaskPrompt("a b c")]
    with pytest.raises(
        ServerError, match=r"no answer to boolq_generate's item 1 \(3 tokens\): refused: too"
    ):
        prompts.generate_texts(replace(model, model=Refusing()), rows, task, no_progress)


@pytest.mark.parametrize(
    ("room", "kept", "left"),
    [
        (6, 2, (1, 2, 3, 4, 5)),
        (4, 2, (1, 2, 4, 5)),
        (4, 0, (1, 2, 3, 4)),
        (2, 3, (4, 5)),
        (0, 3, ()),
    ],
)
def test_prompts_are_shortened_before_their_ending(
    room: int, kept: int, left: tuple[int, ...]
) -> None:
    assert prompts.shortened((1, 2, 3, 4, 5), room, kept) == left


def test_the_ending_is_what_stands_behind_the_longest_field(tmp_path: Path) -> None:
    given = GenerationSettings(template="{question} {passage} ({question})")
    (made,) = prompts.prompts_of(
        settings("boolq_generate", tmp_path, generation=given),
        boolq_generate.BOOLQ_TEMPLATE,
        [{"passage": "p", "question": "q"}],
        "passage",
    )
    assert made == prompts.TaskPrompt("q p (q)", " (q)")


def test_a_template_fills_in_fields_and_nothing_else() -> None:
    fields = {"source": "a {target} {0}", "other": "x"}
    assert prompts.fill_template("[{source}] {}", fields, "key") == "[a {target} {0}] {}"
    with pytest.raises(ConfigError, match=r"got \['sauce'\]; choices: source, other; change key"):
        prompts.fill_template("{sauce}", fields, "key")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"output_len": 0}, "output_len must be at least 1"),
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"max_input_len": 0}, "max_input_len must be at least 1"),
        ({"prompt_task": -1}, "prompt_task must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GenerationSettings(**changes)
