"""The requests' bodies: what may be asked for, and in which range.

Names and meanings are OpenAI's, and vLLM's where OpenAI has none. A parameter that is neither here
nor in parameters.py is rejected by its name; null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, field_validator, model_validator

from launcher_scripts.contract.requests import DRAIN_SECONDS, ExchangeMode
from launcher_scripts.contract.tensors import MAX_LOG_PROBS, MAX_SPECULATIVE_TOKENS
from launcher_scripts.gateway import parameters
from launcher_scripts.gateway.parameters import LooseBody, StrictBody
from launcher_scripts.gateway.tool_calls import schema_of_any, schema_of_one

MAX_ROWS = 128
# Types of parts that are texts -> the key of the text.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MAX_NUMBER = 1 << 31

Prompt = str | list[int]
TokenId = Annotated[int, Field(ge=0, lt=_MAX_NUMBER)]
Expression = Annotated[str, Field(min_length=1, max_length=16384)]
Choice = Annotated[list[str], Field(min_length=1, max_length=1024)]
# What vLLM's clients called structured_outputs before -> as guided_grammar says it.
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class TextPart(LooseBody):
    """A part of a content that is a text."""

    text: str


def text_parts(value: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """Return a content whose refusals, and texts under another interface's name, are texts.

    Raises ValueError for parts of other types, which clients send to models that read images.
    """
    if not isinstance(value, list):
        return value
    parts = [text_part(part, kinds) for part in value]
    types = [part.get("type", "?") if isinstance(part, dict) else part for part in parts]
    if wrong := [str(item)[:64] for item in types if item not in kinds]:
        raise ValueError(f"this model reads text only; got a part of type {wrong[0]!r}")
    return parts


def text_part(part: Any, kinds: Sequence[str]) -> Any:
    """Return a part that is a text as one of `kinds`; null is an empty text."""
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None or key not in part:
        return part
    text = "" if part[key] is None else part[key]
    return {**part, "type": kind if kind in kinds else kinds[0], "text": text}


def plain_text(content: str | Sequence[TextPart] | None) -> str:
    """A content as one text, its parts as lines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def check_stops(stops: list[str]) -> list[str]:
    """Return the texts that end an answer. Raises ValueError for too many, and for long ones."""
    if len(stops) > 64 or any(not stop or len(stop) > 1024 for stop in stops):
        raise ValueError("at most 64 texts of 1 to 1024 characters")
    return stops


class StreamOptions(StrictBody):
    """include_usage: a last event with the usage; continuous_usage_stats: one in each event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(StrictBody):
    """The schema of `response_format`. name, description and strict say nothing that is not in the
    schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(StrictBody):
    """The required form of the text: free, any JSON object, or one that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema")
        return self


class StructuredOutputs(StrictBody):
    """The required form of the text, as vLLM's clients specify it: one of these."""

    json_schema: dict[str, Any] | Json[dict[str, Any]] | None = Field(None, alias="json")
    regex: Expression | None = None
    choice: Choice | None = None
    grammar: Expression | None = None
    json_object: Literal[True] | None = None

    @property
    def requested(self) -> dict[str, Any]:
        """As guided_grammar says it."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self.requested) != 1:
            raise ValueError("it has one of json, regex, choice, grammar and json_object")
        return self


class SamplingBody(StrictBody):
    """Parameters that completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, lt=_MAX_NUMBER)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_MAX_NUMBER)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] = Field([])
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=_MAX_NUMBER)
    n: int = Field(1, ge=1, le=MAX_ROWS)
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
    num_speculative_tokens: int = Field(0, ge=0, le=MAX_SPECULATIVE_TOKENS)

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str]) -> list[str]:
        return check_stops([value] if isinstance(value, str) else value)

    @property
    def grammars(self) -> dict[str, dict[str, Any]]:
        """Parameter -> what the text has to be; one at most can be followed."""
        grammars = {name: (kind, getattr(self, name)) for name, kind in _GUIDED.items()}
        result = {
            name: {kind: value} for name, (kind, value) in grammars.items() if value is not None
        }
        if self.structured_outputs is not None:
            result["structured_outputs"] = self.structured_outputs.requested
        form = self.response_format
        if form is not None and form.json_schema is not None:
            result["response_format"] = {"json_schema": form.json_schema.json_schema}
        elif form is not None and form.type == "json_object":
            result["response_format"] = {"json_object": True}
        return result

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [key for key in value if not _is_token_id(key)]:
            raise ValueError(f"keys are token ids; got {wrong[:3]}")
        return value


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    unused = parameters.COMPLETION
    prompt: list[Prompt]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOG_PROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_ROWS)
    add_special_tokens: bool = True
    source_language: str | None = Field(None, min_length=1, max_length=64)
    target_language: str | None = Field(None, min_length=1, max_length=64)

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        return _prompts(value)


# How much a model should think. Templates that know `enable_thinking` alone understand `none`.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_EFFORTS: dict[str, str] = {"max": "xhigh"}  # for templates
# Variables of templates that parameters of the request set.
_OF_TEMPLATES = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))


class ContentPart(TextPart):
    """A part of a message. Only texts are understood."""

    type: Literal["text"]


