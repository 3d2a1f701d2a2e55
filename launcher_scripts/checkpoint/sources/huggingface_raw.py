"""The values of a Hugging Face config.json, each with the type it must have; which may go unread.

A key that a function of huggingface_configs has asked for is read. One of IRRELEVANT changes
nothing about the logits of token ids. Any other that has a value could change the model, so the
export is refused by its name.

The decoder within a Hugging Face model that reads images, too: its config.json and its tensors.

What such a model makes of text alone is what its decoder makes of it, so that is what is exported.
Neither numpy nor torch is needed here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from launcher_scripts.common.errors import Problems
from launcher_scripts.models.family import XIELU

ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
    "xielu": XIELU,
}
_REQUIRED = object()
MAX_LAYERS = 1 << 16
_Id = TypeVar("_Id", bound="int | None")
# Each says that there may be layers behind the last one, for multi-token prediction.
PREDICTORS = (
    "mtp_transformer_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "use_mtp",
)
# Model types that may have such layers whatever config.json says.
PREDICTING = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Why the keys do not matter -> their names, as patterns.
IRRELEVANT: dict[str, tuple[str, ...]] = {
    "names, versions and tools": (
        "_num_labels",
        "name_or_path",
        "*_version",
        "architectures",
        "author",
        "auto_map",
        "is_llama_config",
        "model_type",
        "output_past",
        "save_step",
        "transformers.js_config",
        "unsloth_fixed",
    ),
    "types and kernels of the training": (
        "*flash_att*",
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "attn_implementation",
        "experts_implementation",
        "bias_dropout_fusion",
        "dtype",
        "ep_size",
        "masked_softmax_fusion",
        "normalize_attention_scores",
        "offset_alibi",
        "pretraining_tp",
        "scale_attention_softmax_in_fp32",
        "reorder_and_upcast_attn",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "slow_but_exact",
        "torch_dtype",
        "torchscript",
        "use_bfloat16",
    ),
    "training": (
        "aux_loss_alpha",
        "seq_aux",
        "*dropout*",
        "*initializer*",
        "*layerdrop",
        "*pdrop",
        "gradient_checkpointing*",
        "init_std",
        "loss_type",
        "neftune_noise_alpha",
        "replacing_rate",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "tf_legacy_loss",
    ),
    "heads and tasks besides the logits": (
        "finetuning_task",
        "id2label",
        "label2id",
        "problem_type",
        "summary_*",
        "task_specific_params",
    ),
    "generation": (
        "*_token_id",
        "*no_repeat_ngram_size",
        "bad_words_ids",
        "cache_implementation",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
    "texts and the form of the answer": (
        "chunk_size_feed_forward",
        "bos_token",
        "eos_token",
        "force_bos_token_to_be_generated",
        "is_decoder",
        "is_encoder_decoder",
        "max_sequence_length",
        "model_max_length",
        "output_*",
        "pad_token",
        "padding_side",
        "prefix",
        "return_dict*",
        "tokenizer_class",
        "truncation_side",
        "unk_token",
        "use_cache",
    ),
    "the tensors say it": ("tie_word_embeddings",),
    "layers that an export leaves out": PREDICTORS,
}
# Keys that every file of transformers 4 has, and that must be off.
OFF = (
    "add_bias_logits",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "do_blenderbot_90_layernorm",
    "pruned_heads",
    "tie_encoder_decoder",
)
# What classes of transformers take for keys that a file does not have; null is another thing there.
_GEMMA = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
_CAPPED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_WINDOW = {"sliding_window": 4096}
_GLM = {"eos_token_id": 151329, "pad_token_id": 151329}
_GATED, _TURNING = {"feed_forward_proj": "gated-gelu"}, {"rotary_dim": 64}
CLASS_DEFAULTS: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("mistral", "ministral", "cohere2", "olmo3", "exaone4", "exaone_moe"), _WINDOW),
    **dict.fromkeys(("gemma", "gemma3n_text", "gemma4_text"), _GEMMA),
    **dict.fromkeys(("gemma2", "vaultgemma"), _GEMMA | _CAPPED | _WINDOW),
    "gemma3_text": _GEMMA | _WINDOW,
    **dict.fromkeys(("glm", "glm4"), _GLM),
    **dict.fromkeys(("mt5", "umt5"), _GATED),
    **dict.fromkeys(("gptj", "codegen"), _TURNING),
    "apertus": {"pad_token_id": 3},
    "cohere": {"rope_theta": 500000.0},
    "cwm": {"sliding_window": 8192},
    "dbrx": {"bos_token_id": 100257, "eos_token_id": 100257},
    "ernie4_5": {"pad_token_id": 0},
    "gpt_oss": {"sliding_window": 128},
    "granite_swa": {"bos_token_id": 100257, "eos_token_id": 100257},
    "kimi_linear": {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839},
    "marian": {"decoder_start_token_id": 58100, "eos_token_id": 0, "pad_token_id": 58100},
    "ministral3": {"rms_norm_eps": 1e-5, "pad_token_id": 11},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "nemotron": {"bos_token_id": 2, "eos_token_id": 3},
    "olmo": {"eos_token_id": 50279, "pad_token_id": 1},
    "pegasus": {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    "phi3": {"rms_norm_eps": 1e-5, "eos_token_id": 32000, "pad_token_id": 32000},
    "starcoder2": {"bos_token_id": 50256, "eos_token_id": 50256},
}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_ADVICE = "config.json: remove the key if it does not change the model"


class RawConfig:
    """config.json with the names of its tensors; wrong and missing keys are reported at once.

    It remembers which keys were asked for: check_keys reports the others.

    notes: what has to be known of the model that is exported
    """

    def __init__(self, raw: Mapping[str, Any], keys: Collection[str], problems: Problems) -> None:
        self.raw = raw
        self.keys = keys
        self.problems = problems
        self.notes: list[str] = []
        self.read_keys: set[str] = set()
        # A tiny model may lack its class's ids of tokens.
        rows = raw.get("vocab_size")
        self._defaults = {
            name: value
            for name, value in CLASS_DEFAULTS.get(str(raw.get("model_type")), {}).items()
            if name not in raw
            and not (name.endswith("_token_id") and type(rows) is int and value >= rows)
        }
        self.sections: dict[str, RawConfig] = {}

    def __call__(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of the first of `names` that is there and not null.

        Names of one thing that say two things are a problem.
        """
        self.read_keys.update(names)
        present = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        values = list(present.values())
        if any(value != values[0] for value in values):
            self.problems.add(f"{' and '.join(present)} differ", got=values)
        if values:
            return values[0]
        default = next((self._defaults[name] for name in names if name in self._defaults), default)
        if default is _REQUIRED:
            self.problems.add(f"{' or '.join(names)} is missing")
            return 1
        return default

    def defaults(self, **values: Any) -> None:
        """Say what these keys mean in this model where the file does not have them.

        That rules over the defaults that a reader asks with, and what is said first rules.
        """
        self._defaults = {**values, **self._defaults}

    def unused(self, *names: str) -> None:
        """Say that these keys change nothing in this model, whatever their values."""
        self.read_keys.update(names)

    def null(self, name: str) -> bool:
        """True for a key that says null, where its default is not null."""
        self.read_keys.add(name)
        return name in self.raw and self.raw[name] is None

    def size(self, *names: str, default: Any = _REQUIRED, minimum: int = 1) -> int:
        """A whole number."""
        result = self(*names, default=default)
        if type(result) is int and result >= minimum:
            return result
        self.problems.add(
            f"{' or '.join(names)} must be a whole number from {minimum} on", got=result
        )
        return 1

    def layers(self, *names: str, default: Any = _REQUIRED) -> int:
        """A number of layers, of which lists may be made."""
        result = self.size(*names, default=default)
        if result <= MAX_LAYERS:
            return result
        self.problems.add(f"{' or '.join(names)} must be at most {MAX_LAYERS}", got=result)
        return 1

    def real(self, name: str, default: float) -> float:
        """A number of at least 0."""
        value = self(name, default=default)
        if type(value) in (int, float) and value >= 0:
            return float(value)
        self.problems.add(f"{name} must be a number from 0 on", got=value)
        return default

    def numbers(self, name: str, count: int) -> list[float]:
        """As many numbers."""
        values = self(name, default=None)
        numbers = values if isinstance(values, list) else []
        if len(numbers) == count and all(type(number) in (int, float) for number in numbers):
            return [float(number) for number in numbers]
        self.problems.add(f"{name} must be a list of {count} numbers", got=values)
        return [1.0] * count

    def flag(self, name: str, default: bool) -> bool:
        result = self(name, default=default)
        if isinstance(result, bool):
            return result
        self.problems.add(f"{name} must be true or false", got=result)
        return default

    def text(self, name: str, default: str) -> str:
        result = self(name, default=default)
        if isinstance(result, str):
            return result
        self.problems.add(f"{name} must be a text", got=result)
        return default

    def section(self, *names: str) -> RawConfig:
        """A mapping in the file; an empty one where it has none."""
        value = self(*names, default={})
        if not isinstance(value, Mapping):
            self.problems.add(f"{' or '.join(names)} must be a mapping", got=value)
            value = {}
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        return self.sections.setdefault(name, RawConfig(value, self.keys, self.problems))

    def token(self, name: str, default: _Id) -> int | _Id:
        """A token id; the first one where a list is allowed. Below 0 there is no such token."""
        default = self._defaults.get(name, default)
        value = self(name, default=default)
        if isinstance(value, list) and value:
            value = value[0]
        if value is not None and type(value) is not int:
            self.problems.add(f"{name} must be a token id", got=value)
            return default
        return default if value is None or value < 0 else value

    def activation(self, name: str, default: Any = _REQUIRED) -> str:
        value = self(name, default=default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.problems.add(f"unknown {name}", got=value, choices=ACTIVATIONS)
            return "gelu"
        return ACTIVATIONS[value]

    def only(self, **values: Any) -> None:
        """Refuse anything but these values, which are also the defaults and the meaning of null."""
        self.read_keys.update(values)
        for name, value in values.items():
            result = self.raw.get(name)
            if result is not None and result != value:
                self.problems.add(f"{name} is not supported", got=result, choices=(value,))

    def head_size(self, hidden: int, heads: int) -> int:
        if hidden % heads and not self.problems.messages:
            self.problems.add(f"the hidden size {hidden} is not a multiple of the heads", got=heads)
        return max(hidden // heads, 1)

    def check_keys(self, prefix: str = "") -> tuple[str, ...]:
        """Note every key that nothing reads as a problem, and say which are switched off.

        prefix: of the names, for a section
        Returns notes for the manifest: keys that nothing knows, whose values say no.
        """
        off = []
        for key, value in self.raw.items():
            if (
                key in self.read_keys
                or value is None
                or irrelevant(key)
                or _is_internal(key, value)
            ):
                continue
            if not _is_off(value):
                self.problems.add(f"{prefix}{key} is not known here", got=value, change=_ADVICE)
            elif key not in OFF:
                off.append(prefix + key)
        notes = [f"config.json: {', '.join(off)} unknown, but switched off"] if off else []
        for name, section in self.sections.items():
            notes += section.check_keys(f"{prefix}{name}.")
        return tuple(notes)


def irrelevant(key: str, table: Mapping[str, tuple[str, ...]] = IRRELEVANT) -> bool:
    """Return whether a row of the table covers the key."""
    return any(fnmatchcase(key, pattern) for keys in table.values() for pattern in keys)


def generation_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation settings of a config.json, under generation_config.json's names."""
    patterns = IRRELEVANT["generation"]
    return {
        key: value
        for key, value in raw.items()
        if value is not None and any(fnmatchcase(key, pattern) for pattern in patterns)
    }


def unknown_keys(raw: Mapping[str, Any], supported: Collection[str]) -> list[str]:
    """The other keys whose values say something, sorted."""
    return [key for key in sorted(raw.keys() - set(supported)) if raw[key] not in _EMPTY]


def _is_internal(key: str, value: Any) -> bool:
    """True for a note of a tool to itself: a name that begins with `_`, and a text or a switch.

    Sizes and lists of such names, and those that a reader asks for, are values of the network.
    """
    return key.startswith("_") and isinstance(value, (str, bool))


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, (str, list, dict)) and not value)


