"""The folder Triton is given: the exported model, and the text models around it.

    <repository>/
      <model>/config.pbtxt, 1/<tp>-gpu/   token ids in and out, backend `fastertransformer`
      preprocessing/                      text -> ids, with the checkpoint's own tokenizer
      postprocessing/                     ids -> text
      ensemble/                           text -> text, by the model; the original's tensors
      text/                               text -> text, by the model; today's tensors

Everything refers to everything else by relative path or by name, so the folder may be copied.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import check_files, reject_links
from launcher_scripts.checkpoint.layout.tasks import compute_type
from launcher_scripts.checkpoint.repository.text_models import TOKEN_MODEL, write_text_models
from launcher_scripts.checkpoint.tokenizers.nemo_tokenizer import ADVICE
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import check_vocabulary
from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems, lookup, problem
from launcher_scripts.common.files import atomic_write
from launcher_scripts.common.hosts import visible_gpus
from launcher_scripts.common.rendering import pbtxt, render
from launcher_scripts.common.tokenizer import TokenizerError, load_tokenizer, tokenizer_files
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.contracts import (
    CONTRACTS,
    CONTROLS,
    MAX_SEQUENCE_IDLE_MICROSECONDS,
    served_contract,
)
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES, TEXT_MODELS

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
            check_tokenizer(text_checkpoint)
            targets += [self.root / name for name in names.values()]
        if not (settings.overwrite or settings.reuse):
            reject_existing(targets)
        config = model_config(settings, checkpoint)
        staging = self.root.with_name(self.root.name + ".partial")
        reject_links(staging)
        shutil.rmtree(staging, ignore_errors=True)
        try:
            if text_models:
                write_text_models(staging / "new", settings, text_checkpoint, contract.text, names)
                for name in names.values():
                    replace_folder(staging / "new" / name, self.root / name, staging / "old")
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


def check_tokenizer(checkpoint: FTCheckpoint) -> None:
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


def reject_existing(targets: Iterable[Path]) -> None:
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
            **({"quantization": "fp8"} if settings.quantization == "fp8" else {}),
            "kv_cache_dtype": settings.kv_cache_dtype,
            "enable_custom_all_reduce": int(settings.enable_custom_all_reduce),
            "inter_token_target": settings.inter_token_target,
            "enable_prefix_caching": int(settings.shares_prefixes),
            "deterministic": int(settings.deterministic),
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


def replace_folder(new: Path, target: Path, attic: Path) -> None:
    """Put `new` where `target` is; what was there goes to the attic."""
    if target.exists():
        attic.mkdir(parents=True, exist_ok=True)
        target.rename(attic / target.name)
    new.rename(target)
