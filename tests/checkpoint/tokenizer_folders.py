"""Small folders of tokenizers, by class and by the files that hold them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    ByteLevelBPETokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Der schnelle braune Fuchs springt über den faulen Hund; die Straße ist lang.",
    "Le renard brun et rapide saute par-dessus le chien paresseux, déjà endormi.",
    "A server answers many requests at once: 12 tokens, 345 tokens, 6789 tokens.",
    "I'LL DON'T it's we're you've 'tis user assistant system hello world",
]


@dataclass(frozen=True)
class Folder:
    """Files by name (bytes, text, or what becomes JSON) and the model's type."""

    files: dict[str, Any]
    model_type: str = "llama"
    config: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        values = {**self.files, **self.more, "config.json": {"model_type": self.model_type}}
        if self.config is not None:
            values["tokenizer_config.json"] = self.config
        folder.mkdir(exist_ok=True)
        for name, value in values.items():
            text = value if isinstance(value, bytes | str) else json.dumps(value)
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder


@cache
def pieces(algorithm: str, **options: Any) -> bytes:
    """A SentencePiece model."""
    model = io.BytesIO()
    size = 420 if options.get("byte_fallback") else 150
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 3),
        model_writer=model,
        model_type=algorithm,
        vocab_size=size,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@cache
def pairs(*first: str) -> tuple[dict[str, int], list[str]]:
    """Vocabulary and merges of bytes; first: tokens with the first ids."""
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(LINES * 2, vocab_size=400, min_frequency=2, special_tokens=[*first])
    model = json.loads(trainer.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


def slow_pairs(*first: str, last: str | None = None) -> dict[str, Any]:
    vocab, merges = pairs(*first)
    vocab = vocab if last is None else {**vocab, last: len(vocab)}
    return {"vocab.json": vocab, "merges.txt": "\n".join(["#version: 0.2", *merges, ""])}


def fast(*special: str, start: str | None = None, added: tuple[str, ...] = ()) -> dict[str, Any]:
    """A tokenizer.json of bytes, with an expression of its own."""
    vocab, merges = pairs()
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in merges]))
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(False, True, False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    tokenizer.add_tokens([*added])
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]
        )
    return {"tokenizer.json": tokenizer.to_str()}


def added(start: int, *tokens: str, **flags: bool) -> dict[str, Any]:
    """added_tokens_decoder: special tokens from the id `start` on."""
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        str(start + index): {"content": token, "special": True, **usual, **flags}
        for index, token in enumerate(tokens)
    }


