"""The body of /v1/messages: what may be asked for. The words are Anthropic's; see schemas.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from launcher_scripts.gateway import parameters
from launcher_scripts.gateway.schemas import LooseBody, StrictBody, TextPart, text_parts


class TextBlock(TextPart):
    type: Literal["text"]


class ThinkingBlock(LooseBody):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LooseBody):
    """Encrypted reasoning of another model; the template does not get it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(LooseBody):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(LooseBody):
    """What the tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts(cls, value: Any) -> Any:
        return text_parts(value)


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Turn(LooseBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts(cls, value: Any) -> Any:
        return text_parts(value, _BLOCKS)

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content or []


class Tool(LooseBody):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(LooseBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ConversationBody(StrictBody):
    """POST /v1/messages/count_tokens"""

    unused = parameters.CONVERSATION
    tool_types = ("custom",)
    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()


class MessagesBody(ConversationBody):
    """POST /v1/messages"""

    unused = parameters.MESSAGES
    max_tokens: int = Field(ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    stop_sequences: list[str] = Field([])
    stream: bool = False
