"""The tokenizer of a Hugging Face folder as one tokenizer.json, whatever files hold it.

A folder may have tokenizer.json, a SentencePiece model, or vocabulary and merges; further tokens
stand in tokenizer_config.json, special_tokens_map.json and added_tokens.json. Which ids a text has
follows from all of them and from the tokenizer's class. What is written is what transformers makes
of them, so that no reader has to know the class again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher_scripts.checkpoint.formats.nemo_config import ADVICE
from launcher_scripts.checkpoint.tokenizers.tokenizer_classes import (
    BACKEND,
    CLASSES,
    FAIRSEQ_FILE,
    MODEL_FILE,
    PAIR_FILES,
    SPACE,
    TokenizerClass,
    Vocabulary,
    tokenizer_class_name,
)
from launcher_scripts.checkpoint.tokenizers.vocabularies import (
    CONTROL,
    UNIGRAM,
    USER_DEFINED,
    SentencePieceModel,
)
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import mapping, parse_json
from launcher_scripts.common.tokenizer import OPTIONAL_FILES, is_of_library

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

ADDED_TOKENS = "added_tokens.json"
SPECIAL_MAP, TOKENIZER_CONFIG = OPTIONAL_FILES
FAST_FILE = "tokenizer.json"
SLOW_FILES: tuple[tuple[str, ...], ...] = ((MODEL_FILE,), PAIR_FILES, (FAIRSEQ_FILE,))
_ADDS = ("add_bos_token", "add_eos_token")
_ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
# Special tokens without a role; before transformers 5 they had the other name.
_EXTRA = "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"


def unified(files: Mapping[str, bytes], model_config: Mapping[str, Any]) -> dict[str, bytes]:
    """`files` with one tokenizer.json in place of the files that it makes superfluous.

    files:        exported name -> content, with added_tokens.json if there is one
    model_config: config.json; {} where there is none
    Raises CheckpointError for an unknown class, and for files that are damaged.
    """
    slow = _slow_files(files)
    if FAST_FILE not in files and not slow:
        return _with_added(files)
    try:
        folder = _Folder.of(files, model_config)
        tokenizer, roles = folder.tokenizer()
        content = _unless_same(files.get(FAST_FILE), tokenizer)
    except (CheckpointError, ImportError):
        raise
    except BaseException as error:
        if not is_of_library(error):
            raise
        names = FAST_FILE if FAST_FILE in files else " and ".join(slow)
        reason = f"cannot make the tokenizer of {names}: {type(error).__name__}: {error}"
        raise CheckpointError(problem(reason, change=ADVICE)) from error
    dropped = {FAST_FILE, ADDED_TOKENS, *(name for names in SLOW_FILES for name in names)}
    result = {FAST_FILE: content}
    result |= {name: files[name] for name in files if name not in dropped}
    if roles:
        result[SPECIAL_MAP] = _content(roles)
    if folder.row and "tokenizer_class" not in (config := _json(files, TOKENIZER_CONFIG)):
        result[TOKENIZER_CONFIG] = _content({"tokenizer_class": folder.name, **config})
    return result


def _unless_same(content: bytes | None, tokenizer: Tokenizer) -> bytes:
    """The tokenizer as tokenizer.json; `content` where it is that tokenizer already."""
    from tokenizers import Tokenizer as FastTokenizer

    text = tokenizer.to_str()
    if content is not None and FastTokenizer.from_str(content.decode("utf-8")).to_str() == text:
        return content
    return text.encode()


def _with_added(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of an M2M-100 or a Marian, added tokens in tokenizer_config.json alone."""
    result = {name: content for name, content in files.items() if name != ADDED_TOKENS}
    config, added = _json(files, TOKENIZER_CONFIG), _json(files, ADDED_TOKENS)
    if added and "added_tokens_decoder" not in config:
        config["added_tokens_decoder"] = {
            number: {"content": token} for token, number in added.items()
        }
        result[TOKENIZER_CONFIG] = _content(config)
    return result