_CHAT = ("<|im_start|>", "<|im_end|>")
_LLAMA = pieces("bpe", byte_fallback=True, user_defined_symbols=("[INST]",), split_digits=True)
_SIZE = sentencepiece.SentencePieceProcessor(model_proto=_LLAMA).vocab_size()
_MODEL = {"tokenizer.model": _LLAMA}
_NAMED = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
_FIRST = added(0, "<unk>", "<s>", "</s>") | added(_SIZE, *_CHAT)
_LATER = {
    **added(_SIZE + 2, "<tool>", special=False, normalized=True),
    **added(_SIZE + 3, " <sp> ", special=False, lstrip=True),
}
_DECODER = {"added_tokens_decoder": _FIRST | _LATER}
_GEMMA = {
    "tokenizer.model": pieces(
        "bpe",
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        add_dummy_prefix=False,
        user_defined_symbols=("<mask>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n"),
        remove_extra_whitespaces=False,
    )
}
_GEMMA_SIZE = sentencepiece.SentencePieceProcessor(
    model_proto=_GEMMA["tokenizer.model"]
).vocab_size()
_GEMMA_NAMED = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "bos_token": "<bos>"}
_T5 = {"spiece.model": pieces("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)}
_FAIRSEQ = {"sentencepiece.bpe.model": pieces("unigram")}
_END = "<|endoftext|>"
_BYTES = len(pairs()[0])
_GPT2_SIZE = len(pairs(_END)[0])
_FAST = fast("<|begin_of_text|>", "<|eot_id|>", start="<|begin_of_text|>")
_PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>"}
_QWEN = {
    "added_tokens_decoder": added(_BYTES, _END, *_CHAT),
    "eos_token": "<|im_end|>",
    "pad_token": _END,
    "bos_token": None,
    "unk_token": None,
}
_SENTINELS = [f"<extra_id_{index}>" for index in range(100)]
_MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": True}
_SPACES = {
    str(_GPT2_SIZE + index): {"content": " " * (9 - index), "special": False, "normalized": True}
    for index in range(8)
}


def _class(name: str, **more: Any) -> dict[str, Any]:
    return {"tokenizer_class": name, **more}


# Folders that transformers reads, by class.
FOLDERS: dict[str, Folder] = {
    "llama": Folder(_MODEL, config={**_NAMED, **_DECODER, "legacy": False, "add_bos_token": True}),
    "llama legacy": Folder(_MODEL, config={**_NAMED, **_DECODER, "legacy": True}),
    "llama adds its end": Folder(
        _MODEL, config={**_NAMED, **_DECODER, "add_eos_token": True, "pad_token": "<pad>"}
    ),
    "llama without a prefix": Folder(
        _MODEL, config={**_NAMED, **_DECODER, "add_prefix_space": False}
    ),
    "llama before added_tokens_decoder": Folder(
        _MODEL,
        config=_NAMED,
        more={
            "added_tokens.json": {token: _SIZE + index for index, token in enumerate(_CHAT)},
            "special_tokens_map.json": {
                "eos_token": {"content": "<|im_end|>", "normalized": False},
                "additional_special_tokens": [_CHAT[0]],
            },
        },
    ),
    "llama without a class": Folder(_MODEL, config={"bos_token": "<s>"}),
    "llama alone": Folder(_MODEL),
    "code llama": Folder(_MODEL, config=_class("CodeLlamaTokenizer")),
    "mistral": Folder(_MODEL, "mistral", config={**_NAMED, **_DECODER}),
    "phi-3": Folder(
        _MODEL,
        "phi3",
        config={**_NAMED, "added_tokens_decoder": _FIRST | added(_SIZE, *_CHAT, rstrip=True)},
    ),
    "gemma": Folder(_GEMMA, "gemma2", config=_GEMMA_NAMED),
    "gemma's turns": Folder(
        _GEMMA,
        "gemma",
        config={**_GEMMA_NAMED, "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]},
    ),
    "gemma's images": Folder(
        _GEMMA,
        "gemma3_text",
        config={
            **_GEMMA_NAMED,
            "added_tokens_decoder": added(_GEMMA_SIZE, "<image_soft_token>"),
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "t5": Folder(_T5, "t5", config=_class("T5Tokenizer", extra_ids=100)),
    "t5 alone": Folder(_T5, "t5"),
    "mt5 of five sentinels": Folder(
        _T5,
        "mt5",
        config=_class("T5Tokenizer", extra_ids=5, additional_special_tokens=_SENTINELS[:5]),
    ),
    "t5 before added_tokens_decoder": Folder(
        _T5,
        "t5",
        config={},
        more={"special_tokens_map.json": {"additional_special_tokens": _SENTINELS}},
    ),
    "gpt2 with pieces": Folder(_T5, "gpt2", config=_class("T5Tokenizer", extra_ids=0)),
    "gpt2": Folder(slow_pairs(_END), "gpt2", config=_class("GPT2Tokenizer", eos_token=_END)),
    "gpt2 alone": Folder(slow_pairs(_END), "gpt2"),
    "gpt2 with a prefix": Folder(
        slow_pairs(_END),
        "gpt2",
        config=_class("GPT2Tokenizer", add_prefix_space=True, add_bos_token=True),
    ),
    "gpt2 with added tokens": Folder(
        slow_pairs(_END),
        "gpt2",
        config=_class("GPT2Tokenizer", pad_token="<pad>"),
        more={"added_tokens.json": {"<pad>": _GPT2_SIZE, "<|user|>": _GPT2_SIZE + 1}},
    ),
    "gpt2 without an end": Folder(slow_pairs(), "gpt2", config=_class("GPT2Tokenizer")),
    "opt": Folder(
        slow_pairs("<s>", "<pad>", "</s>", "<unk>"),
        "opt",
        config=_class("GPT2Tokenizer", add_bos_token=True, bos_token="</s>", eos_token="</s>"),
    ),
    "codegen": Folder(
        slow_pairs(_END),
        "codegen",
        config=_class("CodeGenTokenizer"),
        more={"added_tokens.json": {" " * (9 - index): _GPT2_SIZE + index for index in range(8)}},
    ),
    "phi": Folder(
        slow_pairs(_END), "phi", config=_class("CodeGenTokenizer", added_tokens_decoder=_SPACES)
    ),
    "starcoder2": Folder(slow_pairs(_END), "starcoder2", config=_class("GPT2Tokenizer")),
    "gpt-neox": Folder(slow_pairs(_END), "gpt_neox", config=_class("GPTNeoXTokenizer")),
    "cohere": Folder(slow_pairs(), "cohere", config=_class("CohereTokenizer", add_bos_token=True)),
    "qwen2": Folder(
        slow_pairs(),
        "qwen2",
        config={
            **_QWEN,
            "tokenizer_class": "Qwen2Tokenizer",
            "additional_special_tokens": [*_CHAT],
        },
    ),
    "qwen3": Folder(slow_pairs(), "qwen3", config={**_QWEN, "tokenizer_class": "Qwen2Tokenizer"}),
    "qwen2 alone": Folder(slow_pairs(), "qwen2"),
    "bart": Folder(
        slow_pairs("<s>", "<pad>", "</s>", "<unk>", last="<mask>"),
        "bart",
        config=_class("BartTokenizer", mask_token=_MASK),
    ),
    "bart alone": Folder(slow_pairs("<s>", "<pad>", "</s>", "<unk>", last="<mask>"), "bart"),
    "mbart": Folder(_FAIRSEQ, "mbart", config=_class("MBartTokenizer")),
    "mbart alone": Folder(_FAIRSEQ, "mbart"),
    "mbart50": Folder(_FAIRSEQ, "mbart", config=_class("MBart50Tokenizer", src_lang="fr_XX")),
    "pegasus": Folder(_T5, "pegasus", config=_class("PegasusTokenizer")),
    "pegasus alone": Folder(_T5, "pegasus"),
    "fast": Folder(_FAST, config={**_PLAIN, "eos_token": "<|eot_id|>"}),
    "fast of bytes and Llama's class": Folder(
        _FAST, config={**_PLAIN, "tokenizer_class": "LlamaTokenizerFast", "pad_token": "[PAD]"}
    ),
    "fast alone": Folder(_FAST),
    "fast with a map": Folder(
        _FAST,
        more={"special_tokens_map.json": {"pad_token": "<pad>", "bos_token": "<|begin_of_text|>"}},
    ),
    "fast with old added tokens": Folder(
        _FAST, config=_PLAIN, more={"added_tokens.json": {"<new>": _BYTES + 2}}
    ),
    "fast with tokens of its configuration": Folder(
        _FAST,
        config={
            **_PLAIN,
            "added_tokens_decoder": {
                **added(_BYTES, "<|begin_of_text|>", lstrip=True),
                **added(_BYTES + 2, *_CHAT),
                **added(_BYTES + 4, "<tool>", special=False),
            },
            "extra_special_tokens": {"audio": "<audio>"},
        },
    ),
    "fast of an unknown class": Folder(_FAST, config=_class("MyTokenizer")),
    "fast qwen2, whatever it names": Folder(_FAST, "qwen2", config=_PLAIN),
    "fast qwen3 of no class": Folder(_FAST, "qwen3", config=_PLAIN),
    "fast qwen3": Folder(
        _FAST, "qwen3", config={**_PLAIN, "tokenizer_class": "Qwen2TokenizerFast"}
    ),
    "fast gpt2": Folder(fast(_END), "gpt2", config=_class("GPT2TokenizerFast", add_bos_token=True)),
    "fast gpt-neox": Folder(
        fast(_END, start=_END, added=("  ",)), "gpt_neox", config=_class("GPTNeoXTokenizerFast")
    ),
    "fast cohere": Folder(
        fast("<BOS_TOKEN>", start="<BOS_TOKEN>"), "cohere2", config=_class("CohereTokenizerFast")
    ),
    "fast granite": Folder(fast(_END), "granite", config=_class("GPT2Tokenizer")),
    "fast bloom": Folder(fast("<s>"), "bloom", config=_class("BloomTokenizerFast")),
}
# Folders whose tokenizer is refused by name.
UNKNOWN: dict[str, Folder] = {
    "pairs": Folder(slow_pairs(), config=_class("MyTokenizer")),
    "pieces": Folder(_MODEL, config=_class("MyTokenizer")),
    "custom code": Folder(
        _MODEL, config=_class("MyTokenizer", auto_map={"AutoTokenizer": ["my.MyTokenizer", None]})
    ),
    "pairs of no class": Folder(slow_pairs()),
    "a class of pairs": Folder(_MODEL, config=_class("Qwen2Tokenizer")),
    "a class of pieces": Folder(slow_pairs(), config=_class("LlamaTokenizer")),
}
