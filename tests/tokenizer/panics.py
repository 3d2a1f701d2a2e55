"""A tokenizer whose library panics in Rust, as some published ones make it do."""

from __future__ import annotations

import json
from pathlib import Path

from launcher_scripts.common.tokenizer import Tokenizer, load_tokenizer

GPT2_FOLDER = Path(__file__).parents[1] / "data" / "tokenizers" / "gpt2bpe"
# The library's search with a regular expression gives up, which is a panic.
PANIC_TEXT = "a" * 30 + "b"
PANIC_ID = load_tokenizer(GPT2_FOLDER).encode("a")[0]


def fragile_tokenizer(folder: Path, *, decodes: bool = True) -> Tokenizer:
    """Written to `folder`. It panics at PANIC_TEXT, and without `decodes` at PANIC_ID."""
    content = json.loads(load_tokenizer(GPT2_FOLDER).to_json())
    split = {"type": "Split", "pattern": {"Regex": "(a|a)+$"}, "behavior": "Isolated"}
    pre_tokenizers = [{**split, "invert": False}, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers}
    if not decodes:
        content["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 3}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(folder)
