"""Text to token ids and back, from the files that travel with a checkpoint.

This file stands alone: it is copied beside the text models of a Triton repository, so it imports
nothing of this project. tokenizers or sentencepiece is imported when a folder needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

END_OF_TEXT = "<|endoftext|>"

# What a folder may hold, best source first: the names are those of the original converters.
FILE_SETS: tuple[tuple[str, ...], ...] = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
)
# Files that refine a tokenizer.json: which of its tokens start, end and pad a sequence.
OPTIONAL_FILES = ("special_tokens_map.json", "tokenizer_config.json")

# Usual names of special tokens, for a tokenizer.json that comes without the files that say so.
_USUAL_START = ("<s>", "<bos>", "<|begin_of_text|>", END_OF_TEXT, "[CLS]")
_USUAL_END = ("</s>", "<eos>", "<|end_of_text|>", END_OF_TEXT, "[SEP]")
_USUAL_PAD = ("<pad>", "[PAD]", "<|pad|>")


class TokenizerError(Exception):
    """The tokenizer's files are missing or cannot be read; the message is meant for the user."""


class Tokenizer(Protocol):
    """What every tokenizer answers. No special token is added or needs to be removed by the caller.

    vocab_size: number of ids, special ones included
    start_id, end_id, pad_id: as NeMo gives them; None where the tokenizer has no such token
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def start_id(self) -> int | None: ...

    @property
    def end_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without start or end token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens leave no text, broken UTF-8 becomes U+FFFD."""
        ...


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of `folder` that make up its tokenizer, required ones first; [] if it has none."""
    for names in FILE_SETS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return paths + [folder / name for name in OPTIONAL_FILES if (folder / name).is_file()]
    return []


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer whose files lie in `folder`.

    Raises TokenizerError when the folder holds none or holds a broken one.
    """
    folder = Path(folder)
    files = tokenizer_files(folder)
    if not files:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no folder"
        choices = ", ".join(" + ".join(names) for names in FILE_SETS)
        raise TokenizerError(f"no tokenizer in {folder}; got {found}; choices: {choices}")
    kinds: dict[str, Callable[[Path], Tokenizer]] = {
        "tokenizer.json": HuggingFaceTokenizer,
        "tokenizer.model": SentencePieceTokenizer,
        "vocab.json": GPT2Tokenizer,
    }
    try:
        return kinds[files[0].name](folder)
    except ImportError as error:
        raise TokenizerError(
            f"the tokenizer in {folder} needs a Python package that is not installed: {error.name}"
        ) from error
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise TokenizerError(f"cannot read the tokenizer in {folder}: {error}") from error


def is_of_library(error: BaseException) -> bool:
    """Whether the files are to blame: the libraries raise bare Exception, and panic in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class GPT2Tokenizer:
    """GPT-2's byte-level BPE from vocab.json and merges.txt (NeMo's GPT2BPETokenizer).

    `<|endoftext|>` both starts and ends a sequence; a vocabulary without it gets it as last id.
    There is no padding token.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as BytePairTokenizer
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        bpe = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        self._tokenizer = BytePairTokenizer(bpe)
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = ByteLevelDecoder()
        self._tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.start_id: int | None = self._tokenizer.token_to_id(END_OF_TEXT)
        self.end_id: int | None = self.start_id
        self.pad_id: int | None = None

    def to_json(self) -> str:
        """All of it, as tokenizer.json has it."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


class SentencePieceTokenizer:
    """A SentencePiece model from tokenizer.model; its own ids for start, end and padding.

    Ids past the pieces (a padded vocabulary) have no text.
    """

    def __init__(self, folder: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.vocab_size: int = self._processor.vocab_size()
        self.start_id = _or_none(self._processor.bos_id())
        self.end_id = _or_none(self._processor.eos_id())
        self.pad_id = _or_none(self._processor.pad_id())

    def pieces(self) -> list[bytes]:
        """The bytes that each id stands for; none for control tokens."""
        return [self._piece(token) for token in range(self.vocab_size)]

    def _piece(self, token: int) -> bytes:
        piece = str(self._processor.id_to_piece(token))
        if self._processor.is_byte(token):
            return bytes([int(piece[3:-1], 16)])  # <0x0A>
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return b""
        return piece.replace("\u2581", " ").encode()

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids if i < self.vocab_size]))

    def token_id(self, token: str) -> int | None:
        """The id of one piece; None where the vocabulary lacks it."""
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None


class HuggingFaceTokenizer:
    """A fast tokenizer from tokenizer.json.

    special_tokens_map.json or tokenizer_config.json beside it say which tokens start, end and
    pad; without them the usual names are looked for.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        named = _named_special_tokens(folder)
        self.start_id = self._special_id(named, "bos_token", _USUAL_START)
        self.end_id = self._special_id(named, "eos_token", _USUAL_END)
        self.pad_id = self._special_id(named, "pad_token", _USUAL_PAD)

    def _special_id(
        self, named: dict[str, str] | None, key: str, usual: tuple[str, ...]
    ) -> int | None:
        if named is not None:
            token = named.get(key)
            return None if token is None else self._tokenizer.token_to_id(token)
        ids = (self._tokenizer.token_to_id(token) for token in usual)
        return next((found for found in ids if found is not None), None)

    def to_json(self) -> str:
        """All of it, as tokenizer.json has it."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


def _or_none(token_id: int) -> int | None:
    """SentencePiece says -1 for a token it does not have."""
    return None if token_id < 0 else token_id


def _named_special_tokens(folder: Path) -> dict[str, str] | None:
    """role -> token as the files beside tokenizer.json name them; None without such a file."""
    for name in OPTIONAL_FILES:
        path = folder / name
        if path.is_file():
            roles: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            contents = {
                role: token.get("content") if isinstance(token, dict) else token
                for role, token in roles.items()
            }
            return {role: token for role, token in contents.items() if isinstance(token, str)}
    return None
