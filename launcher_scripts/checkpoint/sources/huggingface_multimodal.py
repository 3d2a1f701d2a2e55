"""The decoder within a Hugging Face model that reads images, too: its config.json and its tensors.

What such a model makes of text alone is what its decoder makes of it, so that is what is exported.
Neither numpy nor torch is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Multimodal:
    """A row of MULTIMODAL.

    text:     the decoder's model type; None: text_config names it
    defaults: of its keys that the published files leave out
    """

    text: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


MULTIMODAL = {
    "gemma3": Multimodal(
        "gemma3_text",
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
        },
    ),
    "internvl": Multimodal(),
    "mistral3": Multimodal(),
    "qwen2_vl": Multimodal("qwen2"),
    "qwen2_5_vl": Multimodal("qwen2"),
    "qwen3_vl": Multimodal("qwen3"),
}
# Keys of the whole model that rule over those of its text_config.
_SHARED_KEYS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("quantization_config", "transformers_version"),
)
# Keys of a Qwen2-VL's config.json that has no text_config.
_OF_IMAGES = ("vision_config", "vision_token_id")
_ROTARY = ("rope_scaling", "rope_parameters")
# How the names of the decoder's tensors begin, and of those that read images.
_PREFIXES = ("language_model.model.", "language_model.")
_IMAGE_TENSORS = ("vision_tower.", "visual.", "multi_modal_projector.")
NOTE = "the model's tensors for images are left out: it is served for text"


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as that of the decoder alone; unchanged for a model of text."""
    name = raw.get("model_type")
    row = MULTIMODAL.get(name) if isinstance(name, str) else None
    said = raw.get("text_config", raw)
    if row is None or not isinstance(said, Mapping):
        return dict(raw)
    shared = {key: raw[key] for key in _SHARED_KEYS if raw.get(key) is not None}
    own = {key: value for key, value in said.items() if value is not None}
    text = {**row.defaults, **own, **shared, "model_type": row.text or said.get("model_type")}
    for key in _ROTARY:
        if isinstance(text.get(key), Mapping):
            text[key] = _for_text(text[key])
    return {key: value for key, value in text.items() if key not in _OF_IMAGES}


def _for_text(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions in several axes, which are the same for text, as those in one."""
    return {
        key: "default" if value == "mrope" else value
        for key, value in rotary.items()
        if not key.startswith("mrope_")
    }


def text_name(name: str) -> str | None:
    """The name that a model of text gives a tensor; None for one that reads images."""
    if name.startswith(_IMAGE_TENSORS):
        return None
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)
