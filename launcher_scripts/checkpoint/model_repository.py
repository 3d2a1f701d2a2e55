"""The folder Triton is given: the exported model, and the text models around it, text to ids, ids
to text, and text to text.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import FILE_NAME as MANIFEST_NAME
from launcher_scripts.checkpoint.fastertransformer.manifest import (
    check_file_list,
    check_files,
    reject_links,
    write_file_list,
)
from launcher_scripts.checkpoint.formats.nemo_config import ADVICE
from launcher_scripts.checkpoint.layout.tasks import compute_type
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import check_vocabulary
from launcher_scripts.common import text_deltas, tokenizer
from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems, lookup, problem
from launcher_scripts.common.files import atomic_write, parse_json
from launcher_scripts.common.hosts import visible_gpus
from launcher_scripts.common.rendering import pbtxt, render
from launcher_scripts.common.tokenizer import (
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    tokenizer_files,
)
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract import text_names
from launcher_scripts.contract.contracts import (
    CONTRACTS,
    CONTROLS,
    MAX_SEQUENCE_IDLE_MICROSECONDS,
    served_contract,
)
from launcher_scripts.contract.text import TextContract
from launcher_scripts.models import family_of
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES, TEXT_MODELS

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
            parameters=text_model_parameters(role, settings, checkpoint, text),
        )
        version_dir = folder / name / "1"
        version_dir.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
        for file_name, path in text_model_files(role, checkpoint.folder).items():
            shutil.copyfile(path, version_dir / file_name)
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


def text_model_parameters(
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


def text_model_files(role: str, checkpoint_dir: Path) -> dict[str, Path]:
    """Files of the version folder of a text model by their names there, besides the package of
    tokenizers.
    """
    backends = Path(__file__).resolve().parents[1] / "backends"
    names = ["text_tensors.py", "triton_requests.py"]
    copied = [text_deltas.__file__] if role == "postprocessing" else []
    is_text_to_text = role in TEXT_TO_TEXT
    if is_text_to_text:
        names += ["text_channel.py", "text_requests.py"]
        copied = [text_deltas.__file__, text_names.__file__]
    files = [*(backends / name for name in names), *map(Path, copied)]
    model = backends / ("text_model.py" if is_text_to_text else f"{role}.py")
    return {
        "model.py": model,
        **{path.name: path for path in (*files, *tokenizer_files(checkpoint_dir))},
    }


KEY = "export.run.model_type"


def backend_model_type(model_type: str, config: ModelConfig) -> str:
    """The row of CONTRACTS that `model_type` means.

    Raises ConfigError when it is unknown, or cannot serve a model of these hyperparameters.
    """
    name = lookup(BACKEND_MODEL_TYPES, model_type, KEY)
    fitting = fitting_model_types(config)
    if model_type in fitting:
        return name
    suffix = " (an encoder alone)" if _encoder_only(config) else ""
    message = f"the checkpoint, of family {family_of(config).name}{suffix},"
    raise ConfigError(
        problem(
            f"{message} cannot be served as this model_type",
            got=model_type,
            choices=fitting,
            change=KEY,
        )
    )


def fitting_model_types(config: ModelConfig) -> list[str]:
    """The user's model_types that can serve a model of these hyperparameters, the usual first."""
    family, encoder_only = family_of(config).name, _encoder_only(config)
    return [
        key
        for key, row in BACKEND_MODEL_TYPES.items()
        if CONTRACTS[row].family == family and (CONTRACTS[row].encoder_only or not encoder_only)
    ]


def _encoder_only(config: ModelConfig) -> bool:
    return bool(getattr(config, "encoder_only", False))


# The engine takes what waits whenever it is free, so a request never waits for company.
MAX_QUEUE_DELAY_MICROSECONDS = 0


