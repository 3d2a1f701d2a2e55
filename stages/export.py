"""Export: a trained checkpoint becomes shards and a Triton model repository."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.config_ini import (
    check_draft_folder,
    random_config,
)
from launcher_scripts.checkpoint.formats import nemo_config
from launcher_scripts.checkpoint.formats.nemo_config import check_source_tokenizer
from launcher_scripts.checkpoint.sources import huggingface_architectures
from launcher_scripts.checkpoint.sources.locations import hub_advice, not_a_checkpoint, snapshot_of
from launcher_scripts.common.errors import CheckpointError, ConfigError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import quantization_of
from launcher_scripts.config.export import HuggingFaceOptions, TokenizerSettings
from launcher_scripts.config.options import absolute, build, values_of, with_absolute_paths
from launcher_scripts.config.security import SIGN, SigningKey
from launcher_scripts.config.settings import (
    AUTO,
    CHECKPOINT_KEY,
    DRAFT_MODEL_KEY,
    EXPORT_FORMATS,
    ExportSettings,
    ModelOptions,
    ServingOptions,
)
from launcher_scripts.models import value_count
from launcher_scripts.models.family import ModelConfig, check_division
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES, TEXT_MODELS
from stages.stage import Stage, StageRun

# Triton hands a model's name to a shell without quotes as well.
_MODEL_NAME = re.compile(r"\w[\w.+-]*")
ADAPTERS = ("prompt_checkpoints", "ia3_checkpoints", "adapter_checkpoints", "lora_checkpoints")


@dataclass(frozen=True)
class ExportRun(StageRun):
    model_train_name: str
    training_dir: str
    config_summary: str
    model_type: str


@dataclass(frozen=True, kw_only=True)
class ExportModel(ModelOptions):
    checkpoint_path: str
    tensor_model_parallel_size: int
    load_checkpoints_to_cpu: bool
    tokenizer: str | Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class TritonDeployment(ServingOptions):
    triton_model_dir: str
    pipeline_model_parallel_size: int
    int8_mode: bool | int = 0


@dataclass(frozen=True)
class ExportBlock:
    """The `export` block of the configuration, in the words of its users."""

    run: ExportRun
    model: ExportModel
    triton_deployment: TritonDeployment
    sign: SigningKey | None
    format: str = EXPORT_FORMATS[0]
    huggingface: HuggingFaceOptions = HuggingFaceOptions()


class Export(Stage):
    name = "export"
    block_type = ExportBlock
    modules = ("convert_checkpoint", "write_model_repository")

    block: ExportBlock

    @cached_property
    def settings(self) -> ExportSettings:
        run, model, deployment = self.block.run, self.block.model, self.block.triton_deployment
        values = values_of(ModelOptions, model) | values_of(ServingOptions, deployment)
        values["quantization"] = quantization_of(
            int(deployment.int8_mode), deployment.quantization, "export.triton_deployment.{}"
        )
        settings = ExportSettings(
            model_name=run.model_train_name,
            model_type=run.model_type,
            checkpoint_path=self._checkpoint(),
            triton_model_dir=deployment.triton_model_dir,
            parallelism=self.parallelism(),
            tokenizer=_tokenizer(model.tokenizer),
            device=str(self.launch.blocks["deploy"]["server"]["device"]),
            sign=self.block.sign,
            format=self.block.format,
            huggingface=self.block.huggingface,
            **values,
        )
        return with_absolute_paths(settings)

    def step_names(self) -> tuple[str, ...]:
        """The model repository is of shards alone."""
        return self.modules[:1] if self.is_huggingface else self.modules

    @property
    def is_huggingface(self) -> bool:
        return self.block.format == "huggingface"

    def parallelism(self) -> Parallelism:
        """The sizes that the exported model will be served with."""
        sizes = {
            "export.model.tensor_model_parallel_size": self.block.model.tensor_model_parallel_size,
            "export.triton_deployment.pipeline_model_parallel_size": (
                self.block.triton_deployment.pipeline_model_parallel_size
            ),
        }
        for key, size in sizes.items():
            if size < 1:
                raise ConfigError(problem(f"{key} must be at least 1", got=size, change=key))
        return Parallelism(*sizes.values())

    def _checkpoint(self) -> str:
        """The checkpoint's path: a folder with a single .nemo file stands for that file."""
        path = Path(absolute(self.block.model.checkpoint_path))
        try:
            checkpoint = nemo_config.find_nemo_file(self.launch.checks.on_host(path))
        except CheckpointError as error:
            raise ConfigError(problem(str(error), change=CHECKPOINT_KEY)) from error
        return str(path if checkpoint.name == path.name else path / checkpoint.name)

    def check_stage(self) -> None:
        checks, settings = self.launch.checks, self.settings
        model_types, key = BACKEND_MODEL_TYPES, "export.run.model_type"
        checks.problems.check_choice("model_type", settings.model_type, model_types, key)
        if self.is_huggingface:
            self._check_huggingface()
        else:
            self._check_folder()
        advice = hub_advice(self.block.model.checkpoint_path)
        if checks.exists("the checkpoint", settings.checkpoint_path, CHECKPOINT_KEY, advice):
            self._check_sizes()
        draft = settings.draft_model_dir
        if draft is not None and checks.exists("the draft model", draft, DRAFT_MODEL_KEY):
            with checks.problems.collecting():
                check_draft_folder(
                    checks.problems, checks.on_host(draft), None, settings.parallelism
                )
        for name in ADAPTERS:
            for path in getattr(settings, name):
                checks.exists("the checkpoint of adapters", path, f"export.model.{name}")
        checks.paths("the tokenizer's {}", settings.tokenizer, "export.model.tokenizer")
        checks.paths("{} of the signature", settings.sign, SIGN)

    def _check_folder(self) -> None:
        """Triton wants a model's folder to have the model's name; results are not replaced."""
        checks, settings = self.launch.checks, self.settings
        folder, name = Path(settings.triton_model_dir), settings.model_name
        if not _MODEL_NAME.fullmatch(name) or name in TEXT_MODELS:
            checks.problems.add(
                "a model's name is that of a folder and a part of addresses: letters, digits and "
                f"_ . + -, and none of {', '.join(TEXT_MODELS)}",
                got=name,
                change="export.run.model_train_name",
            )
        elif folder.name != name:
            checks.problems.add(
                f"the model's folder must be called {name}",
                got=str(folder),
                change="export.triton_deployment.triton_model_dir or export.run.model_train_name",
            )
        reuses = settings.overwrite or settings.reuse
        if checks.on_host(settings.checkpoint_dir).exists() and not reuses:
            complete = checks.on_host(folder / "config.pbtxt").exists()
            step = "python3 -m launcher_scripts.steps.write_model_repository --settings"
            finish = f", or finish it: {step} {self.results_dir}/jobs/.../{self.block.run.name}"
            checks.problems.add(
                f"there is an earlier export{'' if complete else ', without its config.pbtxt'}",
                got=str(settings.checkpoint_dir),
                change="export.model.overwrite=True to replace it, or export.model.reuse=True"
                + ("" if complete else f"{finish}_hydra.yaml"),
            )

    def _check_huggingface(self) -> None:
        """A transformers folder is not served by a later stage, and not replaced unless asked."""
        checks, settings = self.launch.checks, self.settings
        later = [name for name in self.launch.stages if name != self.name]
        if later:
            checks.problems.add(
                "export.format=huggingface writes no model repository for the later stages",
                got=later,
                choices=["'stages=[export]'"],
                change="stages or export.format",
            )
        retained = settings.overwrite or settings.reuse
        if checks.on_host(settings.checkpoint_dir).exists() and not retained:
            checks.problems.add(
                "the output already exists",
                got=str(settings.checkpoint_dir),
                change="export.model.overwrite=True to replace it",
            )

    def _check_sizes(self) -> None:
        checks = self.launch.checks
        path, source = checks.on_host(self.settings.checkpoint_path), self.settings.source
        try:
            path = snapshot_of(path)
            lacking = not_a_checkpoint(path) if source == AUTO else ""
            if lacking:
                raise CheckpointError(f"{path}: {lacking}")
            model = checkpoint_sizes(path, source)
        except CheckpointError as error:
            checks.problems.add(str(error), change=CHECKPOINT_KEY)
            return
        if model is not None:
            check_division(checks.problems, model, self.settings.parallelism)
        self._check_space(model)
        if self.settings.tokenizer.source == "auto" and source != "random":
            with checks.problems.collecting():
                check_source_tokenizer(path)

    def _check_space(self, model: Any) -> None:
        """Room for the weights, where the checkpoint tells their number and none is written yet."""
        checks, settings = self.launch.checks, self.settings
        target = checks.on_host(settings.checkpoint_dir)
        if isinstance(model, ModelConfig) and settings.source != "random" and not target.exists():
            size = (4 if settings.weight_data_type == "fp32" else 2) * value_count(model)
            checks.space(target, size, "base_results_dir or export.run.results_dir")


