"""Which keys of a Hugging Face config.json may go unread: a table, and the check that uses it.

A key that a function of huggingface_configs has asked for is read. One of IRRELEVANT changes
nothing about the logits of token ids. Any other that has a value could change the model, so the
export is refused by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig

# Each says that there may be layers behind the last one, for multi-token prediction.
PREDICTORS = (
    "mtp_transformer_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "use_mtp",
)
# Why the keys do not matter -> their names, as patterns.
IRRELEVANT: dict[str, tuple[str, ...]] = {
    "names, versions and tools": (
        "_name_or_path",
        "_num_labels",
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
        "attention_softmax_in_fp32",
        "attn_implementation",
        "bias_dropout_fusion",
        "dtype",
        "masked_softmax_fusion",
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
        "*dropout*",
        "*initializer*",
        "*layerdrop",
        "*pdrop",
        "gradient_checkpointing",
        "init_std",
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
        "force_bos_token_to_be_generated",
        "is_decoder",
        "is_encoder_decoder",
        "max_sequence_length",
        "output_*",
        "prefix",
        "return_dict*",
        "tokenizer_class",
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
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_ADVICE = "config.json: remove the key if it does not change the model"


def check_keys(config: RawConfig, prefix: str = "") -> tuple[str, ...]:
    """Note every key that nothing reads as a problem of `config`, and say which are switched off.

    prefix: of the names, for a section
    Returns notes for the manifest: keys that nothing knows, whose values say no.
    """
    off = []
    for key, value in config.raw.items():
        if key in config.asked or value is None or irrelevant(key):
            continue
        if not _is_off(value):
            config.problems.add(f"{prefix}{key} is not known here", got=value, change=_ADVICE)
        elif key not in OFF:
            off.append(prefix + key)
    notes = [f"config.json: {', '.join(off)} unknown, but switched off"] if off else []
    for name, section in config.sections.items():
        notes += check_keys(section, f"{prefix}{name}.")
    return tuple(notes)


def irrelevant(key: str, table: Mapping[str, tuple[str, ...]] = IRRELEVANT) -> bool:
    """Whether a row of the table covers the key."""
    return any(fnmatchcase(key, pattern) for keys in table.values() for pattern in keys)


def generation_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says about generation, under generation_config.json's names."""
    patterns = IRRELEVANT["generation"]
    return {
        key: value
        for key, value in raw.items()
        if value is not None and any(fnmatchcase(key, pattern) for pattern in patterns)
    }


def unknown_keys(said: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The other keys whose values say something, sorted."""
    return [key for key in sorted(said.keys() - set(known)) if said[key] not in _NOTHING]


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, (str, list, dict)) and not value)
