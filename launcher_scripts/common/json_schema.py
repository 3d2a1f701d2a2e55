"""JSON schemas in the keywords that llguidance follows.

Keywords that it does not know are written in others where that is possible: every text of the
result is one of the schema. An unknown `format` is left out. Meaning of the keywords: JSON Schema,
draft 2020-12, https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, permutations
from typing import Any

Schema = dict[str, Any]
Chain = tuple[Mapping[str, Any], ...]
# Formats of strings that llguidance follows; numbers may have any.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
MAX_UNIQUE = 4  # values of which all orders are written out
MAX_DOMAIN = 64  # values of the property that an `if` is about
MAX_EXCLUDED = 16  # alternatives of a `not`, those within others included
MAX_CONTAINS = 8  # items among which the one is that `contains` asks for
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "then", "else", "contains")
_SIZES = tuple(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)
# Keywords without an effect of their own -> those that they belong to.
_COMPANIONS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_COMBINATIONS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")


def supported_schema(schema: Any) -> tuple[Any, list[str]]:
    """The schema without unknown keywords, and notes of formats and positions that it simplifies.

    Raises ValueError for a keyword that cannot be written in others.
    """
    notes: list[str] = []
    return _rewrite(schema, "#", (), notes), list(dict.fromkeys(notes))


def _rewrite(schema: Any, path: str, chain: Chain, notes: list[str]) -> Any:
    """chain: the schemas of the same value that have this one in `allOf`, the nearest first"""
    if not isinstance(schema, dict):
        return schema
    result: Any = dict(schema)
    for key in _MAPS:
        if isinstance(result.get(key), dict):
            members = result[key].items()
            result[key] = {
                name: _rewrite(member, f"{path}/{key}/{name}", (), notes)
                for name, member in members
            }
    supported = (schema, *chain)
    for key, needs in _COMPANIONS.items():
        if needs not in schema:
            result.pop(key, None)
    for key in _LISTS:
        if isinstance(result.get(key), list):
            siblings = supported if key == "allOf" else ()
            result[key] = [
                _rewrite(member, f"{path}/{key}/{index}", siblings, notes)
                for index, member in enumerate(result[key])
            ]
    for key in _SCHEMAS:
        if isinstance(result.get(key), dict):
            result[key] = _rewrite(result[key], f"{path}/{key}", (), notes)
    for key, rule in _RULES.items():
        if isinstance(result, dict) and key in result:
            try:
                result = rule(result, supported, notes)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"{key} at {path} has a value of a wrong type") from error
            if result is None:
                raise ValueError(f"{key} at {path} is not supported there")
    return result


def _type(chain: Chain) -> Any:
    return next((schema["type"] for schema in chain if "type" in schema), None)


def _property(chain: Chain, name: str) -> Any:
    result = (_mapping(schema, "properties") for schema in chain)
    return next((properties[name] for properties in result if name in properties), None)


# A rule gets a schema with its keyword, which it may change, all schemas of the value as they came,
# and the notes. It returns the new schema; None: the keyword cannot be written in others.
Rule = Callable[[Schema, Chain, list[str]], Any]


def _format(schema: Schema, _: Chain, notes: list[str]) -> Any:
    name = schema["format"]
    if schema.get("type", "string") == "string" and name not in FORMATS:
        notes.append(f"the format {str(name)[:64]} is ignored")
        del schema["format"]
    return schema


def _listed(schema: Schema, _: Chain, __: list[str]) -> Any:
    """Refuse integers that llguidance would round."""
    left = [schema.get("const"), schema.get("enum")]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"const and enum have no integers beyond 64 bits; got {value}")
    return schema


def _sizes(schema: Schema, _: Chain, __: list[str]) -> Any:
    """Write 3.0 as 3: JSON has one type of numbers."""
    sizes = {name: schema[name] for name in _SIZES if isinstance(schema.get(name), float)}
    return {**schema, **{name: int(size) for name, size in sizes.items() if size.is_integer()}}


def _if(schema: Schema, chain: Chain, _: list[str]) -> Any:
    """Alternatives by the value of one property, of which all values are known."""
    condition = schema.pop("if")
    if not schema.keys() & {"then", "else"}:
        return schema
    branches = [schema.pop(key, True) for key in ("then", "else")]
    if isinstance(condition, bool) or condition == {}:
        return _all_of(schema, branches[0 if condition is not False else 1])
    properties = _mapping(condition, "properties") if isinstance(condition, dict) else {}
    if len(properties) != 1 or condition.keys() - {"properties", "required", "type"}:
        return None
    ((name, test),) = properties.items()
    required = condition.get("required", [])
    domain, tested = _values(_property(chain, name)), _values(test)
    is_object = _type(chain) == "object" and condition.get("type", "object") == "object"
    if domain is None or tested is None or len(domain) > MAX_DOMAIN:
        return None
    if not is_object or required not in ([], [name]):
        return None
    values = set(map(_canonical, tested))
    alternatives = []
    for branch, holds in zip(branches, (True, False), strict=True):
        selected = [value for value in domain if (_canonical(value) in values) is holds]
        # Without the property the condition holds, unless it requires the property.
        needed = bool(required) if holds else not required
        case: Schema = {"properties": {name: {"enum": selected} if selected else False}}
        if needed:
            case["required"] = [name]
        if selected or not needed:
            alternatives.append(_all_of(case, branch))
    return _all_of(schema, {"anyOf": alternatives} if alternatives else False)


def _not(schema: Schema, chain: Chain, _: list[str]) -> Any:
    """Return the remaining listed values, types and properties."""
    excluded = schema.pop("not")
    if isinstance(excluded, dict) and excluded.keys() == {"anyOf"}:
        items = list(islice(_alternatives(excluded), MAX_EXCLUDED + 1))
        if len(items) > MAX_EXCLUDED:
            return None
        for item in items:
            schema = _not({**schema, "not": item}, chain, [])
            if not isinstance(schema, dict):
                break
        return schema
    if isinstance(excluded, bool) or excluded == {}:
        return schema if excluded is False else False
    keys = excluded.keys() if isinstance(excluded, dict) else set()
    if keys == {"type"}:
        return _without_types(schema, excluded["type"])
    if keys == {"required"} and _type(chain) == "object":
        absent = [{"properties": {name: False}} for name in excluded["required"]]
        return _all_of(schema, {"anyOf": absent} if absent else False)
    values, domain = _values(excluded), _values(schema)
    if values is None or domain is None or not keys <= {"enum", "const"}:
        return None
    out = set(map(_canonical, values))
    left = [value for value in domain if _canonical(value) not in out]
    remaining = {key: value for key, value in schema.items() if key not in ("enum", "const")}
    return {**remaining, "enum": left} if left else False


def _alternatives(schema: Any) -> Iterator[Any]:
    """The schemas of an `anyOf`, and of those in it."""
    if not isinstance(schema, dict) or schema.keys() != {"anyOf"}:
        yield schema
        return
    for item in schema["anyOf"]:
        yield from _alternatives(item)


def _without_types(schema: Schema, excluded: Any) -> Any:
    names = excluded if isinstance(excluded, list) else [excluded]
    types = schema.get("type", list(_TYPES))
    types = types if isinstance(types, list) else [types]
    if "integer" in names and "number" in types and "number" not in names:
        return None
    removed = {*names, *(["integer"] if "number" in names else [])}
    left = [kind for kind in types if kind not in removed]
    return {**schema, "type": left[0] if len(left) == 1 else left} if left else False


def _unique_items(schema: Schema, chain: Chain, _: list[str]) -> Any:
    """All orders of a few values."""
    if schema.pop("uniqueItems") is not True or schema.get("maxItems", 2) <= 1:
        return schema
    values = _values(schema.get("items"))
    if values is None or len(values) > MAX_UNIQUE or _type(chain) != "array":
        return None
    if {"prefixItems", "contains"} & schema.keys():
        return None
    sizes = range(
        schema.pop("minItems", 0), min(schema.pop("maxItems", MAX_UNIQUE), len(values)) + 1
    )
    del schema["items"]
    lists = [
        {"type": "array", "prefixItems": [{"const": value} for value in order], **_length(size)}
        for size in sizes
        for order in permutations(values, size)
    ]
    return _all_of(schema, {"anyOf": lists} if lists else False)


def _length(size: int) -> Schema:
    return {"items": False, "minItems": size, "maxItems": size}


def _array_contains(schema: Schema, chain: Chain, notes: list[str]) -> Any:
    """An alternative for each position of the item."""
    contained, minimum = schema.pop("contains"), schema.pop("minContains", 1)
    if minimum == 0 and "maxContains" not in schema:
        return schema
    if minimum != 1 or _type(chain) != "array" or {"maxContains", "prefixItems"} & schema.keys():
        return None
    item, maximum = schema.get("items", True), schema.get("maxItems", MAX_CONTAINS + 1)
    if maximum > MAX_CONTAINS:
        notes.append(f"the item that contains asks for is one of the first {MAX_CONTAINS}")
    item_schema = contained if item is True else {"allOf": [item, contained]}
    fewest = schema.pop("minItems", 0)
    alternatives = [
        {"type": "array", "prefixItems": [*[item] * index, item_schema], "items": item}
        | {"minItems": max(fewest, index + 1)}
        for index in range(min(maximum, MAX_CONTAINS))
    ]
    schema.pop("items", None)
    return _all_of(schema, {"anyOf": alternatives} if alternatives else False)


def _property_names(schema: Schema, _: Chain, __: list[str]) -> Any:
    """Properties, or patterns of properties, and no others."""
    names = schema.pop("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        return schema
    if not isinstance(names, dict) or schema.get("patternProperties"):
        return None
    names = {key: value for key, value in names.items() if key != "type"}
    properties, others = _mapping(schema, "properties"), schema.get("additionalProperties", True)
    listed = _values(names) if names.keys() <= {"enum", "const"} else None
    if listed is not None:
        allowed = [item for item in listed if isinstance(item, str)]
        declared = {name: properties.get(name, others) for name in allowed}
        return {
            **schema,
            "properties": {**dict.fromkeys(properties, False), **declared},
            "additionalProperties": False,
        }
    pattern = _name_pattern(names)
    # Which properties a stranger's pattern matches is left to llguidance: `re` may take forever.
    if pattern is None or properties:
        return None
    return {**schema, "patternProperties": {pattern: others}, "additionalProperties": False}


def _name_pattern(names: Schema) -> str | None:
    """A regular expression of the names."""
    if names.keys() == {"pattern"}:
        return str(names["pattern"])
    if names.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _dependent_required(schema: Schema, _: Chain, __: list[str]) -> Any:
    return _dependent(
        schema,
        {name: {"required": others} for name, others in schema.pop("dependentRequired").items()},
    )


def _dependent_schemas(schema: Schema, _: Chain, __: list[str]) -> Any:
    return _dependent(schema, schema.pop("dependentSchemas"))


def _dependent(schema: Schema, schemas: Mapping[str, Any]) -> Any:
    """Each property is absent, or what depends on it holds."""
    cases = [
        {"anyOf": [{"properties": {name: False}}, _all_of({"required": [name]}, other)]}
        for name, other in schemas.items()
    ]
    return {**schema, "allOf": [*schema.get("allOf", []), *cases]} if cases else schema


def _unevaluated_properties(schema: Schema, _: Chain, __: list[str]) -> Any:
    return _unevaluated(schema, "unevaluatedProperties", "additionalProperties")


def _unevaluated_items(schema: Schema, _: Chain, __: list[str]) -> Any:
    return _unevaluated(schema, "unevaluatedItems", "items")


def _unevaluated(schema: Schema, key: str, others: str) -> Any:
    value = schema.pop(key)
    if value is True or value == {}:
        return schema
    if any(combination in schema for combination in _COMBINATIONS):
        return None
    return {others: value, **schema}


# Those that look at other keywords come before the ones that change these.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SIZES, _sizes),
    **dict.fromkeys(("const", "enum"), _listed),
    "format": _format,
    "not": _not,
    "if": _if,
    "uniqueItems": _unique_items,
    "contains": _array_contains,
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
}


def _all_of(schema: Any, other: Any) -> Any:
    """Both at once."""
    if other is True or other == {}:
        return schema
    if schema is False or other is False:
        return False
    return {**schema, "allOf": [*schema.get("allOf", []), other]}


def _values(schema: Any) -> list[Any] | None:
    """All values of a schema that lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [True, False] if schema.get("type") == "boolean" else None


def _canonical(value: Any) -> str:
    """Equal for equal values of JSON, where true is not 1."""
    return json.dumps(value, sort_keys=True)


def _mapping(schema: Mapping[str, Any], key: str) -> Schema:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def schemas_of(grammar: Mapping[str, Any]) -> Iterator[Any]:
    """The JSON schemas of a guided_grammar."""
    if "json_schema" in grammar:
        yield grammar["json_schema"]
    for alternative in grammar.get("any_of", ()):
        yield from schemas_of(alternative)
