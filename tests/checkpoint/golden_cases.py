"""What the original converters wrote, and how an export is compared with it."""

from __future__ import annotations

import configparser
import hashlib
from pathlib import Path

# Keys of the original that its runtime does not read, or reads as nothing but a label.
LABELS = {"model_name", "_name_or_path", "model_variant", "has_adapters", "adapter_inter_size"}
# What the T5 runtime reads of the many keys that the Hugging Face converter writes.
T5_KEYS = {
    "vocab_size",
    "num_heads",
    "d_kv",
    "d_model",
    "d_ff",
    "num_layers",
    "feed_forward_proj",
    "relative_attention_num_buckets_or_max_pos_seq_len",
    "weight_data_type",
    "t5_with_bias",
    "use_gated_activation",
    "position_embedding_type",
}
# And of the decoder's section alone.
DECODER_KEYS = {"decoder_start_token_id", "eos_token_id", "tie_word_embeddings"}
_SWITCHES = {"true": True, "false": False, "1": True, "0": False}


def digests(case: Path) -> dict[str, str]:
    """File name -> sha256 of every .bin file the original wrote."""
    lines = [line.split() for line in (case / "digests.sha256").read_text().splitlines()]
    return {name.split("/")[1]: digest for digest, _, name in lines if name.endswith(".bin")}


def found_digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.bin")
    }


def differing_keys(case: Path, folder: Path) -> dict[str, tuple[object, object]]:
    """section.key -> (the original's value, ours) of what the runtime reads, where they differ."""
    theirs, ours = _parsed(case / "config.ini"), _parsed(folder / "config.ini")
    differing = {}
    for section in theirs.sections():
        for key, value in theirs[section].items():
            read = T5_KEYS | (DECODER_KEYS if section == "decoder" else set())
            if key in LABELS or (section != "gpt" and key not in read):
                continue
            pair = _value(value), _value(ours.get(section, key, fallback="missing"))
            if pair[0] != pair[1]:
                differing[f"{section}.{key}"] = pair
    return differing


def _parsed(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read_string(path.read_text())
    return parser


def _value(text: str) -> object:
    """A value as the runtime takes it, however it is spelled."""
    if text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text
