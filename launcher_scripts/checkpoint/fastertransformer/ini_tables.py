"""The keys of config.ini, family by family, in their order.

GPT and T5 begin with the keys that FasterTransformer's NeMo converters write and go on with those
that its runtime reads and they forget; BART and Agm have the keys of the forks that serve them.
Defaults are the runtime's. docs/checkpoint-format.md lists all keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.ini_keys import (
    IniFormat,
    IniKeys,
    Key,
    Sections,
)
from launcher_scripts.models.adapters import NORM_POSITIONS, Adapters, PromptTask
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.gpt import NORM_PLACEMENTS, GPTConfig
from launcher_scripts.models.t5 import T5Config

# FasterTransformer's number for prompt tables of p-tuning and prompt tuning.
PROMPT_LEARNING_TYPE = 3
# (activation, gated) -> FasterTransformer's name; its Gelu is the tanh form.
_GPT_ACTIVATIONS = {
    ("gelu", False): "Gelu",
    ("relu", False): "Relu",
    ("silu", False): "Silu",
    ("gelu", True): "GeGLU",
    ("relu", True): "ReGLU",
    ("silu", True): "SiGLU",
}
_T5_POSITIONS = "relative_attention_num_buckets_or_max_pos_seq_len"
# Hugging Face's names of activations, which the forks read; their gelu is the tanh form.
_ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu", "relu": "relu", "silu": "silu"}


def _where(adapters: str, text: str) -> Any:
    """Return the value for a model whose Adapters have a field: `text`, with the Adapters filled
    in."""
    return lambda config: text.format(config.parts) if getattr(config.parts, adapters) else None


def _lora_text(field: str) -> Any:
    """A list of what a model with LoRA adapters says."""
    return lambda config: ",".join(getattr(config.parts, field)) or None


def _lora_fields(keys: IniKeys) -> dict[str, Any]:
    """The fields of Adapters about LoRA."""
    lists = {"lora_names": "lora_adapters", "lora_targets": "lora_targets"}
    result = {field: keys.values.get(key, "").split(",") for field, key in lists.items()}
    return {
        "lora_rank": keys.number("lora_rank", 0),
        **{field: tuple(filter(None, names)) for field, names in result.items()},
    }


# Prompts of the original's runtime that are not computed here.
_PROMPT_LEARNING_TYPES = {1: "soft prompts", 2: "prefix prompts"}
# Of the stack that prompts are given to.
_PROMPTS = (
    Key("num_tasks", text=lambda config: str(len(config.parts.prompt_tasks) or "") or None),
    Key("prompt_learning_start_id", text=_where("prompt_tasks", "{0.prompt_start_id}")),
    Key("prompt_learning_type", text=_where("prompt_tasks", str(PROMPT_LEARNING_TYPE))),
)
# Of every stack.
_ADAPTERS = (
    Key("has_adapter", text=_where("adapter_size", "True")),
    Key("adapter_inter_size", text=_where("adapter_size", "{0.adapter_size}")),
    Key("adapter_norm_position", text=_where("adapter_size", "{0.adapter_norm_position}")),
)
_IA3 = (
    Key("ia3_num_tasks", text=_where("ia3_num_tasks", "{0.ia3_num_tasks}")),
    Key("ia3_adapted", text=_where("ia3_adapted", "True")),
)
# Of a GPT; lists have commas between them.
_LORA = (
    Key("lora_adapters", text=_lora_text("lora_names")),
    Key("lora_rank", text=_where("lora_rank", "{0.lora_rank}")),
    Key("lora_targets", text=_lora_text("lora_targets")),
)


def task_sections(parts: Adapters) -> dict[str, dict[str, str]]:
    """[task_0], [task_1], ... for the prompt tables."""
    return {
        f"task_{number}": {"task_name": task.name, "prompt_length": str(task.length)}
        for number, task in enumerate(parts.prompt_tasks)
    }


def _parts(sections: Sections, stack: IniKeys, structure: IniKeys) -> Adapters:
    """The adapters: prompts and bottlenecks as `stack` says, IA3 as `structure` does."""
    values: dict[str, Any] = {}
    kind = stack.number("prompt_learning_type", 0)
    if kind not in (0, PROMPT_LEARNING_TYPE):
        stack.problems.add(
            "prompt_learning_type is not supported",
            got=f"{kind} ({_PROMPT_LEARNING_TYPES.get(kind, 'unknown')})",
            choices=("0 (no prompts)", f"{PROMPT_LEARNING_TYPE} (p-tuning, prompt tuning)"),
        )
    count = stack.number("num_tasks", 0)
    if count > len(sections):
        stack.problems.add("num_tasks is more than there are sections", got=count)
        count = 0
    if count:
        tasks = [sections.get(f"task_{number}") for number in range(count)]
        for number, task in enumerate(tasks):
            if task is None:
                stack.problems.add(f"section [task_{number}] is missing")
        values["prompt_tasks"] = tuple(
            PromptTask(task.values.get("task_name", ""), task.number("prompt_length", None))
            for task in tasks
            if task is not None
        )
    if count or "prompt_learning_start_id" in stack.values:
        default = stack.number("vocab_size", 0) + 1
        values["prompt_start_id"] = stack.number("prompt_learning_start_id", default)
    if stack.boolean("has_adapter", False):
        values |= {
            "adapter_size": stack.number("adapter_inter_size", None),
            "adapter_norm_position": stack.text("adapter_norm_position", "pre", NORM_POSITIONS),
        }
    values["ia3_num_tasks"] = structure.number("ia3_num_tasks", 0)
    values["ia3_adapted"] = structure.boolean("ia3_adapted", False)
    return Adapters(**values, **_lora_fields(structure))


_GPT = (
    Key("model_name"),
    Key("tensor_para_size"),
    Key("head_num", "num_heads"),
    Key("size_per_head", "head_size"),
    Key("inter_size", "ffn_size"),
    Key("num_layer", "num_layers"),
    Key("max_pos_seq_len", "max_positions", 2048),
    Key("weight_data_type"),
    Key("vocab_size", "vocab_size"),
    Key("start_id", "start_id", 50256),
    Key("end_id", "end_id", 50256),
    Key("layernorm_eps", "norm_eps", 1e-6),
    Key(
        "layernorm_type",
        "norm_placement",
        "pre",
        {placement: f"{placement}_layernorm" for placement in NORM_PLACEMENTS},
    ),
    Key(
        "activation_type",
        text=lambda config: _GPT_ACTIVATIONS.get(
            (config.activation.removesuffix("_erf"), config.gated), config.activation
        ),
    ),
    Key("has_positional_encoding", text=lambda config: str(config.position_embedding == "learned")),
    Key("has_pre_decoder_layernorm", "embedding_norm", False),
    Key("has_post_decoder_layernorm", "final_norm", True),
    Key("use_attention_linear_bias", text=lambda config: str(config.position_embedding == "alibi")),
    *_PROMPTS,
    *_IA3,
    *_ADAPTERS,
    *_LORA,
)


def _gpt_fields(values: Mapping[str, Any], sections: Sections, folder: Path) -> dict[str, Any]:
    """The original's file does not say at all whether the output layer is a separate one."""
    keys = sections["gpt"]
    activation = keys.values.get("activation_type", "Gelu").lower()
    activations = {name.lower(): pair for pair, name in _GPT_ACTIVATIONS.items()}
    name, gated = activations.get(activation, (activation, False))
    learned = keys.boolean("has_positional_encoding", True)
    alibi = keys.boolean("use_attention_linear_bias", False)
    variant = keys.values.get("model_variant", "")
    if variant.endswith("-post") and values["norm_placement"] == "pre":
        keys.problems.add("residuals taken after the norm are not supported", got=variant)
    if keys.boolean("has_adapters", False):
        keys.problems.add("adapter layers are not supported", got="has_adapters = True")
    structure = sections["structure"]
    if structure.boolean("gpt_with_moe", False) or structure.number("expert_num", 0):
        structure.problems.add(
            "[structure]: experts of FasterTransformer's layout are not supported",
            got=structure.values.get("expert_num"),
        )
    return {
        "hidden_size": values["num_heads"] * values["head_size"],
        "num_kv_heads": values["num_heads"],
        "activation": name,
        "gated": gated,
        "position_embedding": "alibi" if alibi else "learned" if learned else "none",
        "tied_embeddings": not (folder / "model.lm_head.weight.bin").exists(),
        "parts": _parts(sections, keys, keys),
    }


