"""Make tests/data/gguf/vocabularies.json: llama.cpp's published test vectors of tokenizers.

    python3 -m tests.data.make_gguf_vocabularies <a checkout of llama.cpp>

models/ggml-vocab-*.gguf.{inp,out} there are texts, and the ids that each model's own tokenizer (of
transformers) gives them. Of the vocabularies only what can occur in the texts is kept: a merge that
makes no part of any of them never applies.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import gguf
from tokenizers.pre_tokenizers import ByteLevel

from launcher_scripts.checkpoint.sources.gguf_tokenizer import tokenizer_metadata

TARGET = Path(__file__).with_name("gguf") / "vocabularies.json"
BYTE_PAIRS = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "mpt",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
PIECES = ("llama-spm", "phi-3")
UNKNOWN, BYTE = 2, 6
KEPT = ("model", "pre", "add_bos_token", "add_eos_token", "add_space_prefix")


def pruned(path: Path) -> dict[str, Any]:
    """metadata, the ids that its tokens had, the texts, and their published ids."""
    metadata = tokenizer_metadata(gguf.GGUFReader(path))
    texts = path.with_suffix(".gguf.inp").read_bytes().decode()
    texts = texts.split("\n__ggml_vocab_test__\n")[:-1]
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    tokens, kinds = metadata["tokens"], metadata["token_type"]
    whole = "\0".join(_stored(metadata["model"], text) for text in texts)
    alphabet = set(ByteLevel.alphabet()) if metadata["model"] == "gpt2" else set()
    kept = [
        index
        for index, token in enumerate(tokens)
        if token in whole or token in alphabet or kinds[index] in (UNKNOWN, BYTE)
    ]
    known = {tokens[index] for index in kept}
    small = {key: metadata[key] for key in KEPT if key in metadata}
    for key in ("tokens", "token_type", "scores"):
        if key in metadata:
            small[key] = [metadata[key][index] for index in kept]
    small["merges"] = [
        merge
        for merge in metadata.get("merges", ())
        if {*merge.split(" "), merge.replace(" ", "")} <= known
    ]
    return {
        "metadata": small,
        "ids": kept,
        "texts": texts,
        "expected": [[int(token) for token in line.split()] for line in lines],
    }


def _stored(model: str, text: str) -> str:
    """A text as it is, and in the vocabulary's letters, composed or not."""
    if model == "llama":
        return "▁" + text.replace(" ", "▁")
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    forms = [text, unicodedata.normalize("NFC", text)]
    return (
        text + "\0" + "\0".join(part for form in forms for part, _ in level.pre_tokenize_str(form))
    )


def main() -> None:
    models = Path(sys.argv[1]) / "models"
    found = {name: pruned(models / f"ggml-vocab-{name}.gguf") for name in (*BYTE_PAIRS, *PIECES)}
    TARGET.write_text(
        json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
