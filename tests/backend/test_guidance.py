"""Grammars of requests: every text that the masks let through is one that was asked for."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from launcher_scripts.backends.fastertransformer import guidance as guidance_module
from launcher_scripts.backends.fastertransformer.guidance import Guidance
from launcher_scripts.backends.fastertransformer.request_tensors import to_requests
from launcher_scripts.clients.contract_tensors import request_tensors
from launcher_scripts.common.errors import BusyError, RequestError
from launcher_scripts.common.limited_process import WorkTimeoutError
from launcher_scripts.common.tokenizer import Tokenizer, load_tokenizer
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.requests import check_request
from launcher_scripts.engine.core.row import Guide
from launcher_scripts.gateway import harmony
from tests.engine.small_models import small_config

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not there"
)
TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
FOLDERS = ("gpt2bpe", "sentencepiece")
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"type": "boolean"},
    },
    "required": ["age", "ok"],
    "additionalProperties": False,
}


@cache
def guidance(folder: str, **changes: int) -> tuple[Guidance, Tokenizer]:
    """Of a model whose vocabulary is padded."""
    tokenizer = load_tokenizer(TOKENIZERS / folder)
    sizes = {"vocab_size": tokenizer.vocab_size + 5, "end_id": tokenizer.end_id, **changes}
    return Guidance(TOKENIZERS / folder, small_config(start_id=0, **sizes)), tokenizer


def allowed(guide: Guide) -> list[int]:
    bits = np.unpackbits(np.frombuffer(guide.mask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def drawn(guide: Guide, tokenizer: Tokenizer, draw: random.Random) -> str:
    """A text of tokens that may come."""
    ids: list[int] = []
    while not guide.finished:
        ids.append(draw.choice(allowed(guide)))
        assert guide.accept(ids[-1])
        assert len(ids) < 500
    return tokenizer.decode([token for token in ids if token != tokenizer.end_id])


def texts(folder: str, grammar: dict[str, object], count: int = 30) -> set[str]:
    made, tokenizer = guidance(folder)
    text = json.dumps(grammar)
    return {drawn(made.guide(text), tokenizer, random.Random(seed)) for seed in range(count)}


@needs_llguidance
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_choice_is_one_of_them(folder):
    assert texts(folder, {"choice": ["yes", "no", "not at all"]}) == {"yes", "no", "not at all"}


@needs_llguidance
@pytest.mark.parametrize("thought", ["", "so</think>"])
def test_alternatives_keep_their_own_definitions(thought):
    """Both schemas define `A`, each its own; any other kind of grammar stands beside them."""
    schemas = [
        {"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 1, "maxItems": 1}
        | {"$defs": {"A": {"enum": [value]}}}
        for value in ("one", "two")
    ]
    grammars: list[dict[str, object]] = [{"json_schema": schema} for schema in schemas]
    grammars += [{"choice": ["three"]}, {"regex": "fo{1,2}ur"}, {"grammar": 'start: "five"'}]
    text = json.dumps(
        {"any_of": grammars, **({"reasoning": {"end": "</think>"}} if thought else {})}
    )
    made, tokenizer = guidance("gpt2bpe")
    for expected in ('["one"]', '["two"]', "three", "foour", "five"):
        guide = made.guide(text)
        for token in tokenizer.encode(thought + expected):
            assert guide.accept(token), expected
        assert guide.finished or tokenizer.end_id in allowed(guide)
    guide = made.guide(text)
    assert not all(map(guide.accept, tokenizer.encode(thought + '["three"]')))


@needs_llguidance
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_regular_expression_matches(folder):
    found = texts(folder, {"regex": "(a|b[en]){2,4} (the|or) [a-d]{3}"})
    assert len(found) > 10
    for text in found:
        assert re.fullmatch("(a|b[en]){2,4} (the|or) [a-d]{3}", text)


@needs_llguidance
@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "(" root ")" | "x" [0-9]',
        'start: "(" start ")" | "x" DIGIT\nDIGIT: /[0-9]/',
    ],
)
def test_a_grammar_may_nest(grammar):
    found = texts("gpt2bpe", {"grammar": grammar})
    assert len(found) > 10
    for text in found:
        depth = text.index("x")
        assert re.fullmatch(r"\(+x[0-9]\)+|x[0-9]", text) and len(text) == 2 * depth + 2


@needs_llguidance
def test_json_has_the_schemas_keys_and_types():
    for text in texts("gpt2bpe", {"json_schema": SCHEMA}):
        value = json.loads(text)
        assert value.keys() == {"age", "ok"}
        assert type(value["age"]) is int and 0 <= value["age"] <= 120
        assert type(value["ok"]) is bool


@needs_llguidance
@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ('{"age": 3, "ok": true}', True),
        ('{"age":3,"ok":true}', True),
        ('{\n  "age": 3,\n  "ok": true\n}', True),
        ('{\n\t"age": 3,\n\t"ok": true\n}', True),
        ('{"age":  3, "ok": true}', False),
        ('{"age": \n3, "ok": true}', False),
        ('{\n\n"age": 3, "ok": true}', False),
        ('{"age": 3, "ok": true} ', False),
        ("{\n" + " " * 33 + '"age": 3, "ok": true}', False),
    ],
)
@pytest.mark.parametrize("kind", ["json_schema", "json_object", "any_of", "reasoning"])
def test_white_space_of_json_has_no_runs(kind, text, complete):
    made, tokenizer = guidance("gpt2bpe")
    grammar = {
        "json_schema": {"json_schema": SCHEMA},
        "json_object": {"json_object": True},
        "any_of": {"any_of": [{"json_schema": SCHEMA}, {"choice": ["no"]}]},
        "reasoning": {"json_schema": SCHEMA, "reasoning": {"begin": "<t>", "end": "</t>"}},
    }[kind]
    assert accepts(
        made.guide(json.dumps(grammar)), [*tokenizer.encode(text), tokenizer.end_id]
    ) is (complete)


Valid = Callable[[object], bool]


def random_schema(draw: random.Random, depth: int = 0) -> tuple[dict[str, object], Valid]:
    """A schema whose texts are short, and what tells its values from others."""
    kind = draw.choice(
        ["integer", "boolean", "enum", "string"] + ["array", "object", "any"] * (depth < 2)
    )
    if kind == "integer":
        low = draw.randrange(-20, 20)
        high = low + draw.randrange(30)
        return (
            {"type": "integer", "minimum": low, "maximum": high},
            lambda value: type(value) is int and low <= value <= high,
        )
    if kind == "boolean":
        return {"type": "boolean"}, lambda value: type(value) is bool
    if kind == "enum":
        values = draw.sample(["the", "or", 1, None, "a b"], 3)
        return {"enum": values}, lambda value: value in values
    if kind == "string":
        longest = draw.randrange(5)
        return (
            {"type": "string", "maxLength": longest},
            lambda value: isinstance(value, str) and len(value) <= longest,
        )
    if kind == "any":
        parts = [random_schema(draw, depth + 1) for _ in range(2)]
        return (
            {"anyOf": [part for part, _ in parts]},
            lambda value: any(valid(value) for _, valid in parts),
        )
    if kind == "array":
        items, valid = random_schema(draw, depth + 1)
        sizes = sorted(draw.choices(range(4), k=2))
        return (
            {"type": "array", "items": items, "minItems": sizes[0], "maxItems": sizes[1]},
            lambda value: (
                isinstance(value, list)
                and sizes[0] <= len(value) <= sizes[1]
                and all(map(valid, value))
            ),
        )
    members = {name: random_schema(draw, depth + 1) for name in draw.sample("abcd", 2)}
    required = {name for name in members if draw.random() < 0.5}
    return (
        {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in members.items()},
            "required": sorted(required),
            "additionalProperties": False,
        },
        lambda value: (
            isinstance(value, dict)
            and required <= value.keys() <= members.keys()
            and all(members[name][1](member) for name, member in value.items())
        ),
    )


@needs_llguidance
@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_texts_of_random_schemas_are_valid(seed, reasoning):
    """Also behind what is thought."""
    made, tokenizer = guidance("gpt2bpe")
    draw = random.Random(seed)
    schema, valid = random_schema(draw)
    marks = {"reasoning": {"begin": "<t>", "end": "</t>"}} if reasoning else {}
    for _ in range(4):
        guide = made.guide(json.dumps({"json_schema": schema, **marks}))
        thought = "<t>Is it [1]?</t>" if reasoning and draw.random() < 0.5 else ""
        assert accepts(guide, tokenizer.encode(thought))
        if reasoning and not thought:  # what begins to think may think indefinitely
            assert set(tokenizer.encode("<t>")[:1]) <= set(allowed(guide))
            continue
        text = drawn(guide, tokenizer, draw)
        assert valid(json.loads(text)), (schema, text)


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_drafts_are_refused_beside_any_schema(seed, reasoning):
    """So a text that follows a grammar has the distribution that it has without drafts."""
    schema, _ = random_schema(random.Random(seed))
    marks = {"reasoning": {"begin": "<think>", "end": "</think>"}} if reasoning else {}
    text = json.dumps({"json_schema": schema, **marks})
    request = GenerateRequest((3, 4), 5, guided_grammar=text, num_speculative_tokens=2)
    with pytest.raises(RequestError, match="num_speculative_tokens is not for guided_grammar"):
        check_request(request, small_config(), 50, 8)
    check_request(replace(request, num_speculative_tokens=0), small_config(), 50, 8)


@needs_llguidance
def test_a_json_object_begins_as_one():
    made, tokenizer = guidance("gpt2bpe")
    first = allowed(made.guide('{"json_object": true}'))
    assert {tokenizer.decode([token]).lstrip()[:1] for token in first} <= {"{", ""}
    assert not made.guide('{"json_object": true}').accept(tokenizer.encode("a")[0])


@needs_llguidance
def test_the_end_token_comes_only_where_the_text_may_end():
    made, tokenizer = guidance("gpt2bpe")
    guide = made.guide('{"regex": "ab*"}')
    assert tokenizer.end_id not in allowed(guide)
    assert guide.accept(tokenizer.encode("a")[0])
    assert tokenizer.end_id in allowed(guide)
    assert not guide.finished
    assert guide.accept(tokenizer.end_id)
    assert guide.finished


def accepts(guide: Guide, ids: list[int]) -> bool:
    return all(map(guide.accept, ids))


@needs_llguidance
@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        ({"json_schema": SCHEMA}, '{"age": 3, "ok": true}'),
        ({"regex": "a+b"}, "aab"),
        ({"choice": ["yes", "no"]}, "no"),
    ],
)
def test_the_text_comes_behind_what_is_thought(grammar, answer):
    made, tokenizer = guidance("gpt2bpe")
    thought = 'Is it {"age"? </thin\n Yes. '
    for reasoning, told in (
        ({"end": "</think>"}, {f"{thought}</think>\n\n{answer}": True, answer: False}),
        (
            {"begin": "<think>", "end": "</think>"},
            {f"<think>{thought}</think>{answer}": True, answer: True, thought: False},
        ),
    ):
        text = json.dumps({**grammar, "reasoning": reasoning})
        for each, complete in told.items():
            guide = made.guide(text)
            ids = [*tokenizer.encode(each), tokenizer.end_id]
            assert accepts(guide, ids) is complete, each
    wrong = f"{thought}</think>{answer[:-1]}?"
    assert not accepts(
        made.guide(json.dumps({**grammar, "reasoning": {"end": "</think>"}})),
        tokenizer.encode(wrong),
    )


@needs_llguidance
def test_a_mark_may_be_a_special_token():
    made, tokenizer = guidance("gpt2bpe")
    mark = "<|endoftext|>"
    assert tokenizer.special_id(mark) == tokenizer.end_id
    guide = made.guide(json.dumps({"choice": ["no"], "reasoning": {"end": mark}}))
    assert accepts(guide, tokenizer.encode(mark.replace("|", "!") + " so"))
    assert accepts(guide, [tokenizer.end_id, *tokenizer.encode(" no"), tokenizer.end_id])
    assert guide.finished


@needs_llguidance
def test_marks_may_be_texts_between_special_tokens(tmp_path):
    """As those of gpt-oss."""
    library = tokenizers.Tokenizer.from_str(load_tokenizer(TOKENIZERS / "gpt2bpe").to_json())
    library.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    sizes = {"vocab_size": tokenizer.vocab_size, "end_id": tokenizer.end_id}
    made = Guidance(tmp_path, small_config(start_id=0, **sizes))
    text = json.dumps({"choice": ["no"], "reasoning": harmony.REASONING.marks})
    begin, end = harmony.REASONING.begin, harmony.REASONING.end
    for each, complete in (
        (f"{begin}Is it? No.{end}no", True),
        (f"{begin}no", False),
        (f"{begin}Is it?{end}yes", False),
        (f"{begin}Is it?<|end|>no", False),
        ("no", True),
    ):
        ids = [*tokenizer.encode(each), tokenizer.end_id]
        assert accepts(made.guide(text), ids) is complete, each


@needs_llguidance
def test_a_text_that_the_vocabulary_cannot_write_is_never_complete():
    made, tokenizer = guidance("sentencepiece")
    assert b"{" not in tokenizer.pieces()
    guide = made.guide('{"json_object": true}')
    assert not guide.accept((allowed(guide) or [tokenizer.end_id])[0])
    assert not guide.accept(tokenizer.end_id)


@needs_llguidance
def test_ids_beyond_the_tokenizers_never_come():
    made, tokenizer = guidance("gpt2bpe")
    assert max(allowed(made.guide('{"regex": ".*"}'))) < tokenizer.vocab_size


@needs_llguidance
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", r"guided_grammar is wrong: .*; choices: json_schema, json_object, regex, cho"),
        ("[1]", "it is a JSON object with one key"),
        ("{}", "it is a JSON object with one key"),
        ('{"regex": "a", "choice": ["b"]}', "one key"),
        ('{"ebnf": "a"}', "one key"),
        ('{"any_of": [{"regex": "a"}, {"ebnf": "a"}]}', "one key each"),
        ('{"regex": 3}', "regex is a text"),
        ('{"choice": []}', "choice is a list of texts"),
        ('{"choice": [1]}', "choice is a list of texts"),
        ('{"json_object": false}', "json_object is true or left out"),
        ('{"regex": "["}', "guided_grammar cannot be followed: .*regex"),
        ('{"json_schema": {"type": "foo"}}', "guided_grammar cannot be followed: .*foo"),
        ('{"json_schema": 3}', "guided_grammar"),
        ('{"json_schema": {"$ref": "file:///etc/passwd"}}', "cannot be followed: .*not present"),
        ("[" * 100_000, "guided_grammar is wrong: .*recursion"),
        ('{"regex": "a", "reasoning": {"begin": "<"}}', "wrong: reasoning is an object with the m"),
        ('{"grammar": 1}', "wrong: grammar is a text"),
        ('{"grammar": "root ::= ("}', "wrong: the grammar cannot be read"),
        ('{"grammar": "start: start"}', "no text follows guided_grammar"),
        (r'{"regex": "[^\\s\\S]"}', "no text follows guided_grammar"),
        ('{"json_schema": {"$ref": "#"}}', "no text follows guided_grammar"),
        ('{"json_schema": {"enum": [[9223372036854775808]]}}', "no integers beyond 64 bits"),
        ('{"grammar": "start: A"}', "guided_grammar cannot be followed: .*A"),
        ('{"regex": "a", "reasoning": {"end": ""}}', "wrong: the marks of reasoning are texts"),
    ],
)
def test_a_wrong_grammar_is_named(text, message):
    with pytest.raises(RequestError, match=message):
        guidance("gpt2bpe")[0].guide(text)


def nested(depth: int) -> str:
    rules = "\n".join(f'r{i}: r{i + 1} "x"?' for i in range(depth))
    return f'start: r0\n{rules}\nr{depth}: "a"'


@needs_llguidance
@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"grammar": nested(10_000)}, "too complex: it is nested too deeply"),
        (
            {
                "json_schema": {
                    "$ref": "#/$defs/d0",
                    "$defs": {
                        **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4_000)},
                        "d4000": {"type": "string"},
                    },
                }
            },
            "too complex: it is nested too deeply",
        ),
        (
            {
                "json_schema": {
                    "allOf": [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(1_000)]
                }
            },
            "too complex: it",
        ),
        (
            {"json_schema": {"properties": {f"p{i}": {"type": "string"} for i in range(9_000)}}},
            "too complex",
        ),
        (
            {"json_schema": {"const": "x" * 900_000}},
            r"too long, .*; got 9000\d\d; .*262144",
        ),
    ],
)
def test_a_grammar_beyond_the_limits_is_refused_and_the_next_one_is_not(grammar, message):
    made, _ = guidance("gpt2bpe")
    with pytest.raises(RequestError, match=f"guided_grammar .*{message}"):
        made.guide(json.dumps(grammar))
    assert made.guide('{"choice": ["yes"]}').mask()


@needs_llguidance
def test_a_grammar_is_compiled_once_for_all_rows(monkeypatch):
    made = guidance.__wrapped__("gpt2bpe")[0]
    calls = []
    compile_one = made._compiler.compile
    monkeypatch.setattr(
        made._compiler, "compile", lambda text: calls.append(text) or compile_one(text)
    )
    guides = [made.guide('{"regex": "a+b"}') for _ in range(3)]
    assert len(calls) == 1
    token = guidance("gpt2bpe")[1].encode("a")[0]
    assert guides[0].accept(token)
    assert guides[0].mask() != guides[1].mask() == guides[2].mask()
    assert made.is_compiled('{"regex": "a+b"}')


@needs_llguidance
def test_a_refused_grammar_is_refused_at_once_and_takes_no_place(monkeypatch):
    made = guidance.__wrapped__("gpt2bpe")[0]
    monkeypatch.setattr(guidance_module, "MAX_REFUSALS", 2)
    calls = []

    def refuse(text: str) -> str:
        calls.append(text)
        return f"no {text}"

    monkeypatch.setattr(made._trials, "call", refuse)
    for text in ("a", "a", "b", "c", "c", "a"):
        with pytest.raises(RequestError, match=f"no {text}"):
            made.guide(text)
    assert calls == ["a", "b", "c", "a"]
    assert not made._compiled

    def too_late(_: str) -> str:
        raise WorkTimeoutError("it takes longer than 60 s")

    monkeypatch.setattr(made._trials, "call", too_late)
    for _ in range(2):
        with pytest.raises(BusyError, match="guided_grammar cannot be compiled in time"):
            made.guide("d")
    assert not made.is_compiled("d")


def test_the_processes_that_compile_grammars_do_not_load_torch():
    module = guidance_module.__name__
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_llguidance
def test_a_hostile_regular_expression_is_refused_or_bounded():
    """Each mask is computed apart from the thread that waits for it."""
    made, tokenizer = guidance("gpt2bpe")
    try:
        guide = made.guide('{"regex": "((a{1000}){1000}){1000}"}')
        for _ in range(5):
            started = time.perf_counter()
            guide.accept(tokenizer.encode("a")[0])
            guide.is_ready(0.0)
            assert time.perf_counter() - started < 1.0
            guide.mask()
    except RequestError as error:
        assert "guided_grammar is too complex" in str(error)


@needs_llguidance
def test_a_model_without_tokenizer_or_end_token_has_no_guides(tmp_path):
    with pytest.raises(RequestError, match="guided_grammar needs the model's tokenizer: no token"):
        Guidance(tmp_path, small_config()).guide('{"regex": "a"}')
    none = small_config(vocab_size=1, start_id=0, end_id=1)
    with pytest.raises(RequestError, match="needs a model with an end token; got 1"):
        Guidance(TOKENIZERS / "sentencepiece", none).guide('{"regex": "a"}')


@needs_llguidance
def test_without_an_end_token_of_its_own_a_model_takes_the_tokenizers():
    made, tokenizer = guidance(
        "gpt2bpe", end_id=load_tokenizer(TOKENIZERS / "gpt2bpe").vocab_size + 5
    )
    guide = made.guide('{"regex": "(ab)?"}')
    assert tokenizer.end_id in allowed(guide)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="needs the Python package llguidance where the model"):
        guidance.__wrapped__("gpt2bpe")[0].guide('{"regex": "a"}')


def test_pieces_are_the_bytes_of_their_text():
    tokenizer = load_tokenizer(TOKENIZERS / "sentencepiece")
    pieces = tokenizer.pieces()
    text = "the cat and the rat"
    assert b"".join(pieces[token] for token in tokenizer.encode(text)).decode() == f" {text}"
    assert pieces[tokenizer.start_id] == pieces[tokenizer.end_id] == b""


@pytest.mark.parametrize("model", ["GPT", "T5", "BART", "Agm"])
def test_grammars_travel_as_bytes(model):
    rows = [
        GenerateRequest((1, 2), 3, guided_grammar='{"choice": ["ja", "nö"]}'),
        GenerateRequest((1,), 3),
    ]
    tensors = {name: torch.from_numpy(each) for name, each in request_tensors(rows, model).items()}
    assert to_requests(CONTRACTS[model], tensors) == rows
    shared = {**tensors, "guided_grammar": torch.tensor(list(b"{}"), dtype=torch.uint8)}
    assert [row.guided_grammar for row in to_requests(CONTRACTS[model], shared)] == ["{}", "{}"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[195, 40], [0, 0]], "guided_grammar is not UTF-8"),
        ([[[1]], [[1]]], r"guided_grammar must be \[2, n\]; got \[2, 1, 1\]"),
        ([[1], [1], [1]], r"must be \[2, n\]; got \[3, 1\]"),
    ],
)
def test_a_tensor_that_is_no_text_is_named(given, message):
    rows = [GenerateRequest((1,), 1)] * 2
    tensors = {name: torch.from_numpy(each) for name, each in request_tensors(rows).items()}
    tensors["guided_grammar"] = torch.tensor(given, dtype=torch.uint8)
    with pytest.raises(RequestError, match=message):
        to_requests(CONTRACTS["GPT"], tensors)