def _t5_activation(config: T5Config) -> str:
    name = config.activation.removesuffix("_erf")
    return f"gated-{name}" if config.gated else name


def _t5_pad_id(keys: IniKeys) -> int | None:
    """pad_id as the NeMo converter calls it, pad_token_id as Hugging Face does."""
    for key in ("pad_id", "pad_token_id"):
        if keys.values.get(key, "None") != "None":
            return keys.number(key, None)
    return None


_T5_HEAD = (
    Key("_name_or_path"),
    Key("model_type", text="T5"),
    Key("weight_data_type"),
    Key("tensor_para_size"),
    Key("vocab_size", "vocab_size"),
)
_T5_SIZES = (
    Key("feed_forward_proj", text=_t5_activation),
    Key("d_ff", "ffn_size"),
    Key("d_model", "hidden_size"),
    Key("d_kv", "head_size"),
    Key(
        _T5_POSITIONS,
        text=lambda config: str(
            config.num_buckets if config.position_embedding == "relative" else config.max_positions
        ),
    ),
    Key("num_heads", "num_heads"),
)
_T5_IDS = (
    Key("decoder_start_token_id", "start_id", 0),
    Key("eos_token_id", "end_id", 1),
    Key("pad_id", "pad_id", read=_t5_pad_id),
)
_T5_DECODER = (
    *_T5_HEAD,
    *_T5_IDS,
    *_T5_SIZES,
    Key("num_layers", "num_decoder_layers"),
    Key("tie_word_embeddings", text=lambda config: str(config.logits_scale != 1.0)),
    *_ADAPTERS,
)
_T5 = {
    "encoder": (
        *_T5_HEAD,
        *_T5_SIZES,
        Key("num_layers", "num_layers"),
        *_ADAPTERS,
        *_PROMPTS,
        *(dataclasses.replace(key, encoder_only=True) for key in _T5_IDS),
    ),
    "decoder": tuple(dataclasses.replace(key, encoder_only=False) for key in _T5_DECODER),
    "structure": (
        Key("t5_with_bias", text=lambda config: str(config.bias)),
        Key(
            "position_embedding_type",
            "position_embedding",
            "relative",
            {"relative": "relative", "learned": "absolute", "rope": "rotary"},
        ),
        Key("use_gated_activation", "gated", False),
        *_IA3,
    ),
}


