"""Write the example models of the FasterTransformer backend's all_models: sizes to edit, and serve.

    python3 -m launcher_scripts.steps.write_example_models --folder all_models --random-weights

Every example is a model repository: <folder>/<example>/fastertransformer/config.pbtxt, and
1/config.ini in it, from which --random-weights makes 1/<N>-gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.repository.model_repository import model_config, refuse_existing
from launcher_scripts.common.atomic_write import atomic_write
from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.options import described, option
from launcher_scripts.config.settings import DATA_TYPES, ExportSettings, TokenizerSettings
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.ini_text import FILE_NAME
from launcher_scripts.models.t5 import T5Config
from launcher_scripts.steps.command import run_step
from launcher_scripts.steps.flags import FlagTable

MODEL = "fastertransformer"
GPT = GPTConfig(
    vocab_size=50257,
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    num_kv_heads=12,
    head_size=64,
    ffn_size=3072,
    max_positions=2048,
)
T5 = T5Config(
    vocab_size=32128,
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    head_size=64,
    ffn_size=3072,
    num_decoder_layers=12,
)
AGM = AgmConfig(vocab_size=50257, num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072)


@dataclass(frozen=True)
class Example:
    """One of EXAMPLES. model_type is the export's word."""

    config: ModelConfig
    model_type: str
    interactive: bool = False


EXAMPLES = {
    "gpt": Example(GPT, "gpt3"),
    "gpt-interactive-text-generation": Example(GPT, "gpt3", interactive=True),
    "t5": Example(T5, "t5"),
    "t5-encoder": Example(T5, "t5-encoder"),
    "agm": Example(AGM, "agm"),
}


@dataclass(frozen=True)
class ExampleSettings:
    """Which examples, where, and how they are divided and typed."""

    folder: str = field(metadata=described("where the examples go", metavar="FOLDER"))
    examples: tuple[str, ...] = option(tuple(EXAMPLES), "which ones", metavar="NAME")
    tensor_parallel_size: int = option(1, "ranks that share every layer")
    data_type: str = option("fp16", "of weights and computation", choices=DATA_TYPES)
    max_batch_size: int = option(32, "most rows of one request, except with sessions")
    random_weights: bool = option(False, "make weights, so that the examples can be served")
    overwrite: bool = option(False, "replace examples that are there")

    def __post_init__(self) -> None:
        problems = Problems("the examples")
        for name in self.examples:
            problems.check_choice("example", name, EXAMPLES, "--examples")
        problems.raise_if_any(ConfigError)


FLAGS = FlagTable(ExampleSettings)


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Write example models.", ExampleSettings, write, argv, FLAGS)


def write(settings: ExampleSettings) -> None:
    """Write the examples; raises LauncherError where one is there already or cannot be divided."""
    exports = {name: export_settings(settings, name) for name in settings.examples}
    if not settings.overwrite:
        refuse_existing(Path(each.triton_model_dir) for each in exports.values())
    for name, each in exports.items():
        config, tp_size = EXAMPLES[name].config, settings.tensor_parallel_size
        sizes = Path(each.checkpoint_path)
        sizes.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(sizes, format_config(config, tp_size, settings.data_type))
        if settings.random_weights:
            export(each)
        checkpoint = FTCheckpoint(each.checkpoint_dir, config, tp_size, settings.data_type)
        atomic_write(Path(each.triton_model_dir) / "config.pbtxt", model_config(each, checkpoint))
        print(f"example {each.model_repository}", flush=True)


def export_settings(settings: ExampleSettings, name: str) -> ExportSettings:
    """The export of one example from its own config.ini."""
    example, model_dir = EXAMPLES[name], Path(settings.folder).absolute() / name / MODEL
    exported = ExportSettings(
        model_name=MODEL,
        model_type=example.model_type,
        checkpoint_path=str(model_dir / "1" / FILE_NAME),
        triton_model_dir=str(model_dir),
        parallelism=Parallelism(settings.tensor_parallel_size),
        weight_data_type=settings.data_type,
        data_type=settings.data_type,
        max_batch_size=settings.max_batch_size,
        source="random",
        tokenizer=TokenizerSettings("none"),
        overwrite=settings.overwrite,
    )
    return (
        replace(exported, interactive=True, max_batch_size=1) if example.interactive else exported
    )


if __name__ == "__main__":
    sys.exit(main())
