"""Write config.pbtxt for weights that are converted already, and the text models if wanted.

    python3 -m launcher_scripts.steps.prepare_triton_model_config --model-train-name ul2 \\
        --ft-checkpoint model_repo/ul2/1/2-gpu --config-path model_repo/ul2/config.pbtxt

Flags are those of the NeMo Megatron launcher's script of this name, and those of the export.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("prepare_triton_model_config")

from launcher_scripts.checkpoint.export import check_serving
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.model_repository import ModelRepository, fitting_model_types
from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import KV_CACHE_DTYPES, QUANTIZATIONS, quantization_of
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.options import option, option_metadata, values_of
from launcher_scripts.config.settings import DATA_TYPES, ExportSettings, ServingOptions
from launcher_scripts.models.repository import (
    BACKEND_MODEL_TYPES,
    config_parameters,
    says_decoupled,
)
from launcher_scripts.steps.command import FlagTable, run_step


@dataclass(frozen=True)
class ModelConfigSettings:
    """Values of config.pbtxt; None: those of the checkpoint or the template.

    template_path: a config.pbtxt whose kind of model is meant: its model_type, whether it streams,
                   and whether it has sessions; tensors are this project's
    """

    model_train_name: str = field(
        metadata=option_metadata("the model's name, which is its folder's", metavar="NAME")
    )
    ft_checkpoint: str = field(
        metadata=option_metadata("the folder of the converted weights", metavar="FOLDER")
    )
    config_path: str = field(
        metadata=option_metadata("<repository>/<name>/config.pbtxt, to be written", metavar="FILE")
    )
    template_path: str | None = option(
        None,
        "a config.pbtxt of a model of this kind: model_type, decoupled, sequence_batching",
        metavar="FILE",
    )
    model_type: str | None = option(
        None, "what it is served as", metavar="|".join(BACKEND_MODEL_TYPES)
    )
    tensor_model_parallel_size: int | None = option(None, "tensor-parallel size of the weights")
    pipeline_model_parallel_size: int = option(1, "pipeline-parallel size")
    max_batch_size: int = option(1, "most rows of one request")
    data_type: str | None = option(
        None, "data type that the engine computes in; by default the weights'", choices=DATA_TYPES
    )
    int8_mode: bool = option(False, "keep the layers' matrices as int8")
    quantization: str | None = option(
        None, "quantization of the layers' matrices at load", choices=tuple(QUANTIZATIONS)
    )
    kv_cache_dtype: str = option(
        "auto", "data type of the key/value cache", choices=tuple(KV_CACHE_DTYPES)
    )
    enable_custom_all_reduce: bool = option(False, "as in the export's configuration")
    inter_token_target: float = option(
        0.05, "seconds that a step over prompts may take; 0: no limit", lower=0
    )
    enable_prefix_caching: bool | None = option(
        None, "compute what prompts have in common once; by default unless deterministic"
    )
    deterministic: bool = option(False, "tokens do not depend on the requests beside")
    deterministic_ranks: int = option(
        1, "number of ranks whose bits a deterministic model of one rank has", lower=1
    )
    max_loras: int = option(0, "LoRA adapters that can be added while the model is served", lower=0)
    max_lora_rank: int = option(16, "the largest rank of these", lower=1)
    draft_model_dir: str | None = option(
        None, "the converted files of a small model that proposes tokens", metavar="FOLDER"
    )
    decoupled: bool = option(False, "stream tokens as they are generated")
    interactive: bool = option(False, "let requests belong to sessions")
    interactive_sessions: int = option(32, "most sessions at the same time")
    text_models: bool = option(
        False, "write preprocessing, postprocessing, ensemble and text beside it"
    )
    overwrite: bool = option(False, "replace what is there")


FLAGS = FlagTable(ModelConfigSettings)


def main(argv: Sequence[str] | None = None) -> int:
    description = "Write config.pbtxt for a converted checkpoint."
    return run_step(description, ModelConfigSettings, prepare, argv, FLAGS)


def prepare(values: ModelConfigSettings) -> None:
    """Write config.pbtxt; raises ConfigError or CheckpointError and then leaves all as it was."""
    path = Path(values.config_path).absolute()
    if path.name != "config.pbtxt" or path.parent.name != values.model_train_name:
        raise ConfigError(
            problem(
                "Triton finds a model's configuration in a folder of the model's name",
                got=values.config_path,
                choices=[f"<repository>/{values.model_train_name}/config.pbtxt"],
                change="--config-path or --model-train-name",
            )
        )
    checkpoint = FTCheckpoint.open(Path(values.ft_checkpoint).absolute(), verify=False)
    if values.tensor_model_parallel_size not in (None, checkpoint.tp_size):
        raise ConfigError(
            problem(
                "the weights are cut for another number of tensor-parallel ranks",
                got=values.tensor_model_parallel_size,
                choices=[checkpoint.tp_size],
                change="--tensor-model-parallel-size, or convert them for so many",
            )
        )
    settings = settings_of(values, checkpoint)
    check_serving(settings, checkpoint.config)
    models = ModelRepository(path.parent.parent).write(settings, checkpoint)
    print(f"model repository {path.parent.parent}: {', '.join(models)}", flush=True)


def settings_of(settings: ModelConfigSettings, checkpoint: FTCheckpoint) -> ExportSettings:
    """Return the settings that an export would have had."""
    template = _template(settings.template_path)
    serving = values_of(ServingOptions, settings) | {
        "quantization": quantization_of(int(settings.int8_mode), settings.quantization, "--{}"),
        "draft_model_dir": settings.draft_model_dir
        and str(Path(settings.draft_model_dir).absolute()),
        "data_type": settings.data_type or checkpoint.weight_data_type,
        "decoupled": settings.decoupled or says_decoupled(template),
        "interactive": settings.interactive or "sequence_batching" in template,
    }
    return ExportSettings(
        model_name=settings.model_train_name,
        model_type=settings.model_type or _model_type(template, checkpoint),
        checkpoint_path=settings.ft_checkpoint,
        triton_model_dir=str(Path(settings.config_path).absolute().parent),
        parallelism=Parallelism(checkpoint.tp_size, settings.pipeline_model_parallel_size),
        weight_data_type=checkpoint.weight_data_type,
        tokenizer=TokenizerSettings("auto" if settings.text_models else "none"),
        **serving,
        overwrite=settings.overwrite,
        reuse=False,
    )


def _template(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(problem(f"cannot read it: {error}", change="--template-path")) from error


def _model_type(template: str, checkpoint: FTCheckpoint) -> str:
    """The template's model_type in the export's words, else the first that fits the checkpoint."""
    declared = config_parameters(template).get("model_type")
    if declared is None:
        return fitting_model_types(checkpoint.config)[0]
    names = {row: name for name, row in reversed(BACKEND_MODEL_TYPES.items())}
    return lookup(names, declared, "--template-path, or --model-type")


if __name__ == "__main__":
    sys.exit(main())
