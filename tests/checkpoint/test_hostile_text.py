"""A tokenizer or a chat template that is an attack is refused before weights are written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.tokenizers import text_probe
from launcher_scripts.checkpoint.tokenizers.text_probe import (
    check_templates,
    probed_tokenizer,
    unified_files,
)
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.limited_process import WorkLimits
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import refused_export
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint.tokenizer_folders import fast

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits that an attack reaches soon."""
    monkeypatch.setattr(text_probe, "TOKENIZER_LIMITS", WorkLimits(2.0, 300.0, 256))
    monkeypatch.setattr(text_probe, "TEMPLATE_LIMITS", WorkLimits(1.0, 300.0, 256))
    _forget()
    yield
    _forget()


def _forget() -> None:
    text_probe._tokenizer_processes.cache_clear()
    text_probe._template_processes.cache_clear()


def altered(**changes: Any) -> dict[str, bytes]:
    content = json.loads(fast("<s>")["tokenizer.json"]) | changes
    return {"tokenizer.json": json.dumps(content).encode()}


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def split(expression: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return {**step, "invert": False}


DOUBLING = {"type": "Sequence", "normalizers": [replace("a", "aa")] * 40}
TOKEN = {"id": 500, "content": "a", "normalized": True, "special": False}
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False}
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "a token that doubles": (
        {"normalizer": DOUBLING, "added_tokens": [{**TOKEN, **FLAGS}]},
        "exceeds a limit: it (needs|takes) more",
    ),
    "a text that grows a hundredfold": (
        {"normalizer": replace("a", "a b" * 100)},
        "makes too many ids of 'a",
    ),
    "an expression without an end": (
        {"pre_tokenizer": split(r"(a+)+$")},
        "cannot read 'aaaaaaaaaaaaaaaa'.*refuses this text|takes more than 2 s of a processor",
    ),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_is_tried_within_limits(case: str) -> None:
    changes, message = TOKENIZERS[case]
    with pytest.raises(CheckpointError, match=message):
        probed_tokenizer(altered(**changes))
    assert probed_tokenizer(altered()).encode("a b")


def test_a_tokenizer_is_made_within_limits() -> None:
    """Tokens that the configuration adds are normalized when they are added."""
    config = {"added_tokens_decoder": {"500": {"content": "aaa", "normalized": True}}}
    files = {**altered(normalizer=DOUBLING), "tokenizer_config.json": json.dumps(config).encode()}
    with pytest.raises(CheckpointError, match="exceeds a limit"):
        unified_files(files, {})


TEMPLATES = {
    LOOP: "default: it takes more than 1 s of a processor",
    "{{ 'a' * 1500000000 }}": "default: it needs more than 256 MiB of memory",
    "{% for i in range(99) %}{{ 'a' * 100000 }}{% endfor %}": "longer than 1048576 characters",
    "{% if messages %}": "default: line 1: ",
    "{{ " + "(" * 3000 + ")" * 3000 + " }}": "default: ",
}


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_is_rendered_within_limits(template: str) -> None:
    with pytest.raises(CheckpointError, match=TEMPLATES[template]):
        check_templates({"default": template})


def test_what_a_template_refuses_by_itself_is_allowed() -> None:
    check_templates({"default": "{{ raise_exception('no system') }}", "rag": "{{ documents.x }}"})


def test_an_export_is_refused_before_weights_are_written(tmp_path: Path) -> None:
    llama = DECODERS["llama"]
    model = dataclasses.replace(llama, values={**llama.values, "vocab_size": 420})
    model.make().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(altered()["tokenizer.json"])
    path, auto = tmp_path / "hf" / "chat_template.jinja", TokenizerSettings("auto")
    path.write_text("{% if messages %}")
    refused_export(
        tmp_path / "hf", tmp_path, r"the chat template:\s.*default: line 1", tokenizer=auto
    )
    path.unlink()
    os.mkfifo(path)
    message = r"chat_template\.jinja is not a plain file"
    refused_export(tmp_path / "hf", tmp_path, message, tokenizer=auto)
    assert not (tmp_path / "m").exists()
