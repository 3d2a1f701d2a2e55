"""Chat templates, generation defaults and the rule for BOS travel from a Hugging Face folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.model_repository import ModelRepository, encoding_parameters
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.tokenizer import chat_templates, load_tokenizer, tokenizer_files
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from tests.checkpoint.exporting import change_json, export_folder
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS

WORDS = ("<unk>", "<s>", "</s>", "<eot>", "hello", "world", "the", "fox")
TEXTS = ("hello world", "", "the fox <s> hello")
TEMPLATE = "{% for message in messages %}{{ message.content }}<eot>{% endfor %}"
AUTO = TokenizerSettings("auto")


def backend(*, starts: bool = False) -> Tokenizer:
    """A tokenizer of words; one that starts texts does so by its own post-processor."""
    found = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    found.pre_tokenizer = Whitespace()
    found.add_special_tokens(["<s>", "</s>", "<eot>"])
    if starts:
        found.post_processor = processors.TemplateProcessing(
            single="<s>:0 $A:0", pair="<s>:0 $A:0 $B:1", special_tokens=[("<s>", 1)]
        )
    return found


def save_fast(folder: Path, *, starts: bool = False, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers writes them, with `config`."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend(starts=starts), bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    change_json(file, **{"tokenizer_class": "PreTrainedTokenizerFast", **config})


def save_model(folder: Path, name: str = "llama") -> None:
    DECODERS[name].make().save_pretrained(folder)


def prompt(tokenizer: Any, text: str) -> list[int]:
    """The ids of a prompt, as the text models make them."""
    before, after = tokenizer.surround()
    return [*before, *tokenizer.encode(text), *after]


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_prompts_get_what_transformers_adds(
    tmp_path: Path, said: dict[str, Any], starts: bool
) -> None:
    save_fast(tmp_path, starts=starts, **said)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in TEXTS:
        assert prompt(ours, text) == theirs(text).input_ids
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids


def template_in_a_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def template_in_the_configuration(folder: Path) -> None:
    save_fast(folder, chat_template=TEMPLATE)


def template_of_a_processor(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@pytest.mark.parametrize(
    "put", [template_in_a_file, template_in_the_configuration, template_of_a_processor]
)
def test_a_chat_template_reaches_the_text_models(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf")
    put(tmp_path / "hf")
    texts = repository(tmp_path) / "text" / "1"
    assert templates_of(texts) == {"default": TEMPLATE}
    if put is not template_of_a_processor:  # which its tokenizers do not read
        assert AutoTokenizer.from_pretrained(texts).chat_template == TEMPLATE


def test_several_chat_templates_reach_the_text_models(tmp_path: Path) -> None:
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf")
    template_in_a_file(tmp_path / "hf")
    more = tmp_path / "hf" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    texts = repository(tmp_path) / "text" / "1"
    expected = {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    assert templates_of(texts) == expected
    assert AutoTokenizer.from_pretrained(texts).chat_template == expected
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == expected


def test_chat_templates_by_name(tmp_path: Path) -> None:
    """transformers reads such a mapping, too, but does not write it."""
    expected = {"default": TEMPLATE, "rag": "{{ documents }}"}
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": expected}))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == expected
    assert templates_of(export_folder(tmp_path / "hf", tmp_path, tokenizer=AUTO)) == expected


@pytest.mark.parametrize(
    "templates",
    [[{"name": "default"}], [{"name": "default", "template": 3}], {"default": None}, 3],
    ids=str,
)
def test_damaged_chat_templates_are_an_error_of_the_checkpoint(
    tmp_path: Path, templates: Any
) -> None:
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    with pytest.raises(CheckpointError, match=r"chat templates of tokenizer_config\.json"):
        export_folder(tmp_path / "hf", tmp_path, tokenizer=AUTO)


def test_generation_defaults_and_all_end_tokens_reach_the_text_models(tmp_path: Path) -> None:
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf", starts=True)
    said = GenerationConfig(eos_token_id=[2, 3, 7, 99], temperature=0.6, top_p=0.9, do_sample=True)
    said.save_pretrained(tmp_path / "hf")
    root = repository(tmp_path)
    for role in ("text", "ensemble", "preprocessing"):
        assert GenerationConfig.from_pretrained(root / role / "1").to_dict() == said.to_dict()
        config = (root / role / "config.pbtxt").read_text()
        assert 'key: "end_ids"\n  value: { string_value: "3 7" }' in config  # 99 is not a token
        assert 'key: "opening_id"\n  value: { string_value: "1" }' in config
    assert notes(root) == ["the checkpoint has no chat template"]


def test_config_json_stands_in_for_generation_config(tmp_path: Path) -> None:
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    said = {"eos_token_id": [2, 3], "repetition_penalty": 1.2, "temperature": None}
    change_json(tmp_path / "hf" / "config.json", **said)
    found = json.loads((repository(tmp_path) / "text" / "1" / "generation_config.json").read_text())
    assert found == {"bos_token_id": 1, "eos_token_id": [2, 3], "repetition_penalty": 1.2}


def test_an_end_token_of_the_settings_is_the_only_one(tmp_path: Path) -> None:
    save_model(tmp_path / "hf")
    save_fast(tmp_path / "hf")
    GenerationConfig(eos_token_id=[2, 3]).save_pretrained(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, tokenizer=TokenizerSettings("auto", end_id=5))
    assert "end_ids" not in encoding_parameters(FTCheckpoint.open(folder))


def test_a_t5_is_closed_once(tmp_path: Path) -> None:
    ENCODER_DECODERS["t5_v1_1"].make().save_pretrained(tmp_path / "hf")
    save_fast(tmp_path / "hf", add_eos_token=True)
    folder = export_folder(tmp_path / "hf", tmp_path, tokenizer=AUTO)
    parameters = encoding_parameters(FTCheckpoint.open(folder))
    assert parameters["closing_id"] == 1
    assert "opening_id" not in parameters


def test_what_a_checkpoint_lacks_is_noted(tmp_path: Path) -> None:
    save_model(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    export_folder(tmp_path / "hf", tmp_path)
    assert notes(tmp_path) == []  # no tokenizer, no text
    (tmp_path / "own").mkdir()
    save_fast(tmp_path / "own")
    own = TokenizerSettings("files", model=str(tmp_path / "own" / "tokenizer.json"))
    export_folder(tmp_path / "hf", tmp_path, tokenizer=own, overwrite=True)
    assert notes(tmp_path) == [
        "the checkpoint has no chat template",
        "the checkpoint has no generation_config.json",
    ]


def repository(folder: Path) -> Path:
    """The model repository of an export of `folder`/hf."""
    root = folder / "repository"
    export_folder(folder / "hf", root, tokenizer=AUTO)
    settings = ExportSettings(
        model_name="m",
        checkpoint_path=str(folder / "hf"),
        triton_model_dir=str(root / "m"),
        model_type="gpt3",
        tokenizer=AUTO,
    )
    ModelRepository(root).write(settings)
    return root


def templates_of(folder: Path) -> dict[str, str]:
    return chat_templates({path.name: path.read_bytes() for path in tokenizer_files(folder)})


def notes(folder: Path) -> list[str]:
    (manifest,) = (folder / "m").glob("*/1-gpu/manifest.json")
    return json.loads(manifest.read_text())["source"].get("notes", [])
