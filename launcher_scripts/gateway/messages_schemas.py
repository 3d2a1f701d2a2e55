"""The body of /v1/messages: what may be asked for. The words are Anthropic's; see schemas.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from launcher_scripts.gateway.schemas import StrictBody


class _Block(BaseModel):
    """A part of a content. What else a client says of it, such as what to cache, is not used."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(_Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """What the tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator("type"),
]


class Turn(_Block):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class Tool(_Block):
    """A function that the client runs."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(_Block):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ConversationBody(StrictBody):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: dict[str, Any] | None = None  # prompts are shared anyway, or not at all
    context_management: dict[str, Any] | None = None  # a conversation is taken whole


class Metadata(_Block):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class MessagesBody(ConversationBody):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    stop_sequences: list[str] = Field([])
    stream: bool = False
    metadata: Metadata = Metadata()
    service_tier: Literal["auto", "standard_only"] = "auto"