def _t5_fields(values: Mapping[str, Any], sections: Sections, folder: Path) -> dict[str, Any]:
    """t5_with_bias stands for layer norms, biases, scaled attention and a logits bias together."""
    encoder, decoder, structure = (sections[name] for name in ("encoder", "decoder", "structure"))
    relative = values["position_embedding"] == "relative"
    activation = encoder.values.get("feed_forward_proj", "relu")
    activation = {"geglu": "gated-gelu", "reglu": "gated-relu"}.get(activation, activation)
    bias = structure.boolean("t5_with_bias", False)
    scaled = not bias and decoder.boolean("tie_word_embeddings", True)
    encoder_only = not decoder.values
    return {
        **({"num_decoder_layers": 0} if encoder_only else {}),
        "num_buckets" if relative else "max_positions": encoder.number(_T5_POSITIONS, 32),
        "activation": activation.removeprefix("gated-"),
        "normalization": "layernorm" if bias else "rmsnorm",
        "bias": bias,
        "logits_bias": bias and not encoder_only,
        "attention_scale": values["head_size"] ** -0.5 if bias else 1.0,
        "logits_scale": values["hidden_size"] ** -0.5 if scaled else 1.0,
        "tied_embeddings": not (folder / "lm_head.weight.bin").exists(),
        "encoder_only": encoder_only,
        "parts": _parts(sections, encoder, structure),
    }