def checkpoint_sizes(path: Path, source: str = "auto") -> Any:
    """Returns what decides how a checkpoint can be divided; None if it cannot be known here.

    Raises CheckpointError for a damaged checkpoint.
    """
    if source == "random":
        return random_config(path)
    path = snapshot_of(path)
    model: Any = nemo_config.read_nemo_sizes(nemo_config.find_nemo_file(path))
    if model is None and source in ("auto", "huggingface"):
        model = huggingface_architectures.read_sizes(path)
    return model


def _tokenizer(value: str | Mapping[str, Any] | None) -> TokenizerSettings:
    """`auto`, `none`, or the mapping that replaces the checkpoint's tokenizer."""
    key = "export.model.tokenizer"
    if value is None:
        return TokenizerSettings(source="none")
    if isinstance(value, str):
        if value == "files":
            raise ConfigError(
                problem("unknown tokenizer", got=value, choices=("auto", "none"), change=key)
            )
        return TokenizerSettings(source=value)
    names = {field.name for field in fields(TokenizerSettings)} - {"source"}
    unknown = [name for name in value if name not in names]
    if unknown or not any(value.get(name) for name in ("model", "vocab_file")):
        raise ConfigError(
            problem(
                f"a tokenizer's mapping names its files (model, or vocab_file and merge_file)"
                f"{''.join(f', and there is no key {name}' for name in unknown)}",
                got=dict(value),
                choices=sorted(names),
                change=key,
            )
        )
    return build(TokenizerSettings, {"source": "files", **value}, "the tokenizer", key=key)
