"""NeMo's Megatron checkpoints: `.nemo` files, unpacked ones and trainings, however sharded.

GPT, classic and of Megatron-LM core, and T5; one state dict per tensor- and pipeline-parallel rank,
or one distributed checkpoint. Seen from outside, every tensor is whole and layers are numbered
globally.

model_config.yaml of a NeMo GPT: its hyperparameters and the dialect of its weights; what a T5
says in the same words.

Absent keys take NeMo's own defaults. What changed between NeMo's releases is told apart by
`nemo_version`; a file without one is from before 1.18.

model_config.yaml of a NeMo T5 or mT5: its hyperparameters, its dialect and its token ids.

Both stacks are described by sections of their own, `encoder` and `decoder`, since NeMo 1.10, and by
the file's own keys before. Absent keys take NeMo's defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from launcher_scripts.checkpoint.formats import distributed
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import section
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    HEAD,
    T5_TABLE,
    TABLE,
    Hints,
    Shards,
    TensorShards,
    merged_stages,
    rank_files,
    table_rows,
)
from launcher_scripts.checkpoint.sources import nemo_files
from launcher_scripts.checkpoint.sources.nemo_files import (
    TrainingCheckpoint,
    chunked_stages,
    config_files,
    distributed_tensors,
    rank_weight_files,
    read_nemo_config,
    stripped,
)
from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import TokenIds, tokenizer_ids
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.common.tokenizer import SentencePieceTokenizer, Tokenizer
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_nemo import core_dialects, nemo_dialects
from launcher_scripts.models.t5 import T5Config

# Classic GPTs honour megatron_legacy and know ALiBi since this release.
LEGACY_AND_ALIBI_SINCE = (1, 20)
# activation -> (function, gated); "gelu" is settled by `gelu`.
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "reglu": ("relu", True),
    "fast-reglu": ("relu", True),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "squared-relu": ("squared_relu", False),
}
NORMALIZATIONS = {
    "layernorm": "layernorm",
    "layernorm1p": "layernorm",
    "low_precision_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
}
GPT_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "alibi": "alibi", "none": "none"}
BLOCK_TYPES = {"pre_ln": "pre", "post_ln": "post"}

# Keys whose other values change the network in ways this project does not know, with the only
# values it does know (None: absent or null).
_GPT_VALUES: dict[str, tuple[Any, ...]] = {
    "headscale": (None, False),
    "normalize_attention_scores": (None, True),
    "attention_type": (None, "multihead"),
    "num_moe_experts": (None, 0, 1),
    "qk_layernorm": (None, False),
    "rotary_interleaved": (None, False),
    "scale_positional_embedding": (None, False),
    "window_size": (None,),
}


@dataclass(frozen=True)
class NemoModel:
    """The settings of a model_config.yaml.

    fields:   the family's hyperparameters, but vocab_size (the table's rows) and the token ids
    dialects: dialects of the weight table, the first that has a row wins
    notes:    what a user should know about the model, if anything
    """

    fields: Mapping[str, Any]
    dialects: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_nemo_gpt(options: TrainingOptions, *, core: bool, local_norms: bool) -> NemoModel:
    """Translate `options`.

    core:        the weights are Megatron-LM core's
    local_norms: the core's norms are modules of their own
    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    _reject_unknown(options, core)
    function, gated = options.choice("activation", "gelu", ACTIVATIONS)
    positions = str(options.choice("position_embedding_type", "learned_absolute", GPT_POSITIONS))
    placement = options.choice("transformer_block_type", "pre_ln", BLOCK_TYPES)
    normalization = str(options.get("normalization") or "layernorm").lower()
    notes = []
    if positions == "alibi" and not core and nemo_version(options) < LEGACY_AND_ALIBI_SINCE:
        positions = "none"
        notes.append("this release of NeMo had no ALiBi: the model was trained without positions")
    heads = options.size("num_attention_heads")
    hidden = options.size("hidden_size")
    bias = options.flag("bias", True)
    length = (
        "max_position_embeddings"
        if options.get("max_position_embeddings")
        else "encoder_seq_length"
    )
    fields = {
        "num_layers": options.size("num_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": options.size("num_query_groups", heads),
        "head_size": options.size("kv_channels", hidden // heads),
        "ffn_size": options.size("ffn_hidden_size", 4 * hidden),
        "max_positions": options.size(length),
        "position_embedding": positions,
        "rotary_percentage": options.real("rotary_percentage", 1.0),
        "rotary_base": options.real("rotary_base", 10000.0),
        "rotary_interpolation_factor": options.real("seq_len_interpolation_factor", 1.0),
        "alibi_layer_scaling": positions == "alibi"
        and options.flag("apply_query_key_layer_scaling", True),
        "normalization": options.choice("normalization", "layernorm", NORMALIZATIONS),
        "norm_eps": options.real("layernorm_epsilon", 1e-5),
        "norm_placement": placement,
        "final_norm": placement == "pre",
        "activation": gelu(options) if function == "gelu" else function,
        "gated": gated,
        "attention_bias": bias,
        "mlp_bias": bias,
        "embedding_scale": hidden**0.5 if options.flag("apply_embedding_scaling", False) else None,
        "tied_embeddings": options.flag("share_embeddings_and_output_weights", True),
    }
    options.problems.raise_if_any(CheckpointError)
    plus_one = normalization == "layernorm1p" or options.flag(
        "layernorm_zero_centered_gamma", False
    )
    norms = "mcore_local" if local_norms else "mcore"
    dialects = core_dialects(gated, norms, plus_one)
    if not core:
        dialects = nemo_dialects(
            fused=str(options.get("activation") or "").startswith("fast-"),
            legacy=options.flag("megatron_legacy", False)
            and nemo_version(options) >= LEGACY_AND_ALIBI_SINCE,
            plus_one=plus_one,
        )
    return NemoModel(fields, dialects, tuple(notes))


def nemo_version(options: TrainingOptions) -> tuple[int, int]:
    """(major, minor) of the release that wrote the file; (0, 0) when it does not say."""
    match = re.match(r"(\d+)\.(\d+)", str(options.get("nemo_version") or ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def gelu(options: TrainingOptions) -> str:
    """The fused kernel and openai_gelu are the tanh form, torch's own is the exact one."""
    fused = options.flag("bias_activation_fusion", options.flag("bias_gelu_fusion", True))
    return "gelu" if fused or options.flag("openai_gelu", False) else "gelu_erf"


def _reject_unknown(options: TrainingOptions, core: bool) -> None:
    options.reject_others(_GPT_VALUES)
    problems, blocks = options.problems, options.get("transformer_block_type")
    groups, heads = options.get("num_query_groups"), options.get("num_attention_heads")
    if not core and groups not in (None, heads):
        problems.add("num_query_groups needs mcore_gpt", got=groups, choices=[None, heads])
    if not core and options.get("transformer_engine"):
        problems.add("transformer_engine without mcore_gpt is not supported", got=True)
    if core and options.get("position_embedding_type") == "alibi":
        problems.add("mcore_gpt has no ALiBi", got="alibi", choices=["learned_absolute", "rope"])
    if core and blocks not in (None, "pre_ln"):
        problems.add("mcore_gpt has no other blocks than pre_ln", got=blocks)
    if options.get("add_qkv_bias") and not options.flag("bias", True):
        problems.add("biases of query, key and value alone are not supported", got="add_qkv_bias")


T5_POSITIONS = {"learned_absolute": "learned", "relative": "relative"}

# What both stacks must agree in: FasterTransformer's layout has one value for it.
_COMMON = (
    "hidden_size",
    "num_heads",
    "head_size",
    "ffn_size",
    "position_embedding",
    "num_buckets",
    "max_distance",
    "relative_bias_layer_scaling",
    "normalization",
    "norm_eps",
    "activation",
    "gated",
    "bias",
    "attention_scale",
    "dialects",
)
# Keys whose other values change the network in ways this project does not know, with the only
# values it does know (None: absent or null).
_T5_VALUES: dict[str, tuple[Any, ...]] = {
    "arch": (None, "transformer"),
    "transformer_block_type": (None, "pre_ln"),
    "headscale": (None, False),
    "num_moe_experts": (None, 0, 1),
    "attention_type": (None, "multihead"),
}
# Tokens that NeMo appends to a SentencePiece vocabulary that lacks them, in its order.
_UNUSED_TOKENS = ("<cls>", "<sep>", "<mask>")


def read_nemo_t5(options: TrainingOptions) -> NemoModel:
    """Translate `options`; raises CheckpointError with everything that cannot be represented."""
    sections = [options.section(name) for name in ("encoder", "decoder")]
    encoder, decoder = map(_read_stack, sections)
    for key in _COMMON:
        layers = (encoder[key], decoder[key])
        if layers[0] != layers[1]:
            options.problems.add(f"encoder and decoder differ in {key}", got=layers)
    length = "max_position_embeddings" if options.get("max_position_embeddings") else "seq_length"
    max_positions = options.size(length, 512)
    options.problems.raise_if_any(CheckpointError)
    relative = decoder["position_embedding"] == "relative"
    self_only = sections[1].flag("relative_position_bias_self_attention_only", True)
    fields = {key: encoder[key] for key in _COMMON if key != "dialects"} | {
        "num_layers": encoder["num_layers"],
        "num_decoder_layers": decoder["num_layers"],
        "max_positions": max_positions,
        "cross_attention_relative_bias": relative and not self_only,
        "logits_bias": options.flag("tokens_head_bias", True),
        "tied_embeddings": options.flag("share_decoder_tokens_head_embeddings", True),
        "shared_embeddings": options.flag("share_token_embeddings", True),
    }
    return NemoModel(fields, encoder["dialects"])


def _read_stack(options: TrainingOptions) -> dict[str, Any]:
    """One stack's hyperparameters, with its own `dialects`."""
    options.reject_others(_T5_VALUES)
    function, gated = options.choice("activation", "gelu", ACTIVATIONS)
    heads = options.size("num_attention_heads")
    hidden = options.size("hidden_size")
    head_size = options.size("kv_channels", hidden // heads)
    positions = options.choice("position_embedding_type", "learned_absolute", T5_POSITIONS)
    relative = positions == "relative"
    scaled = options.flag("normalize_attention_scores", True)
    return {
        "dialects": nemo_dialects(
            fused=str(options.get("activation") or "").startswith("fast-"),
            legacy=options.flag("megatron_legacy", False),
            plus_one=str(options.get("normalization") or "").lower() == "layernorm1p",
        ),
        "num_layers": options.size("num_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "head_size": head_size,
        "ffn_size": options.size("ffn_hidden_size", 4 * hidden),
        "position_embedding": positions,
        "num_buckets": options.size("relative_attention_num_buckets", 32),
        "max_distance": options.size("relative_attention_max_distance", 128),
        "relative_bias_layer_scaling": relative
        and options.flag("apply_query_key_layer_scaling", True),
        "normalization": options.choice("normalization", "layernorm", NORMALIZATIONS),
        "norm_eps": options.real("layernorm_epsilon", 1e-5),
        "activation": gelu(options) if function == "gelu" else function,
        "gated": gated,
        "bias": options.flag("bias", True),
        "attention_scale": head_size**-0.5 if scaled else 1.0,
    }


def t5_token_ids(raw: Mapping[str, Any], tokenizer: Tokenizer) -> TokenIds:
    """The ids that NeMo's T5 gives start, end and padding with this tokenizer.

    NeMo appends what a SentencePiece vocabulary lacks: <cls>, <sep>, <mask>, <pad>, <bos>, <eos>
    and then the sentinels, or, for models that come from Hugging Face, the sentinels first. The
    latter never saw <bos>: like all of Google's T5 their decoder starts with the padding token.
    """
    settings = section(raw, "tokenizer")
    converted = bool(settings.get("add_sentinel_tokens_first"))
    ids = tokenizer_ids(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        sentinels = int(settings.get("num_sentinel_tokens") or 0) if converted else 0
        ids = _appended(tokenizer, sentinels, first_sentinel=0 if converted else 1)
    if converted or section(raw, "data").get("decoder_starts_with_pad"):
        return TokenIds(ids.pad_id, ids.end_id, ids.pad_id)
    return ids


def _appended(tokenizer: SentencePieceTokenizer, sentinels: int, first_sentinel: int) -> TokenIds:
    """Ids after NeMo's additions.

    sentinels:      how many <extra_id_N> come before the other additions
    first_sentinel: the vocabulary's own id of a role counts only from here on
    """
    first = [f"<extra_id_{number}>" for number in range(sentinels)]
    added = sum(tokenizer.token_id(token) is None for token in (*first, *_UNUSED_TOKENS))
    top = tokenizer.vocab_size + added
    token_ids: list[int] = []
    roles = (tokenizer.pad_id, "<pad>"), (tokenizer.start_id, "<bos>"), (tokenizer.end_id, "<eos>")
    for declared, token in roles:
        token_id = (
            declared
            if declared is not None and declared >= first_sentinel
            else tokenizer.token_id(token)
        )
        token_ids.append(top if token_id is None else token_id)
        top += token_id is None
    pad_id, start_id, end_id = token_ids
    return TokenIds(start_id, end_id, pad_id)


@dataclass(frozen=True)
class NemoCheckpoint(TensorShards):
    """An opened checkpoint.

    raw:      model_config.yaml, or what a training's hparams.yaml says in its place
    root:     folder of the archive that holds it, "" or ending in `/`
    config:   the hyperparameters; token ids still the defaults
    dialects: dialects of the weight table, the first that has a row wins
    shards:   name without prefix -> the tensor on every tensor-parallel rank that has it
    notes:    what a user should know about the model
    training: the checkpoint of a training that this is; None for a .nemo file
    """

    format: ClassVar[str] = "nemo"

    archive: Archive
    root: str
    raw: Mapping[str, Any]
    config: ModelConfig
    dialects: tuple[str, ...]
    shards: Shards
    notes: tuple[str, ...] = ()
    training: TrainingCheckpoint | None = None

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Return whether the archive looks like NeMo's."""
        return bool(config_files(archive)) or nemo_files.is_training(archive)

    @classmethod
    def open(cls, archive: Archive, hints: Hints) -> NemoCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        training = None
        notes: tuple[str, ...] = ()
        if nemo_files.is_training(archive) and not config_files(archive):
            training = nemo_files.find_checkpoint(archive, hints.training_checkpoint)
            root, raw = "", training.raw
            shards = _read_training(archive, training)
            notes = (f"the checkpoint of the training: {training.name}",)
        else:
            root, raw = read_nemo_config(archive)
            shards = _read_weights(archive, root, raw)
        is_t5 = T5_TABLE in shards or (TABLE not in shards and section(raw, "encoder"))
        read = _t5 if is_t5 else _gpt
        options = TrainingOptions(raw, Problems(f"model_config.yaml of {archive.path}"))
        config, dialects, more = read(archive, options, shards)
        notes = (*notes, *more, *options.check_keys())
        return cls(archive, root, raw, config, dialects, shards, notes, training)

    @property
    def token_rule(self) -> tokenizer_files.TokenRule | None:
        """T5's decoder starts with another token than the tokenizer's own, by model."""
        if not isinstance(self.config, T5Config):
            return None
        return partial(t5_token_ids, self.raw)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer."""
        find = partial(tokenizer_files.archived, self.archive, self.root)
        if self.training is not None:
            find = partial(tokenizer_files.next_to, self.training.folder)
        return tokenizer_files.nemo_files(self.raw, self.archive.path, find)

    def details(self) -> dict[str, Any]:
        """Details that the manifest records besides path, format and dialects."""
        return {
            "container": "training" if self.training else self.archive.container,
            **({"checkpoint": self.training.name} if self.training else {}),
            "nemo_version": self.raw.get("nemo_version"),
        }


def _read_weights(
    archive: Archive, root: str, raw: Mapping[str, Any]
) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards of what lies beside model_config.yaml."""
    tensors = distributed_tensors(archive, root)
    if tensors is not None:
        return merged_stages([[stripped(tensors, str(archive.path))]])
    return merged_stages(chunked_stages(archive, rank_weight_files(archive, root), raw))


def _read_training(
    archive: Archive, training: TrainingCheckpoint
) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards of one checkpoint of a training."""
    if training.distributed:
        tensors = distributed.read_saved_tensors(archive, f"{training.name}/")
        return merged_stages([[stripped(tensors, str(archive.path))]])
    files = rank_files(archive, "", f"{training.name}.ckpt")
    return merged_stages(chunked_stages(archive, files, training.raw))


def _gpt(
    archive: Archive, options: TrainingOptions, shards: dict[str, Any]
) -> tuple[GPTConfig, tuple[str, ...], tuple[str, ...]]:
    """Hyperparameters, dialects and notes; what a tied model stores twice leaves `shards`."""
    core = any(name.startswith("decoder.") for name in shards)
    local_norms = any(".pre_mlp_layernorm." in name for name in shards)
    gpt = read_nemo_gpt(options, core=core, local_norms=local_norms)
    rows = table_rows(archive, shards, TABLE)
    if gpt.fields["tied_embeddings"]:
        shards.pop(HEAD, None)
    return GPTConfig(vocab_size=rows, **gpt.fields), gpt.dialects, gpt.notes


def _t5(
    archive: Archive, options: TrainingOptions, shards: dict[str, Any]
) -> tuple[T5Config, tuple[str, ...], tuple[str, ...]]:
    """As _gpt. The decoder's copy of a shared embedding is the encoder's."""
    t5 = read_nemo_t5(options)
    rows = table_rows(archive, shards, T5_TABLE)
    if t5.fields["shared_embeddings"]:
        for name in [name for name in shards if name.startswith("decoder_embedding.")]:
            del shards[name]
    return T5Config(vocab_size=rows, **t5.fields), t5.dialects, ()