@dataclass(frozen=True)
class Multimodal:
    """A row of MULTIMODAL.

    text:     the decoder's model type; None: text_config names it
    defaults: of its keys that the published files leave out
    """

    text: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


MULTIMODAL = {
    **dict.fromkeys(
        (
            *("aya_vision", "cohere2_vision", "idefics3", "internvl", "lfm2_vl", "lighton_ocr"),
            *("llava", "llava_next", "llava_onevision", "mistral3", "qwen2_audio", "smolvlm"),
            *("t5gemma2", "voxtral"),
        ),
        Multimodal(),
    ),
    "gemma3": Multimodal(
        "gemma3_text",
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 256, "max_position_embeddings": 131072},
    ),
    "gemma3n": Multimodal("gemma3n_text"),
    "gemma4": Multimodal("gemma4_text"),
    "kimi_k25": Multimodal("deepseek_v3"),
    "nemotron_h_omni": Multimodal("nemotron_h"),
    "llama4": Multimodal("llama4_text"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Multimodal("qwen2", {"rope_theta": 1e6})),
    "qwen3_vl": Multimodal("qwen3", {"rope_theta": 500000.0}),
    "qwen3_vl_moe": Multimodal("qwen3_moe", {"norm_topk_prob": True, "rope_theta": 500000.0}),
    "glm4v": Multimodal("glm4"),
    "glm4v_moe": Multimodal("glm4_moe"),
    "qwen3_5": Multimodal("qwen3_5_text"),
    "qwen3_5_moe": Multimodal("qwen3_5_moe_text"),
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
_PREFIXES = (
    *("language_model.model.", "language_model.backbone.", "language_model.", "text_model."),
)
_IMAGE_TENSORS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "mm_projector.", "mlp1.", "sound_"),
    *("image_newline", "vision_encoder.", "vision_projection."),
)
NOTE = "the model's tensors for images and sounds are left out: it is served for text"


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as that of the decoder alone; unchanged for a model of text."""
    name = raw.get("model_type")
    row = MULTIMODAL.get(name) if isinstance(name, str) else None
    section = raw.get("text_config", raw.get("llm_config", raw))
    if row is None or not isinstance(section, Mapping):
        return dict(raw)
    shared = {key: raw[key] for key in _SHARED_KEYS if raw.get(key) is not None}
    overrides = {key: value for key, value in section.items() if value is not None}
    text = {
        **row.defaults,
        **overrides,
        **shared,
        "model_type": row.text or section.get("model_type"),
    }
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
    if name.removeprefix("encoder.").startswith(_IMAGE_TENSORS) or name.endswith(".eoi_embedding"):
        return None
    name = name.replace("encoder.text_model.", "encoder.", 1)
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)
