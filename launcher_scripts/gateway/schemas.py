"""The requests' bodies: what may be asked for, and in which range.

Names and meanings are OpenAI's, and vLLM's where OpenAI has none. A parameter that is not here is
refused by its name; null means that it was not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, Json, field_validator, model_validator

from launcher_scripts.contract.tensors import MOST_LOG_PROBS, MOST_SPECULATIVE_TOKENS
from launcher_scripts.gateway.api_errors import ApiError, bad_request
from launcher_scripts.gateway.tool_calls import schema_of_any, schema_of_one

MOST_ROWS = 128
_SHOWN_PROBLEMS = 5
_MOST_NUMBER = 1 << 31

Prompt = str | list[int]
TokenId = Annotated[int, Field(ge=0, lt=_MOST_NUMBER)]
Expression = Annotated[str, Field(min_length=1, max_length=16384)]
Choice = Annotated[list[str], Field(min_length=1, max_length=1024)]
Body = TypeVar("Body", bound=BaseModel)
# What vLLM's clients called structured_outputs before -> as guided_grammar says it.
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class LooseBody(BaseModel):
    """A part of a conversation that clients send back. What else they say of it is not used."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(LooseBody):
    """A part of a content that is a text."""

    text: str


def plain_text(content: str | Sequence[TextPart] | None) -> str:
    """A content as one text, its parts as lines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class StreamOptions(StrictBody):
    """include_usage: a last event with the usage; continuous_usage_stats: one in each event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(StrictBody):
    """Of `response_format`. name, description and strict say nothing that is not in the schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictBody):
    """What the text has to be: free, any JSON object, or one that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema")
        return self


class StructuredOutputs(StrictBody):
    """What the text has to be, as vLLM's clients say it: one of these."""

    json_schema: dict[str, Any] | Json[dict[str, Any]] | None = Field(None, alias="json")
    regex: Expression | None = None
    choice: Choice | None = None
    grammar: Expression | None = None
    json_object: Literal[True] | None = None

    @property
    def wanted(self) -> dict[str, Any]:
        """As guided_grammar says it."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self.wanted) != 1:
            raise ValueError("it has one of json, regex, choice, grammar and json_object")
        return self


class ClientNotes(StrictBody):
    """What clients tell OpenAI about themselves: it is taken, and not used."""

    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    store: Literal[False] = False
    metadata: dict[str, str] = {}


class SamplingBody(ClientNotes):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, lt=_MOST_NUMBER)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_MOST_NUMBER)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] = []
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=_MOST_NUMBER)
    n: int = Field(1, ge=1, le=MOST_ROWS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Expression | None = None
    guided_choice: Choice | None = None
    guided_grammar: Expression | None = None
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-32, le=32)
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: float | None = Field(None, gt=0, le=86400)
    return_tokens_as_token_ids: bool = False
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    num_speculative_tokens: int = Field(0, ge=0, le=MOST_SPECULATIVE_TOKENS)

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str]) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if len(stops) > 64 or any(not stop or len(stop) > 1024 for stop in stops):
            raise ValueError("at most 64 texts of 1 to 1024 characters")
        return stops

    @property
    def grammars(self) -> dict[str, dict[str, Any]]:
        """Parameter -> what the text has to be; one at most can be followed."""
        said = {name: (kind, getattr(self, name)) for name, kind in _GUIDED.items()}
        found = {name: {kind: value} for name, (kind, value) in said.items() if value is not None}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.wanted
        form = self.response_format
        if form is not None and form.json_schema is not None:
            found["response_format"] = {"json_schema": form.json_schema.json_schema}
        elif form is not None and form.type == "json_object":
            found["response_format"] = {"json_object": True}
        return found

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [key for key in value if not key.isdecimal() or int(key) >= _MOST_NUMBER]:
            raise ValueError(f"keys are token ids; got {wrong[:3]}")
        return value


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: list[Prompt]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOG_PROBS)
    best_of: int | None = Field(None, ge=1, le=MOST_ROWS)
    add_special_tokens: bool = True
    source_language: str | None = Field(None, min_length=1, max_length=64)
    target_language: str | None = Field(None, min_length=1, max_length=64)

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        if isinstance(value, str) or _are_ids(value):
            value = [value]
        right = isinstance(value, list) and (
            all(isinstance(each, str) for each in value) or all(_are_ids(each) for each in value)
        )
        if not right or not value:
            raise ValueError("a text, a list of texts, token ids, or a list of lists of token ids")
        return value  # type: ignore[no-any-return]


# How much a model should think. Templates that know `enable_thinking` alone understand `none`.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ContentPart(StrictBody):
    """A part of a message. Only texts are understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat; what else it holds (tool_calls, name, ...) is the template's."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _known_parts(cls, value: Any) -> Any:
        if isinstance(value, list):
            kinds = [part.get("type") if isinstance(part, dict) else part for part in value]
            if wrong := [str(kind) for kind in kinds if kind != "text"]:
                raise ValueError(f"this model takes text parts alone; got {wrong[0][:64]!r}")
        return value


class ChatPrompt(StrictBody):
    """How messages become a prompt."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False
    reasoning_effort: Effort | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """What the template is told besides the messages."""
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
            found["enable_thinking"] = self.reasoning_effort != "none"
        return {**found, **self.chat_template_kwargs}

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in value or ():
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict):
                raise ValueError('each is {"type": "function", "function": {...}}')
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise ValueError("each function has a name")
            if not isinstance(function.get("parameters") or {}, dict):
                raise ValueError("the parameters of a function are a JSON schema")
        return value


class NamedFunction(StrictBody):
    name: str


class NamedTool(StrictBody):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody, ChatPrompt):
    """POST /v1/chat/completions"""

    max_completion_tokens: int | None = Field(None, ge=0, lt=_MOST_NUMBER)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOG_PROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @property
    def grammars(self) -> dict[str, dict[str, Any]]:
        found, tools = super().grammars, self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            schema = schema_of_one(tools, self.tool_choice.function.name)
            found["tool_choice"] = {"json_schema": schema}
        elif self.tool_choice == "required":
            schema = schema_of_any(tools, several=self.parallel_tool_calls)
            found["tool_choice"] = {"json_schema": schema}
        return found


class TokenizeBody(StrictBody):
    """POST /tokenize with a text"""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatPrompt):
    """POST /tokenize with messages"""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(StrictBody):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return values


def validated(kind: type[Body], values: dict[str, Any]) -> Body:
    """`values` as a request; None: it was not given.

    Raises ApiError that names the first parameter that is wrong.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise _refusal(kind, error) from error


def _refusal(kind: type[BaseModel], error: pydantic.ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    problems: list[str] = []
    for each in found[:_SHOWN_PROBLEMS]:
        name = ".".join(str(part)[:64] for part in each["loc"]) or "body"
        if each["type"] == "extra_forbidden":
            top = sorted(kind.model_fields) if len(each["loc"]) == 1 else ()
            choices = f"; choices: {', '.join(top)}" if top else ""
            problems.append(f"{name} is unknown or not supported{choices}")
        else:
            problems.append(f"{name}: {each['msg']}")
    first = found[0]
    unknown = first["type"] == "extra_forbidden"
    return bad_request(
        "; ".join(problems),
        param=str(first["loc"][0])[:64] if first["loc"] else None,
        code="unsupported_parameter" if unknown else "invalid_value",
    )


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and 0 <= each < _MOST_NUMBER for each in value)
    )