_BART_COMMON = (
    Key("vocab_size", "vocab_size"),
    Key("d_model", "hidden_size"),
    Key("_name_or_path"),
    Key("model_type", text=lambda config: "mbart" if config.norm_placement == "pre" else "bart"),
    Key("weight_data_type"),
    Key("tensor_para_size"),
)
_ACTIVATION = Key("activation_function", text=lambda config: _ACTIVATIONS[config.activation])
_BART = {
    "encoder": (
        Key("encoder_layers", "num_layers"),
        Key("encoder_ffn_dim", "ffn_size"),
        Key("encoder_attention_heads", "num_heads"),
        *_BART_COMMON,
    ),
    "decoder": (
        Key("decoder_layers", "num_decoder_layers"),
        Key("decoder_ffn_dim", "decoder_ffn_size"),
        Key("decoder_attention_heads", "num_decoder_heads"),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("pad_token_id", "pad_id", 1),
        Key("eos_token_id", "end_id", 2),
        Key("decoder_start_token_id", "start_id", 2),
        *_BART_COMMON,
    ),
    "structure": (
        Key("bart_with_bias", text="true"),
        Key(
            "mbart",
            "norm_placement",
            names={"pre": "true", "post": "false"},
            read=lambda keys: "pre" if keys.boolean("mbart", False) else "post",
        ),
        _ACTIVATION,
        Key("position_embedding_type", text="absolute"),
    ),
}


def _bart_fields(values: Mapping[str, Any], sections: Sections, folder: Path) -> dict[str, Any]:
    positions = folder / "encoder.embed_positions.weight.bin"
    size = 2 if sections["encoder"].values.get("weight_data_type") in ("fp16", "bf16") else 4
    row = values["hidden_size"] * size
    return {
        "max_positions": positions.stat().st_size // row if positions.is_file() else 1024,
        "activation": sections["structure"].named("activation_function", "gelu_erf", _ACTIVATIONS),
        "logits_bias": (folder / "final_logits_bias.bin").exists(),
    }


_AGM = {
    "decoder": (
        Key("vocab_size", "vocab_size"),
        Key("d_model", "hidden_size"),
        Key("decoder_ffn_dim", "ffn_size"),
        Key("decoder_layers", "num_layers"),
        Key("decoder_attention_heads", "num_heads"),
        _ACTIVATION,
        Key("relative_attention_num_buckets", "num_buckets", 32),
        Key("relative_attention_max_distance", "max_distance", 128),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("decoder_start_token_id", "start_id", 2),
        Key("eos_token_id", "end_id", 2),
        Key("_name_or_path"),
        Key("weight_data_type"),
        Key("tensor_para_size"),
    ),
    "structure": (
        Key("agm_with_bias", text="true"),
        _ACTIVATION,
        Key("position_embedding_type", text="relative"),
        Key("scale_attention", text=lambda config: str(config.attention_scale != 1.0)),
        Key("mup_scale", text=lambda config: str(config.attention_scale == 8 / config.head_size)),
        Key("pad_embedding", text="False"),
    ),
}


def _agm_fields(values: Mapping[str, Any], sections: Sections, folder: Path) -> dict[str, Any]:
    structure, scale = sections["structure"], 1.0
    if structure.boolean("scale_attention", False):
        head_size = values["hidden_size"] // values["num_heads"]
        scale = 8 / head_size if structure.boolean("mup_scale", False) else head_size**-0.5
    return {
        "attention_scale": scale,
        "activation": structure.named("activation_function", "gelu_erf", _ACTIVATIONS),
        "logits_bias": (folder / "final_logits_bias.bin").exists(),
        "pad_id": None,
    }


FORMATS = {
    "gpt": IniFormat(GPTConfig, "gpt", ("gpt", None), {"gpt": _GPT}, _gpt_fields),
    "t5": IniFormat(T5Config, "encoder", ("structure", "t5_with_bias"), _T5, _t5_fields),
    "bart": IniFormat(BartConfig, "encoder", ("structure", "bart_with_bias"), _BART, _bart_fields),
    "agm": IniFormat(AgmConfig, "decoder", ("structure", "agm_with_bias"), _AGM, _agm_fields),
}
