"""The tokenizer of an export: the block `export.model.tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.options import ConfigPath, option


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
