"""JSON schemas whose keywords llguidance does not know: the texts that it then lets through."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import time
from typing import Any

import pytest

from launcher_scripts.common.errors import RequestError
from launcher_scripts.common.json_schema import FORMATS, MAX_CONTAINS, supported_schema
from tests.backend.test_guidance import accepts, drawn, guidance

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not there"
)
KIND = {"kind": {"enum": ["a", "b", "c"]}, "size": {"type": "integer", "maximum": 9, "minimum": 0}}
IF_A = {"properties": {"kind": {"const": "a"}}}
CLOSED = {"type": "object", "additionalProperties": False}
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
# schema, values that it allows, values that it does not
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["b", "a"], ["c", "a", "b"]],
        [[], ["a", "a"], ["a", "b", "a"]],
    ),
    "uniqueItems is false": (
        {"type": "array", "items": SMALL, "uniqueItems": False},
        [[], [1, 1]],
        [["a"]],
    ),
    "one unique item": (
        {"type": "array", "items": SMALL, "uniqueItems": True, "maxItems": 1},
        [[], [1]],
        [[1, 2]],
    ),
    "not: values": ({"enum": ["a", "b", 1], "not": {"const": 1}}, ["a", "b"], [1]),
    "not: true is not 1": ({"enum": [True, 1], "not": {"const": 1}}, [True], [1]),
    "not: of booleans": ({"type": "boolean", "not": {"enum": [False]}}, [True], [False]),
    "not: a type": ({"type": ["null", "boolean"], "not": {"type": "null"}}, [True], [None]),
    "not: types": (
        {"not": {"anyOf": [{"type": ["object", "array", "number"]}, {"type": "string"}]}},
        [None, True],
        [1, 1.5, "a", [], {}],
    ),
    "not: both properties": (
        {**CLOSED, "properties": KIND, "not": {"required": ["kind", "size"]}},
        [{}, {"kind": "a"}, {"size": 1}],
        [{"kind": "a", "size": 1}],
    ),
    "if without consequences": ({**SMALL, "if": {"minimum": 5}}, [1], ["a"]),
    "sizes with a point": ({"type": "string", "maxLength": 2.0}, ["a", "ab"], ["abc"]),
    "the largest integer": ({"const": (1 << 63) - 1}, [(1 << 63) - 1], [1 << 63]),
    "if, then": (
        {**CLOSED, "properties": KIND, "if": IF_A, "then": {"required": ["size"]}},
        [{"kind": "b"}, {"kind": "a", "size": 1}, {"size": 1}],
        [{"kind": "a"}, {}],
    ),
    "if with required, then, else": (
        {
            **CLOSED,
            "properties": KIND,
            "if": {**IF_A, "required": ["kind"]},
            "then": {"required": ["size"]},
            "else": {"properties": {"size": False}},
        },
        [{}, {"kind": "b"}, {"kind": "a", "size": 1}],
        [{"kind": "a"}, {"size": 1}, {"kind": "b", "size": 1}],
    ),
    "if in allOf": (
        {
            **CLOSED,
            "properties": KIND,
            "required": ["kind"],
            "allOf": [
                {"if": IF_A, "then": {"required": ["size"]}},
                {"if": {"properties": {"kind": {"const": "b"}}}, "else": {"required": ["size"]}},
            ],
        },
        [{"kind": "b"}, {"kind": "a", "size": 1}, {"kind": "c", "size": 1}],
        [{"kind": "a"}, {"kind": "c"}],
    ),
    "contains": (
        {"type": "array", "items": SMALL, "contains": {"enum": [1, 2]}, "maxItems": 3},
        [[1], [3, 2], [3, 4, 1], [1, 1, 1]],
        [[], [3], [3, 4, 5], [3, 4, 5, 1]],
    ),
    "propertyNames: values": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": SMALL},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    "propertyNames: a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": SMALL},
        [{}, {"ab": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    "propertyNames: a length": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": SMALL},
        [{"ab": 1}],
        [{"abc": 1}],
    ),
    "dependentRequired": (
        {**CLOSED, "properties": KIND, "dependentRequired": {"kind": ["size"]}},
        [{}, {"size": 1}, {"kind": "a", "size": 1}],
        [{"kind": "a"}],
    ),
    "dependentSchemas": (
        {
            **CLOSED,
            "properties": KIND,
            "dependentSchemas": {"size": {"properties": {"kind": {"const": "c"}}}},
        },
        [{"kind": "a"}, {"size": 1}, {"kind": "c", "size": 1}],
        [{"kind": "a", "size": 1}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": SMALL}, "unevaluatedProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    "an unknown format": ({"type": "string", "format": "phone"}, ["a"], [1]),
    "a name that is a keyword": (
        {**CLOSED, "properties": {"not": SMALL, "format": {"type": "string"}}},
        [{"not": 1, "format": "a"}],
        [{"not": "a"}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_keywords_mean_what_they_say(name: str) -> None:
    schema, right, wrong = CASES[name]
    made, tokenizer = guidance("gpt2bpe")
    for value in (*right, *wrong):
        guide = made.guide(json.dumps({"json_schema": schema}))
        ids = [*tokenizer.encode(json.dumps(value)), tokenizer.end_id]
        assert accepts(guide, ids) is any(value is each for each in right), value


def test_a_set_that_contains_a_value_has_it_among_the_first_items() -> None:
    schema = {"type": "array", "items": SMALL, "contains": {"const": 7}, "maxItems": 12}
    _, notes = supported_schema(schema)
    assert notes == [f"the item that contains asks for is one of the first {MAX_CONTAINS}"]
    made, tokenizer = guidance("gpt2bpe")
    for seed in range(5):
        guide = made.guide(json.dumps({"json_schema": schema}))
        value = json.loads(drawn(guide, tokenizer, random.Random(seed)))
        assert 7 in value and len(value) <= 12


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems at #"),
        ({"type": "string", "not": {"pattern": "a"}}, "not at #"),
        ({"properties": {"a": {"not": {"const": 1}}}}, "not at #/properties/a"),
        ({"if": {"minProperties": 1}, "then": {}}, "if at #"),
        ({"type": "array", "contains": {}, "minContains": 2}, "contains at #"),
        ({"propertyNames": {"format": "uuid"}}, "propertyNames at #"),
        (
            {"anyOf": [{"allOf": [{}], "unevaluatedProperties": False}]},
            "unevaluatedProperties at #/anyOf/0",
        ),
    ],
)
def test_what_cannot_be_written_otherwise_is_refused_by_name(schema: Any, keyword: str) -> None:
    made, _ = guidance("gpt2bpe")
    with pytest.raises(RequestError, match=f"guided_grammar is wrong: {keyword} is not supported"):
        made.guide(json.dumps({"json_schema": schema}))


def test_a_large_schema_is_read_in_time() -> None:
    """What the gateway does with it must not hold up others; limits that only a hang reaches."""
    many = [str(number) for number in range(20_000)]
    wide = {name: {"enum": ["a", "b"]} for name in many}
    branches = [{"if": {"properties": {name: {"const": "a"}}}, "then": {}} for name in many]
    started = time.process_time()
    supported_schema({"enum": many, "not": {"enum": many}})
    supported_schema({"type": "object", "properties": wide, "allOf": branches})
    with pytest.raises(ValueError, match="not at # is not supported"):
        supported_schema({"enum": many, "not": {"anyOf": [{"const": each} for each in many]}})
    with pytest.raises(ValueError, match="propertyNames at # is not supported"):
        supported_schema(
            {"properties": {"a" * 99 + "!": {}}, "propertyNames": {"pattern": "(a+)+$"}}
        )
    assert time.process_time() - started < 20


def nested_alternatives(depth: int) -> dict[str, Any]:
    """16 ** depth of them."""
    if not depth:
        return {"const": 3}
    return {"anyOf": [nested_alternatives(depth - 1)] * 16}


def test_alternatives_within_others_are_counted() -> None:
    """Each would compare all listed values."""
    many = list(range(20_000))
    with pytest.raises(ValueError, match="not at # is not supported"):
        supported_schema({"enum": many, "not": nested_alternatives(5)})
    few = {"anyOf": [{"anyOf": [{"const": 0}, {"const": 1}]}, {"const": 2}]}
    assert supported_schema({"enum": many, "not": few})[0] == {"enum": many[3:]}


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"anyOf": 5}},
        {"type": "object", "not": {"required": 5}},
        {"type": "object", "if": {"properties": {"a": 1}}, "then": 3, "allOf": 4},
        {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": "3"},
        {"type": "array", "contains": {}, "maxItems": "3"},
        {"type": "array", "contains": {}, "minItems": []},
        {"dependentRequired": 4},
        {"dependentSchemas": ["a"]},
        {"type": "string", "format": {}},
        {"propertyNames": {"enum": 4}, "properties": 5},
        {"propertyNames": {"pattern": "a"}, "patternProperties": 3},
    ],
)
def test_values_of_wrong_types_are_errors_of_the_schema(schema: Any) -> None:
    """Whether they are refused here or by llguidance, no other error comes."""
    with contextlib.suppress(ValueError):
        supported_schema(schema)


def test_the_formats_are_llguidances() -> None:
    made, _ = guidance("gpt2bpe")
    for name in FORMATS:
        made.guide(json.dumps({"json_schema": {"type": "string", "format": name}}))
    assert supported_schema({"type": "string", "format": "x"}) == (
        {"type": "string"},
        ["the format x is ignored"],
    )
