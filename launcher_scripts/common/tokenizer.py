"""Text to token ids and back, from the files that travel with a checkpoint.

This file stands alone: it is copied beside the text models of a Triton repository, so it imports
nothing of this project. tokenizers or sentencepiece is imported when a folder needs it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
# The special tokens of fairseq's vocabularies (BART, OPT, mBART), by their ids there.
FAIRSEQ_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
# How transformers' names of mBART's tokenizers begin.
MBART, MBART_50 = "MBart", "MBart50"
# The languages of mBART, in the order of their ids, and those that mBART-50 has besides.
MBART_LANGUAGES = (
    *("ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN"),
    *("it_IT", "ja_XX", "kk_KZ", "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO"),
    *("ru_RU", "si_LK", "tr_TR", "vi_VN", "zh_CN"),
)
MBART_50_LANGUAGES = (
    *("af_ZA", "az_AZ", "bn_IN", "fa_IR", "he_IL", "hr_HR", "id_ID", "ka_GE", "km_KH", "mk_MK"),
    *("ml_IN", "mn_MN", "mr_IN", "pl_PL", "ps_AF", "pt_XX", "sv_SE", "sw_KE", "ta_IN", "te_IN"),
    *("th_TH", "tl_XX", "uk_UA", "ur_PK", "xh_ZA", "gl_ES", "sl_SI"),
)

# What a folder may hold, best source first: the names are those of the original converters.
FILE_SETS: tuple[tuple[str, ...], ...] = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("sentencepiece.bpe.model",),
)
# Files that refine the others: which tokens start, end and pad a sequence, the source's language.
OPTIONAL_FILES = ("special_tokens_map.json", "tokenizer_config.json")
# How chats are written and texts are generated, under the names that transformers gives them.
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
GENERATION_FILE = "generation_config.json"
# What may lie beside a tokenizer's own files.
COMPANION_FILES = (*OPTIONAL_FILES, *CHAT_TEMPLATE_FILES, GENERATION_FILE)

# Usual names of special tokens, for a tokenizer.json that comes without the files that say so.
_USUAL_START = ("<s>", "<bos>", "<|begin_of_text|>", END_OF_TEXT, "[CLS]")
_USUAL_END = ("</s>", "<eos>", "<|end_of_text|>", END_OF_TEXT, "[SEP]")
_USUAL_PAD = ("<pad>", "[PAD]", "<|pad|>")


class TokenizerError(Exception):
    """The tokenizer's files are missing or cannot be read; the message is meant for the user."""