class ChatMessage(BaseModel):
    """A message of a chat; what else it holds (tool_calls, name, ...) is the template's."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts(cls, value: Any) -> Any:
        return text_parts(value)


class ChatPrompt(StrictBody):
    """Conversion of messages to a prompt."""

    tool_types = ("function",)
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})
    add_special_tokens: bool = False
    reasoning_effort: Effort | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Return the template's variables besides the messages."""
        values: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            values["reasoning_effort"] = _EFFORTS.get(self.reasoning_effort, self.reasoning_effort)
            values["enable_thinking"] = self.reasoning_effort != "none"
        return {**values, **self.chat_template_kwargs}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        if wrong := sorted(value.keys() & _OF_TEMPLATES):
            raise ValueError(f"{wrong[0]} is a parameter of the request itself")
        return value

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in value or ():
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                raise ValueError('each is {"type": "function", "function": {...}}')
            check_function(tool["function"])
        return value


def check_function(function: Mapping[str, Any]) -> None:
    """Raises ValueError for a tool without a name or a schema."""
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("each function has a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValueError("the parameters of a function are a JSON schema")


class NamedFunction(StrictBody):
    name: str


class NamedTool(StrictBody):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(LooseBody):
    """The tools that may be called, of those that the model is told."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]]


class ChatBody(SamplingBody, ChatPrompt):
    """POST /v1/chat/completions"""

    unused = parameters.CHAT
    max_completion_tokens: int | None = Field(None, ge=0, lt=_MAX_NUMBER)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOG_PROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def _allowed_tools(cls, values: Any) -> Any:
        """Leave the tools that tool_choice allows."""
        choice = values.get("tool_choice") if isinstance(values, dict) else None
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return values
        allowed = AllowedTools.model_validate(choice.get("allowed_tools"))
        names = {str((tool.get("function") or {}).get("name")) for tool in allowed.tools}
        tools = [tool for tool in values.get("tools") or () if _name(tool) in names]
        mode = allowed.mode if tools or allowed.mode == "required" else "none"
        return {**values, "tools": tools, "tool_choice": mode}

    @property
    def grammars(self) -> dict[str, dict[str, Any]]:
        """A call that must be made takes the place of another form; one that may be, adds to it."""
        forms, tools = super().grammars, self.tools or []
        if len(forms) > 1 or not tools or self.tool_choice == "none":
            return forms
        if isinstance(self.tool_choice, NamedTool):
            schema = schema_of_one(tools, self.tool_choice.function.name)
            return {"tool_choice": {"json_schema": schema}}
        calls = {"json_schema": schema_of_any(tools, several=self.parallel_tool_calls)}
        if self.tool_choice == "required":
            return {"tool_choice": calls}
        return {parameter: {"any_of": [form, calls]} for parameter, form in forms.items()}

    @property
    def calls_are_lists(self) -> bool:
        """True if a grammar requires that calls are a JSON list, so that an object is content."""
        return bool(super().grammars)


class EmbeddingsBody(StrictBody):
    """POST /v1/embeddings. normalize: vectors have the length 1"""

    unused = parameters.EMBEDDINGS
    model: str | None = None
    input: list[Prompt]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, lt=_MAX_NUMBER)
    normalize: bool = False
    add_special_tokens: bool = True

    @field_validator("input", mode="before")
    @classmethod
    def _inputs(cls, value: Any) -> list[Prompt]:
        return _prompts(value)


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


def _is_token_id(key: str) -> bool:
    """Return whether a key is the usual decimal form of a token id, of which there is one."""
    digits = key.isascii() and key.isdecimal() and len(key) <= len(str(_MAX_NUMBER))
    return digits and str(int(key)) == key and int(key) < _MAX_NUMBER


def _name(tool: Any) -> str | None:
    """Return the name of a tool that is a function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return str(function.get("name")) if isinstance(function, dict) else None


def _prompts(value: Any) -> list[Prompt]:
    """Return one or several texts, or lists of token ids, as a list. Raises ValueError."""
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    right = isinstance(value, list) and (
        all(isinstance(item, str) for item in value) or all(_are_ids(item) for item in value)
    )
    if not right or not value:
        raise ValueError("a text, a list of texts, token ids, or a list of lists of token ids")
    return value  # type: ignore[no-any-return]


class WeightsBody(StrictBody):
    """The request: the weights of this export come in place of the present ones.

    checkpoint: as the servers' nodes see it: a model repository, or the folder of its shards
    drain_timeout: seconds in which requests that have begun may end
    """

    checkpoint: str
    model: str | None = None
    mode: ExchangeMode = "drain"
    drain_timeout: float = Field(default=DRAIN_SECONDS, ge=0, le=3600)


class ModelBody(StrictBody):
    """The request: something is done to the servers of a model; without a name, of the only one."""

    model: str | None = None


class RefitBody(ModelBody):
    """The request: the weights of a transformers folder come in place of the present ones.

    folder:  as the servers' nodes see it
    version: the trainer's name of them, which answers then have as weights_version
    probe:   the logits are compared with the CPU's before the weights are served
    """

    folder: str
    version: str = Field(default="", max_length=200)
    mode: ExchangeMode = "mixed"
    drain_timeout: float = Field(default=DRAIN_SECONDS, ge=0, le=3600)
    probe: bool = False


class UnloadLoRABody(StrictBody):
    """The request: no further row gets an adapter that was added."""

    lora_name: str
    model: str | None = None


class LoadLoRABody(UnloadLoRABody):
    """The request: an adapter comes to the running servers of a model.

    lora_path: as the servers' nodes see it
    """

    lora_path: str


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item < _MAX_NUMBER for item in value)
    )