@dataclass(frozen=True)
class ModelRepository:
    """A Triton model repository at `root`."""

    root: Path

    def write(
        self,
        settings: ExportSettings,
        checkpoint: FTCheckpoint | None = None,
        tokenizer_dir: Path | None = None,
    ) -> list[str]:
        """Describe the exported checkpoint to Triton; returns the names of the models written.

        Everything is checked and rendered first and set in place by renaming, the model's own
        config.pbtxt last.

        checkpoint:    the one in settings.checkpoint_dir unless given
        tokenizer_dir: the folder of the tokenizer's files unless they are the checkpoint's
        Raises CheckpointError or ConfigError, and then leaves the repository as it was.
        """
        model_dir = Path(settings.triton_model_dir)
        check_model_name(settings)
        checkpoint = checkpoint or FTCheckpoint.open(settings.checkpoint_dir, verify=False)
        data_type = compute_type(settings, checkpoint.weight_data_type, visible_gpus())
        settings = replace(settings, data_type=data_type)
        model_type = backend_model_type(settings.model_type, checkpoint.config)
        contract = served_contract(model_type, sessions=settings.interactive)
        names = text_model_names(self, settings.model_name, contract.text.roles)
        text_models = settings.tokenizer.source != "none" and bool(names)
        targets = [model_dir / "config.pbtxt"]
        if text_models:
            text_checkpoint = replace(checkpoint, folder=tokenizer_dir or checkpoint.folder)
            check_exported_tokenizer(text_checkpoint)
            targets += [self.root / name for name in names.values()]
        if not (settings.overwrite or settings.reuse):
            reject_existing_models(targets)
        config = model_config(settings, checkpoint)
        staging = self.root.with_name(self.root.name + ".partial")
        reject_links(staging)
        shutil.rmtree(staging, ignore_errors=True)
        try:
            if text_models:
                write_text_models(staging / "new", settings, text_checkpoint, contract.text, names)
                for name in names.values():
                    exchange_folder(staging / "new" / name, self.root / name, staging / "old")
            atomic_write(model_dir / "config.pbtxt", config)
        except OSError as error:
            raise CheckpointError(f"cannot write the model repository: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return [settings.model_name, *(names.values() if text_models else ())]


def check_model_name(settings: ExportSettings) -> None:
    """Triton wants a model's name to be its folder's, and the text models keep theirs."""
    folder = Path(settings.triton_model_dir).name
    if folder != settings.model_name:
        raise ConfigError(
            problem(
                "the last folder of triton_model_dir must be the model's name",
                got=folder,
                choices=[settings.model_name],
                change="export.triton_deployment.triton_model_dir or export.run.model_train_name",
            )
        )
    if settings.model_name in TEXT_MODELS:
        raise ConfigError(
            problem(
                "the model's name is that of a text model",
                got=settings.model_name,
                change="export.run.model_train_name",
            )
        )


def text_model_names(
    repository: ModelRepository, model_name: str, roles: Iterable[str] = TEXT_MODELS
) -> dict[str, str]:
    """role -> folder of the text models around `model_name`.

    They have their plain names unless the repository's plain ensemble belongs to another model;
    then they carry the model's name in front.
    """
    ensemble = repository.root / "ensemble" / "config.pbtxt"
    reference = re.compile(
        rf'"{TOKEN_MODEL}"\s*value: {{ string_value: {re.escape(pbtxt(model_name))} '
    )
    is_foreign = ensemble.is_file() and not reference.search(ensemble.read_text(encoding="utf-8"))
    prefix = f"{model_name}_" if is_foreign else ""
    return {role: prefix + role for role in roles}


def check_exported_tokenizer(checkpoint: FTCheckpoint) -> None:
    """The tokenizer beside the weights must exist, be as exported and fit the vocabulary."""
    problems = Problems(f"the tokenizer of {checkpoint.folder}")
    entries = checkpoint.manifest.entries if checkpoint.manifest is not None else {}
    names = {path.name for path in tokenizer_files(checkpoint.folder)} & entries.keys()
    check_files(checkpoint.folder, {name: entries[name] for name in names}, problems, digests=True)
    problems.raise_if_any(CheckpointError)
    try:
        tokenizer = load_tokenizer(checkpoint.folder)
    except TokenizerError as error:
        raise CheckpointError(problem(str(error), change=ADVICE)) from error
    check_vocabulary(tokenizer, checkpoint.config.vocab_size)


def reject_existing_models(targets: Iterable[Path]) -> None:
    existing = [str(path) for path in targets if path.exists()]
    if existing:
        raise CheckpointError(
            problem(
                "the model repository already holds " + ", ".join(existing),
                change="export.model.overwrite=True to replace it, or export.run.results_dir",
            )
        )


def model_config(settings: ExportSettings, checkpoint: FTCheckpoint) -> str:
    """config.pbtxt of the model itself."""
    model_type = backend_model_type(settings.model_type, checkpoint.config)
    contract = served_contract(model_type, sessions=settings.interactive)
    model_dir, draft = Path(settings.triton_model_dir), settings.draft_model_dir
    return render(
        "model.pbtxt.j2",
        name=settings.model_name,
        max_batch_size=settings.max_batch_size,
        max_queue_delay_microseconds=MAX_QUEUE_DELAY_MICROSECONDS,
        batched=contract.batched,
        sessions={
            "idle_microseconds": MAX_SEQUENCE_IDLE_MICROSECONDS,
            "count": settings.interactive_sessions,
            "controls": CONTROLS,
        }
        if settings.interactive
        else None,
        decoupled=settings.decoupled,
        inputs=contract.declared_inputs(settings.data_type),
        outputs=contract.declared_outputs(settings.data_type),
        parameters={
            "tensor_para_size": settings.parallelism.tp_size,
            "pipeline_para_size": settings.parallelism.pp_size,
            "data_type": settings.data_type,
            "model_type": model_type,
            "model_checkpoint_path": _from(model_dir, checkpoint.folder),
            **({"draft_model_checkpoint_path": _from(model_dir, Path(draft))} if draft else {}),
            "int8_mode": int(settings.quantization == "int8"),
            **(
                {"quantization": settings.quantization}
                if settings.quantization not in (None, "int8")
                else {}
            ),
            "kv_cache_dtype": settings.kv_cache_dtype,
            "enable_custom_all_reduce": int(settings.enable_custom_all_reduce),
            "inter_token_target": settings.inter_token_target,
            "enable_prefix_caching": int(settings.shares_prefixes),
            "deterministic": int(settings.deterministic),
            **(
                {"deterministic_ranks": settings.deterministic_ranks}
                if settings.deterministic_ranks > 1
                else {}
            ),
            **(
                {"max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}
                if settings.max_loras
                else {}
            ),
        },
    )


def _from(model_dir: Path, folder: Path) -> str:
    """The folder as config.pbtxt names it: from the model's folder on, if it is in the repository
    and moves with it.
    """
    is_local = folder.is_relative_to(model_dir.parent)
    return Path(os.path.relpath(folder, model_dir) if is_local else folder).as_posix()


def exchange_folder(new: Path, target: Path, attic: Path) -> None:
    """Put `new` where `target` is; what was there goes to the attic."""
    if target.exists():
        attic.mkdir(parents=True, exist_ok=True)
        target.rename(attic / target.name)
    new.rename(target)
