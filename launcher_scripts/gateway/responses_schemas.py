"""The body of /v1/responses: what may be asked for. The words are OpenAI's; see schemas.py."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    field_validator,
)

from launcher_scripts.gateway import parameters
from launcher_scripts.gateway.parameters import LooseBody, StrictBody
from launcher_scripts.gateway.schemas import Effort, TextPart, check_function, text_parts


class ItemPart(TextPart):
    """A part of a content. Only texts are understood."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]


_PARTS = ("input_text", "output_text", "text", "reasoning_text")
Content = Annotated[
    str | list[ItemPart] | None, BeforeValidator(lambda value: text_parts(value, _PARTS))
]


class InputMessage(LooseBody):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = None


class ReasoningItem(LooseBody):
    """The reasoning of the model before an answer or a call."""

    type: Literal["reasoning"]
    content: Content = None


class FunctionCall(LooseBody):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(LooseBody):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content = None


def _kind(value: Any) -> str:
    """Messages need not say that they are some."""
    if isinstance(value, dict):
        return str(value.get("type") or "message")
    return str(getattr(value, "type", "message"))


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")],
    Discriminator(_kind),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


# Items about tools that the server runs, as OpenAI's does.
_SERVER_ITEMS = (
    *("file_search_call", "web_search_call", "code_interpreter_call", "image_generation_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("tool_search_call", "tool_search_output", "additional_tools", "program", "program_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
)


def _as_function(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
        return {**item, "type": "function_call", "arguments": arguments}
    if kind == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    return item


class TextFormat(StrictBody):
    """The required form of the text: as `response_format` of a chat, one level flatter."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(StrictBody):
    format: TextFormat = TextFormat()

    @property
    def response_format(self) -> dict[str, Any] | None:
        """As a chat says it; None for any text."""
        if self.format.type == "text":
            return None
        if self.format.json_schema is None:
            return {"type": self.format.type}
        schema = self.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.format.type, "json_schema": schema}


class FunctionChoice(StrictBody):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedChoice(StrictBody):
    """The tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]]


class ReasoningOptions(StrictBody):
    """summary: what is thought is shown whole, whichever is asked for."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


Include = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesBody(StrictBody):
    """POST /v1/responses. include: of these, the server has none;  store: None: if it can be"""

    unused = parameters.RESPONSES
    item_types = _SERVER_ITEMS
    tool_types = ("function",)
    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    text: TextOptions = TextOptions()
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    stream: bool = False
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[Include] = Field([])
    metadata: dict[str, str] = Field({})
    user: str | None = Field(None, max_length=512)

    @field_validator("input", mode="before")
    @classmethod
    def _client_calls(cls, value: Any) -> Any:
        """Custom tools take a text. Their calls are those of functions with one argument."""
        return list(map(_as_function, value)) if isinstance(value, list) else value

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for tool in value:
            if tool.get("type") != "function":
                raise ValueError('each is {"type": "function", "name": ..., "parameters": {...}}')
            check_function(tool)
        return value
