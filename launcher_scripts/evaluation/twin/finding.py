"""What makes a served model another one than its original, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOST_BOS = "lost_bos"
ADDED_BOS = "added_bos"
TOKENIZER = "tokenizer"
CHAT_TEMPLATE = "chat_template"
ROPE_SCALING = "rope_scaling"
SCALED_LOGITS = "scaled_logits"
SWAPPED_SHARD = "swapped_shard"
OTHER = "other"


@dataclass(frozen=True)
class Finding:
    """One difference that rounding does not explain.

    name:     one of the above
    text:     what it is and what to do, in sentences
    evidence: the figures and examples behind it, as plain values
    """

    name: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