def _content(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()


def _slow_files(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """The names of SLOW_FILES that are there; () for others, which are read as they are.

    An M2M-100 has a vocabulary beside its pieces.
    """
    if FAIRSEQ_FILE in files and PAIR_FILES[0] in files:
        return ()
    return next((names for names in SLOW_FILES if all(name in files for name in names)), ())


@dataclass(frozen=True)
class _Folder:
    """The files of a tokenizer.

    files:   name -> content
    options: tokenizer_config.json, and special_tokens_map.json where that counts
    added:   id -> token of the files beside the main one
    name:    the class
    row:     of the class; None: the files say everything
    """

    files: Mapping[str, bytes]
    options: dict[str, Any]
    added: dict[int, AddedToken]
    name: str
    row: TokenizerClass | None

    @classmethod
    def of(cls, files: Mapping[str, bytes], model_config: Mapping[str, Any]) -> _Folder:
        options, fast = _json(files, TOKENIZER_CONFIG), _json(files, FAST_FILE)
        model_type = model_config.get("model_type")
        named = options.get("tokenizer_class") or model_config.get("tokenizer_class")
        byte_level = any(
            '"ByteLevel"' in json.dumps(fast.get(part)) for part in ("pre_tokenizer", "decoder")
        )
        name = tokenizer_class_name(model_type, named, byte_level=byte_level)
        row = CLASSES.get(name) if fast else _slow_row(name, named, files, options)
        if options.get("split_special_tokens"):
            message = f"split_special_tokens of {TOKENIZER_CONFIG} is not supported"
            raise CheckpointError(problem(message, got=True, choices=[False], change=ADVICE))
        if fast:
            options = {key: options[key] for key in options if key not in _ADDS}
        if _OLD_EXTRA in options and not options.get(_EXTRA):
            options[_EXTRA] = options.pop(_OLD_EXTRA)
        added = _added_tokens(files, options, fast)
        return cls(files, options, added, name, row)

    def tokenizer(self) -> tuple[Tokenizer, dict[str, str]]:
        """The tokenizer with all its tokens, and role -> special token."""
        declared: list[AddedToken] | None = None
        roles = self._roles({})
        if FAST_FILE in self.files:
            tokenizer = self._of_json()
        elif (slow := _slow_files(self.files)) != PAIR_FILES:
            model = SentencePieceModel.parse(self.files[slow[0]])
            roles = self._roles(_roles_of(model) if self.row is None else {})
            declared = _declared(model)
            tokenizer = self._of_pieces(model)
        else:
            tokenizer = self._of_merges()
        if not tokenizer.get_vocab_size(with_added_tokens=False):
            message = "the tokenizer has no tokens"
            raise CheckpointError(problem(message, got=sorted(self.files), change=ADVICE))
        named = {role: str(getattr(token, "content", token)) for role, token in roles.items()}
        self._add_tokens(tokenizer, [*roles.values()], self._extra(declared))
        self._surround(tokenizer, named)
        return tokenizer, named

    def _roles(self, others: Mapping[str, str]) -> dict[str, Any]:
        """Role -> special token, the usual roles first.

        others: those of the files where the class has none
        """
        roles = {**others, **(self.row.roles if self.row else {})}
        more = [
            key for key in self.options if key.endswith("_token") and key not in (*_ROLES, *_ADDS)
        ]
        values = {role: self.options.get(role, roles.get(role)) for role in _ROLES}
        values |= {role: self.options[role] for role in more}
        if isinstance(extra := self.options.get(_EXTRA), dict):
            values |= extra
        tokens = {role: _token(value) for role, value in values.items() if value}
        by_text = {token.content: token for token in self.added.values()}
        if self.row and self.row.mask_strips and "mask_token" not in self.options:
            mask = {"content": roles["mask_token"], "lstrip": True, "special": True}
            tokens["mask_token"] = _required({**mask, "normalized": True})
        return {
            role: by_text.get(token, token) if isinstance(token, str) else token
            for role, token in tokens.items()
            if token is not None
        }

    def _names(self) -> dict[str, str]:
        """Role -> the text of its token."""
        roles = self._roles({})
        return {role: str(getattr(token, "content", token)) for role, token in roles.items()}

    def _extra(self, declared: list[AddedToken] | None) -> list[Any]:
        """Special tokens without a role; declared: those of a SentencePiece model."""
        extra = self.options.get(_EXTRA)
        if _EXTRA in self.options and not isinstance(extra, dict):
            tokens = map(_token, extra or [])
            return [token for token in tokens if token is not None]
        listed = declared if declared is not None else self.options.get(_OLD_EXTRA) or []
        default = self.row.extra(self.options) if self.row else []
        return [*filter(None, map(_token, listed)), *default]

    def _of_json(self) -> Tokenizer:
        """tokenizer.json as it is, or with its vocabulary in the class's way of cutting text."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.files[FAST_FILE].decode("utf-8"))
        document = _json(self.files, FAST_FILE)
        model = document["model"]
        if self.row is None or isinstance(model["vocab"], list) != self.row.unigram:
            return tokenizer
        merges = [
            tuple(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in model.get("merges") or ()
        ]
        charsmap = _charsmap(document.get("normalizer"))
        if self.row.unigram:
            scores = [(token, score) for token, score in model["vocab"]]
            vocabulary = Vocabulary(scores=scores, charsmap=charsmap)
        else:
            vocabulary = Vocabulary(model["vocab"], merges=merges, charsmap=charsmap)
        again = self.row.build(vocabulary, self.options, self._names())
        if tokenizer.post_processor is not None:
            again.post_processor = tokenizer.post_processor
        return again

    def _of_pieces(self, model: SentencePieceModel) -> Tokenizer:
        if self.row is None:
            return _plain_pieces(model, self.added)
        pieces = self.row.pieces(
            [(piece.text, piece.score) for piece in model.pieces], self.options
        )
        if self.row.unigram:
            vocabulary = Vocabulary(scores=pieces, charsmap=model.charsmap)
        else:
            tokens = {text: index for index, (text, _) in enumerate(pieces)}
            ids = {piece.text: index for index, piece in enumerate(model.pieces)}
            vocabulary = Vocabulary(tokens, merges=list(_merges(ids)), charsmap=model.charsmap)
        return self.row.build(vocabulary, self.options, self._names())

    def _of_merges(self) -> Tokenizer:
        vocab, merges = (self.files[name].decode("utf-8") for name in PAIR_FILES)
        lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
        vocabulary = Vocabulary(
            mapping(parse_json(vocab)), merges=[_pair(line) for line in lines if line.strip()]
        )
        if self.row is None:
            raise ValueError(f"no class for {' + '.join(PAIR_FILES)}")
        return self.row.build(vocabulary, self.options, self._names())

    def _add_tokens(self, tokenizer: Tokenizer, roles: list[Any], extra: list[Any]) -> None:
        """Add the tokens that the tokenizer lacks, in the order that gives them their ids."""
        from tokenizers import AddedToken

        present = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
        names = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokens = [token for _, token in sorted(self.added.items()) if repr(token) not in present]
        names |= {token.content for token in tokens}
        for token in [*roles, *extra]:
            added = AddedToken(token, special=True) if isinstance(token, str) else token
            if added.content not in names:
                names.add(added.content)
                tokens.append(added)
        special = {str(getattr(token, "content", token)) for token in roles}
        for token in tokens:
            token.special = token.special or token.content in special
        tokenizer.add_tokens(tokens)

    def _surround(self, tokenizer: Tokenizer, roles: Mapping[str, str]) -> None:
        """Declare what stands around a text."""
        from tokenizers.processors import TemplateProcessing

        template = self.row.surround if self.row else None
        if FAST_FILE in self.files and template is None:
            return
        if not template:
            template = [
                *(["bos_token"] if self.options.get("add_bos_token") else []),
                "$A",
                *(["eos_token"] if self.options.get("add_eos_token") else []),
            ]
        single = [roles.get(token, token) for token in template if token == "$A" or token in roles]
        special = [fromkey for fromkey in dict.fromkeys(single) if fromkey != "$A"]
        tokenizer.post_processor = TemplateProcessing(
            single=single,
            pair=[*single, *("$B" if token == "$A" else token for token in single)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in special],
        )


def _slow_row(
    name: str, named: str | None, files: Mapping[str, bytes], options: Mapping[str, Any]
) -> TokenizerClass | None:
    """The row of a class without tokenizer.json; None: transformers' plain reading of pieces.

    Raises CheckpointError for a class that is unknown or does not read these files.
    """
    slow_name = None if named is None else named.removesuffix("Fast")
    slow = _slow_files(files)
    if (
        name == BACKEND
        and slow == (MODEL_FILE,)
        and not (slow_name in CLASSES and CLASSES[slow_name].unigram)
    ):
        return None
    if name == BACKEND and slow_name is not None:
        name = slow_name
    reads = sorted(key for key, row in CLASSES.items() if row.slow == slow)
    if name not in reads:
        custom = ", whose code is not run," if "auto_map" in options else ""
        files_present = " + ".join(slow)
        message = (
            f"the tokenizer's class{custom} is not known for {files_present} without a {FAST_FILE}"
        )
        raise CheckpointError(
            problem(message, got=named or "no tokenizer_class", choices=reads, change=ADVICE)
        )
    return CLASSES[name]


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The mapping in a JSON file; {} without it. Raises CheckpointError for a damaged one."""
    try:
        return mapping(parse_json(files.get(name, b"{}")))
    except ValueError as error:
        raise CheckpointError(problem(f"{name} is damaged: {error}", change=ADVICE)) from error


def _added_tokens(
    files: Mapping[str, bytes], options: dict[str, Any], fast: Mapping[str, Any]
) -> dict[int, AddedToken]:
    """Id -> token of the files beside the main one.

    Without `added_tokens_decoder`, which tokenizer_config.json has since transformers 4.34, the
    older files count; special_tokens_map.json then goes into `options`.
    """
    if "added_tokens_decoder" in options:
        tokens = mapping(options["added_tokens_decoder"]).items()
        return {int(number): _required(token) for number, token in tokens}
    for key, value in _json(files, SPECIAL_MAP).items():
        options[key] = {**value, "special": True} if isinstance(value, dict) else value
    named = (*(options.get(role) for role in _ROLES), *_listed(options.get(_EXTRA)))
    special = {getattr(token, "content", token) for token in map(_token, named)}
    added = {
        number: _added_token(text, special=text in special)
        for text, number in _json(files, ADDED_TOKENS).items()
    }
    for token in fast.get("added_tokens") or ():
        added[token["id"]] = _required(token)
    return added


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _added_token(text: str, *, special: bool, normalized: bool | None = None) -> AddedToken:
    from tokenizers import AddedToken

    return AddedToken(
        text, special=special, normalized=not special if normalized is None else normalized
    )


def _token(value: Any) -> Any:
    """A special token as the files write it: its name, or an AddedToken; None for neither."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _required(value)
    return value if isinstance(value, str) or hasattr(value, "content") else None


def _required(fields: Any) -> AddedToken:
    from tokenizers import AddedToken

    fields = mapping(fields)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{key: fields[key] for key in flags if key in fields})


def _pair(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def _charsmap(normalizer: Any) -> bytes:
    """The compiled normalization in a tokenizer.json; b"" without one."""
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    texts = (step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled")
    return base64.b64decode(next(texts, ""))


def _merges(tokens: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that makes a piece, in the order of the pieces' ids."""
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in tokens and token[cut:] in tokens:
                yield token[:cut], token[cut:]


def _declared(model: SentencePieceModel) -> list[AddedToken]:
    """The control and user-defined pieces, which are found in a text before it is cut."""
    return [
        _added_token(piece.text, special=piece.kind == CONTROL, normalized=False)
        for piece in model.pieces
        if piece.kind in (CONTROL, USER_DEFINED)
    ]


def _roles_of(model: SentencePieceModel) -> dict[str, str]:
    named = {
        "bos_token": (model.bos_id, model.bos_piece),
        "eos_token": (model.eos_id, model.eos_piece),
        "unk_token": (model.unk_id, model.unk_piece),
    }
    return {role: piece for role, (number, piece) in named.items() if number >= 0}


def _plain_pieces(model: SentencePieceModel, added: Mapping[int, AddedToken]) -> Tokenizer:
    """A SentencePiece model as transformers reads it for no class in particular."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = [(piece.text, piece.score) for piece in model.pieces]
    fallback = model.byte_fallback
    if model.algorithm == UNIGRAM:
        kind: Any = models.Unigram(pieces, model.unk_id, byte_fallback=fallback)
    else:
        tokens = {text: index for index, (text, _) in enumerate(pieces)}
        merges = list(_merges(tokens))
        for number, token in added.items():
            unused = number < len(pieces) and token.content not in tokens
            if unused and pieces[number][0] in tokens:
                tokens[token.content] = tokens.pop(pieces[number][0])
        kind = models.BPE(
            tokens, merges, unk_token=model.unk_piece, fuse_unk=True, byte_fallback=fallback
        )
    tokenizer = Tokenizer(kind)
    charsmap = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*charsmap, normalizers.Replace(" ", SPACE)])
    bytes_too = [decoders.ByteFallback(), decoders.Fuse()] if fallback else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *bytes_too])
    return tokenizer
