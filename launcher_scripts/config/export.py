"""Blocks of an export: its tokenizer, and how a transformers folder is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.options import ConfigPath, option

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"([1-9]\d*)\s*({'|'.join(_UNITS)})")


@dataclass(frozen=True)
class TokenizerSettings:
    """Source of the tokenizer: `auto` (the checkpoint's own), `none`, or `files`."""

    source: str = option(
        "auto",
        "the checkpoint's own, none, or the files named by the flags below",
        flag="tokenizer",
        metavar="auto|none|files",
    )
    library: str | None = option(None, "library of --tokenizer files")
    model: ConfigPath | None = option(None, "SentencePiece model or tokenizer.json", metavar="FILE")
    vocab_file: ConfigPath | None = option(None, "vocabulary of a byte-level BPE", metavar="FILE")
    merge_file: ConfigPath | None = option(None, "merges of a byte-level BPE", metavar="FILE")
    start_id: int | None = option(None, "token that starts a sequence", flag="start-id")
    end_id: int | None = option(None, "token that ends a sequence", flag="end-id")
    pad_id: int | None = option(None, "token that fills a batch", flag="pad-id")

    def __post_init__(self) -> None:
        choices = ("auto", "none", "files")
        if self.source not in choices:
            raise ConfigError(
                problem(
                    "unknown tokenizer",
                    got=self.source,
                    choices=("auto", "none", "a mapping with library, model, vocab_file, ..."),
                    change="export.model.tokenizer",
                )
            )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceOptions:
    """How a transformers folder is written, in the block `export.huggingface`."""

    folder: ConfigPath | None = option(
        None, "the folder that is written with --format huggingface", metavar="FOLDER"
    )
    max_shard_size: str = option(
        "5GB", "maximum size of a safetensors file, such as 5GB or 500MB", metavar="SIZE"
    )
    vocab_size: int | None = option(
        None,
        "rows of the vocabulary; by default those of config.json, else the tokenizer's tokens: "
        "what a training added to them as padding is left out",
        lower=1,
    )

    def check(self, problems: Problems, lists: Iterable[str]) -> None:
        """Note a size that cannot be read, a missing folder, and lists of adapters that such a
        folder has no place for.
        """
        for name in lists:
            message = f"{name} have no place in a transformers folder"
            choices = ["adapter_checkpoints, which are merged", "lora_checkpoints"]
            problems.add(message, choices=choices, change=f"export.model.{name}")
        if _SIZE.fullmatch(self.max_shard_size) is None:
            problems.add(
                "max_shard_size is not a size",
                got=self.max_shard_size,
                choices=[f"a whole number with {', '.join(_UNITS)}"],
                change="export.huggingface.max_shard_size",
            )
        if self.folder is None:
            problems.add("format huggingface needs a folder", change="export.huggingface.folder")

    @property
    def max_shard_bytes(self) -> int:
        match = _SIZE.fullmatch(self.max_shard_size)
        return int(match[1]) * _UNITS[match[2]] if match else 0
