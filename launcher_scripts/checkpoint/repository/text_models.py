"""The text models of a model repository: text to ids, ids to text, and text to text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import FILE_NAME as MANIFEST_NAME
from launcher_scripts.checkpoint.fastertransformer.manifest import check_file_list, write_file_list
from launcher_scripts.common import text_deltas, tokenizer
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import parse_json
from launcher_scripts.common.rendering import render
from launcher_scripts.common.tokenizer import (
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    tokenizer_files,
)
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract import text_names
from launcher_scripts.contract.text import TextContract
from launcher_scripts.models import family_of
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.family import ModelConfig

# The roles of the model that takes text and gives text; one code serves both.
TEXT_TO_TEXT = ("ensemble", "text")
TOKEN_MODEL = "token_model"  # the parameter that names the model behind it
TOKENIZER = Path(tokenizer.__file__).parent
_COMPILED = shutil.ignore_patterns("__pycache__")
# The sources whose tokenizers are transformers' own.
TRANSFORMERS = ("huggingface", "gguf")
# Those of the token model's inputs that every text request has.
_ENCODED = ("INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN")


def write_text_models(
    folder: Path,
    settings: ExportSettings,
    checkpoint: FTCheckpoint,
    text: TextContract,
    names: dict[str, str],
) -> None:
    """The text models as they will stand in the repository, inside `folder`.

    names: role -> folder
    """
    for role, name in names.items():
        inputs, outputs = text.tensors(role, settings.data_type)
        config = render(
            "text_model.pbtxt.j2",
            name=name,
            max_batch_size=settings.max_batch_size,
            decoupled=settings.decoupled if role in TEXT_TO_TEXT else None,
            inputs=inputs,
            outputs=outputs,
            parameters=parameters(role, settings, checkpoint, text),
        )
        version_dir = folder / name / "1"
        version_dir.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
        for path in text_model_files(role, checkpoint.folder):
            shutil.copyfile(path, version_dir / path.name)
        shutil.copytree(TOKENIZER, version_dir / TOKENIZER.name, ignore=_COMPILED)
        write_file_list(version_dir)


def check_text_models(repository: str) -> None:
    """Raise CheckpointError when code or tokenizers of a repository are not as they were exported.

    What is in a cloud storage, or was not written by write_text_models, is not looked at.
    """
    if "://" in repository:
        return
    problems = Problems(
        f"the text models of {repository} (export again; or remove their manifest.json to serve "
        "them as they are)"
    )
    for path in sorted(Path(repository).glob(f"*/1/{MANIFEST_NAME}")):
        check_file_list(path.parent, problems)
    problems.raise_if_any(CheckpointError)


def parameters(
    role: str, settings: ExportSettings, checkpoint: FTCheckpoint, text: TextContract
) -> dict[str, Any]:
    """Parameters of a text model's code, as config.pbtxt gives them."""
    values: dict[str, Any] = {}
    if role != "postprocessing":
        values |= encoding_parameters(checkpoint)
    if settings.interactive:
        values["leading_axes"] = 1
    if role in TEXT_TO_TEXT:
        values[TOKEN_MODEL] = settings.model_name
        values |= {source: name for name, source in text.model_inputs.items() if source in _ENCODED}
        values |= {"prompt_counts": 1} if text.prompt_counts else {}
    return values


def encoding_parameters(checkpoint: FTCheckpoint) -> dict[str, Any]:
    """Parameters of the encoding: padding, and the tokens around an input if the model was trained
    so.

    The T5 models of transformers end their inputs with the end token, NeMo's do not; those around
    the inputs of a BART, a T5Gemma or a decoder from transformers are the tokenizer's.
    """
    config = checkpoint.config
    parameters: dict[str, Any] = {
        "pad_id": config.end_id if config.pad_id is None else config.pad_id
    }
    source = checkpoint.manifest.source if checkpoint.manifest is not None else {}
    family, is_transformers = family_of(config).name, source.get("format") in TRANSFORMERS
    gemma = family == "t5" and getattr(config, "rotary_base", None)
    if family == "bart" or gemma or (family == "gpt" and is_transformers):
        parameters |= surrounding(config, load_tokenizer(checkpoint.folder))
    elif family == "t5" and is_transformers:
        parameters["closing_id"] = config.end_id
    if more := further_end_ids(checkpoint.folder, config):
        parameters["end_ids"] = " ".join(map(str, more))
    return parameters


def further_end_ids(folder: Path, config: Any) -> list[int]:
    """Return the IDs that end a text besides config.end_id, from generation_config.json.

    Nothing where that is not among them: then the configuration chose another.
    """
    path = folder / tokenizer.GENERATION_FILE
    if not path.is_file():
        return []
    end_ids = parse_json(path.read_bytes()).get("eos_token_id")
    ends = [item for item in end_ids if type(item) is int] if isinstance(end_ids, list) else []
    if config.end_id not in ends:
        return []
    return [end for end in ends if end != config.end_id and 0 <= end < config.vocab_size]


def surrounding(config: ModelConfig, files: Tokenizer) -> dict[str, Any]:
    """Return the IDs before and after an input, which of them is the source's language, and the
    decoder's first IDs; several are separated by blanks.
    """
    try:
        opening, closing = files.surround()
    except TokenizerError as error:
        raise CheckpointError(problem(str(error), change="export.model.tokenizer")) from error
    parameters: dict[str, Any] = {
        "opening_id": " ".join(map(str, opening)),
        "closing_id": " ".join(map(str, closing)),
    }
    fixed = (files.start_id, files.end_id, files.pad_id, config.end_id)
    languages = [item for item in (*opening, *closing) if item not in fixed]
    if languages and isinstance(config, BartConfig) and config.norm_placement == "pre":
        parameters |= {"language_id": languages[0], "start_id": config.start_id}
    forced = getattr(config, "forced_bos_id", None)
    if forced is not None:
        parameters["decoder_id"] = f"{config.start_id} {forced}"
    return {name: value for name, value in parameters.items() if value != ""}


def text_model_files(role: str, checkpoint_dir: Path) -> list[Path]:
    """Files in the version folder of a text model, besides the package of tokenizers."""
    backends = Path(__file__).resolve().parents[2] / "backends"
    code: dict[str, tuple[str, ...]] = {
        "preprocessing": ("preprocessing/model.py", "text_encoding.py"),
        "postprocessing": ("postprocessing/model.py", text_deltas.__file__),
    }
    common_files = (
        "client_watch.py",
        "text_encoding.py",
        text_deltas.__file__,
        text_names.__file__,
    )
    text = () if role in code else (backends / "text").glob("[a-z]*.py")
    return [
        *text,
        *(backends / name for name in code.get(role, common_files)),
        backends / "text_parameters.py",
        backends / "text_tensors.py",
        backends / "older_servers.py",
        *tokenizer_files(checkpoint_dir),
    ]
