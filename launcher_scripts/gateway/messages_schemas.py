"""The body of /v1/messages: what may be asked for. The words are Anthropic's; see schemas.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from launcher_scripts.gateway.schemas import LooseBody, StrictBody, TextPart


class TextBlock(TextPart):
    type: Literal["text"]


class ThinkingBlock(LooseBody):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str


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


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(LooseBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content or []


class Tool(LooseBody):
    """A function that the client runs."""

    type: Literal["custom"] = "custom"
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

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: dict[str, Any] | None = None  # prompts are shared anyway, or not at all
    context_management: dict[str, Any] | None = None  # a conversation is taken whole


class Metadata(LooseBody):
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