class Tokenizer(ABC):
    """What every tokenizer answers. No special token is added or needs to be removed by the caller.

    vocab_size: number of ids, special ones included
    start_id, end_id, pad_id: as NeMo gives them; None where the tokenizer has no such token
    joined_bytes: what one token adds to a text where decoding joins the tokens' bytes, a special
        token nothing; None where it does more than that
    """

    vocab_size: int
    start_id: int | None
    end_id: int | None
    pad_id: int | None
    joined_bytes: Callable[[int], bytes] | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without start or end token."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens leave no text, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for in UTF-8, a special token for its name; b"" outside."""

    @abstractmethod
    def around(self) -> tuple[list[int], list[int]]:
        """The ids that a model was trained to see before and after a text, as far as is known."""

    @abstractmethod
    def special_id(self, token: str) -> int | None:
        """The id of a special token, such as a language's; None where there is no such one."""


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of `folder` that make up its tokenizer, required ones first; [] if it has none."""
    for names in FILE_SETS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            companions = [folder / name for name in COMPANION_FILES]
            return paths + [path for path in companions if path.is_file()]
    return []


def chat_templates(files: Mapping[str, bytes]) -> dict[str, str]:
    """Name -> Jinja text of the chat templates of a tokenizer; {} where it has none.

    The usual one is called `default`. As in transformers, chat_template.jinja goes before the
    entry of tokenizer_config.json, which is a text or a list of names and texts.

    files: name -> content of the tokenizer's files
    Raises ValueError for files that are damaged.
    """
    if CHAT_TEMPLATE_FILES[0] in files:
        return {"default": files[CHAT_TEMPLATE_FILES[0]].decode("utf-8")}
    for name in (OPTIONAL_FILES[1], CHAT_TEMPLATE_FILES[1]):
        said = json.loads(files.get(name, b"{}"))
        found = said.get("chat_template") if isinstance(said, dict) else None
        if isinstance(found, str):
            return {"default": found}
        if isinstance(found, list):
            try:
                return {str(each["name"]): str(each["template"]) for each in found}
            except (KeyError, TypeError) as error:
                raise ValueError(f"the chat templates of {name} are damaged") from error
    return {}


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
        "sentencepiece.bpe.model": MBartTokenizer,
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


class _FastTokenizer(Tokenizer):
    """One of the `tokenizers` library's."""

    _tokenizer: Any
    _byte_level = True

    def to_json(self) -> str:
        """All of it, as tokenizer.json has it."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        # A batch of one: unlike `encode` it leaves Python's other threads running meanwhile.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        return _token_bytes(self._tokenizer, token_id, byte_level=self._byte_level)

    def special_id(self, token: str) -> int | None:
        return _added_id(self._tokenizer, token)


class GPT2Tokenizer(_FastTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt (NeMo's GPT2BPETokenizer).

    `<|endoftext|>` both starts and ends a sequence; a vocabulary without it gets it as last id.
    There is no padding token. A vocabulary of fairseq's (BART, OPT) has its own tokens for them.
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
        self.joined_bytes = partial(_joined_bytes, self._tokenizer)
        special = [AddedToken(END_OF_TEXT, normalized=False)]
        ids = [bpe.token_to_id(token) for token in FAIRSEQ_TOKENS]
        fairseq = ids == list(range(len(ids)))
        if fairseq:
            special += [AddedToken(token, normalized=False) for token in FAIRSEQ_TOKENS]
            special += [AddedToken(MASK, normalized=False, lstrip=True)]
            special = [token for token in special if bpe.token_to_id(token.content) is not None]
        self._tokenizer.add_special_tokens(special)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.start_id = self._tokenizer.token_to_id(END_OF_TEXT)
        self.end_id = self.start_id
        self.pad_id = None
        if fairseq:
            self.start_id, self.pad_id, self.end_id = ids[:3]
        self._said = _tokenizer_config(folder)
        self._named = _named_special_tokens(folder) or {}

    def around(self) -> tuple[list[int], list[int]]:
        """BART's; around a GPT's prompts is what tokenizer_config.json says (OPT), or nothing."""
        if _tokenizer_class(self._said).startswith("GPT2"):
            start, end = (
                self._tokenizer.token_to_id(self._named.get(name, END_OF_TEXT))
                for name in ("bos_token", "eos_token")
            )
            return _said_around(self._said, start, end)
        if self.start_id == self.end_id or self.start_id is None or self.end_id is None:
            return [], []
        return [self.start_id], [self.end_id]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model from tokenizer.model; its own ids for start, end and padding.

    Ids past the pieces (a padded vocabulary) have no text.
    """

    def __init__(self, folder: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.vocab_size = self._processor.vocab_size()
        self.start_id = _or_none(self._processor.bos_id())
        self.end_id = _or_none(self._processor.eos_id())
        self.pad_id = _or_none(self._processor.pad_id())
        self._said = _tokenizer_config(folder)

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

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        return self._piece(token_id) or str(self._processor.id_to_piece(token_id)).encode()

    def token_id(self, token: str) -> int | None:
        """The id of one piece; None where the vocabulary lacks it."""
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None

    def around(self) -> tuple[list[int], list[int]]:
        """Pieces say nothing of it, but tokenizer_config.json may."""
        return _said_around(self._said, self.start_id, self.end_id)

    def special_id(self, token: str) -> int | None:
        found = self.token_id(token)
        return found if found is not None and self._processor.is_control(found) else None


class MBartTokenizer(Tokenizer):
    """mBART's SentencePiece model from sentencepiece.bpe.model, numbered as fairseq does.

    First the special tokens, then the pieces from the fourth on, one later than the model has them,
    the languages and the mask. tokenizer_config.json says by `tokenizer_class` whether it is an
    mBART-50, which has more languages and puts the source's before the text instead of after it,
    and by `src_lang` which one that is, else English. What looks like a special token is text.
    """

    def __init__(self, folder: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        name = str(folder / "sentencepiece.bpe.model")
        self._processor = SentencePieceProcessor(model_file=name)
        self._pieces: int = self._processor.vocab_size()
        self._said = _tokenizer_config(folder)
        more = MBART_50_LANGUAGES if _tokenizer_class(self._said).startswith(MBART_50) else ()
        languages = (*MBART_LANGUAGES, *more)
        after = enumerate((*languages, MASK), start=self._pieces + 1)
        self._special = {token: number for number, token in after}
        self._special |= {token: number for number, token in enumerate(FAIRSEQ_TOKENS)}
        self._unknown: int = self._processor.unk_id()
        self.vocab_size = self._pieces + 1 + len(languages) + 1
        self.start_id, self.pad_id, self.end_id = (
            self._special[token] for token in FAIRSEQ_TOKENS[:3]
        )

    def encode(self, text: str) -> list[int]:
        ids = self._processor.encode(text)
        return [FAIRSEQ_TOKENS.index("<unk>") if i == self._unknown else i + 1 for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        first = len(FAIRSEQ_TOKENS)
        return str(self._processor.decode([int(i) - 1 for i in ids if first <= i <= self._pieces]))

    def token_bytes(self, token_id: int) -> bytes:
        if len(FAIRSEQ_TOKENS) <= token_id <= self._pieces:
            return _piece_bytes(str(self._processor.id_to_piece(token_id - 1)))
        names = (name for name, number in self._special.items() if number == token_id)
        return next(names, "").encode()

    def around(self) -> tuple[list[int], list[int]]:
        return _around_of_mbart(self, self._said)

    def special_id(self, token: str) -> int | None:
        return self._special.get(token)


class HuggingFaceTokenizer(_FastTokenizer):
    """A fast tokenizer from tokenizer.json.

    special_tokens_map.json or tokenizer_config.json beside it say which tokens start, end and
    pad; without them the usual names are looked for.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        state = None if decoder is None else decoder.__getstate__()
        self._byte_level = state is not None and b"ByteLevel" in state
        joins = state is not None and json.loads(state)["type"] == "ByteLevel"
        self.joined_bytes = partial(_joined_bytes, self._tokenizer) if joins else None
        self.vocab_size = self._tokenizer.get_vocab_size()
        named = _named_special_tokens(folder)
        self.start_id = self._special_id(named, "bos_token", _USUAL_START)
        self.end_id = self._special_id(named, "eos_token", _USUAL_END)
        self.pad_id = self._special_id(named, "pad_token", _USUAL_PAD)
        self._said = _tokenizer_config(folder)

    def _special_id(
        self, named: dict[str, str] | None, key: str, usual: tuple[str, ...]
    ) -> int | None:
        if named is not None:
            token = named.get(key)
            return None if token is None else self._tokenizer.token_to_id(token)
        ids = (self._tokenizer.token_to_id(token) for token in usual)
        return next((found for found in ids if found is not None), None)

    def around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer's post-processor adds; transformers gives an mBART its own."""
        if _tokenizer_class(self._said).startswith(MBART):
            return _around_of_mbart(self, self._said)
        encoded = self._tokenizer.encode("a")
        inside = [place for place, added in enumerate(encoded.special_tokens_mask) if not added]
        first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
        return encoded.ids[:first], encoded.ids[last:]


def _token_bytes(tokenizer: Any, token_id: int, *, byte_level: bool) -> bytes:
    """Tokenizer.token_bytes of the library tokenizers' tokenizers."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if token_id in tokenizer.get_added_tokens_decoder():
        return str(token).encode()
    if byte_level and all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return _piece_bytes(token)


def _joined_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Tokenizer.joined_bytes of a byte-level vocabulary of the library tokenizers."""
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if added is not None:
        return b"" if added.special else str(tokenizer.decode([token_id])).encode()
    return _token_bytes(tokenizer, token_id, byte_level=True)


def _piece_bytes(piece: str) -> bytes:
    """What a piece of SentencePiece stands for: <0xNN> is a byte, U+2581 a blank."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, int]:
    """The character that GPT-2's vocabularies have for every byte -> the byte.

    Printable ones of Latin-1 stand for themselves, the others follow from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    moved = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in shown} | moved


_BYTES = _byte_characters()


def _added_id(tokenizer: Any, token: str) -> int | None:
    """The id of a special token of the library's tokenizer."""
    found: int | None = tokenizer.token_to_id(token)
    added = tokenizer.get_added_tokens_decoder()
    return found if found in added and added[found].special else None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / OPTIONAL_FILES[1]
    said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return said if isinstance(said, dict) else {}


def _tokenizer_class(said: dict[str, Any]) -> str:
    return str(said.get("tokenizer_class"))


def _around_of_mbart(tokenizer: Tokenizer, said: dict[str, Any]) -> tuple[list[int], list[int]]:
    """An mBART's end token and the source's language; said: tokenizer_config.json."""
    language = said.get("src_lang") or "en_XX"
    source, end = tokenizer.special_id(str(language)), tokenizer.end_id
    if source is None or end is None:
        where = f"src_lang of {OPTIONAL_FILES[1]}"
        raise TokenizerError(f"{where} is not a language of the tokenizer; got {language!r}")
    if _tokenizer_class(said).startswith(MBART_50):
        return [source], [end]
    return [], [end, source]


def _said_around(
    said: dict[str, Any], start_id: int | None, end_id: int | None
) -> tuple[list[int], list[int]]:
    """The ids that tokenizer_config.json puts before and after a text.

    Its keys add_bos_token and add_eos_token count for files that say nothing themselves: beside a
    tokenizer.json transformers does not look at them.
    """
    before = [] if start_id is None or not said.get("add_bos_token") else [start_id]
    after = [] if end_id is None or not said.get("add_eos_token") else [end_id]
    return before, after


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
