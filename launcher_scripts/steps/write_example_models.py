"""Write the example models of the FasterTransformer backend's all_models: sizes to edit, and serve.

    python3 -m launcher_scripts.steps.write_example_models --folder all_models --random-weights

Every example is a model repository: <folder>/<example>/fastertransformer/config.pbtxt, 1/config.ini
in it, from which --random-weights makes 1/<N>-gpu, and the text models beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("write_example_models")

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.model_repository import ModelRepository, reject_existing_models
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import collect_tokenizer, with_token_ids
from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.files import atomic_write
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.tokenizer import tokenizer_files
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.options import Option, option, option_metadata
from launcher_scripts.config.settings import DATA_TYPES, ExportSettings
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.repository import FILE_NAME, TEXT_MODELS
from launcher_scripts.models.t5 import T5Config
from launcher_scripts.steps.command import FlagTable, run_step

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
    """The examples, their folder, and how they are divided and typed."""

    folder: str = field(metadata=option_metadata("where the examples go", metavar="FOLDER"))
    examples: tuple[str, ...] = option(tuple(EXAMPLES), "which ones", metavar="NAME")
    tensor_parallel_size: int = option(1, "ranks that share every layer")
    data_type: str = option("fp16", "of weights and computation", choices=DATA_TYPES)
    max_batch_size: int = option(32, "most rows of one request, except with sessions")
    tokenizer: TokenizerSettings = field(default=TokenizerSettings())
    random_weights: bool = option(False, "make weights, so that the examples can be served")
    overwrite: bool = option(False, "replace examples that are there")

    def __post_init__(self) -> None:
        problems = Problems("the examples")
        for name in self.examples:
            problems.check_choice("example", name, EXAMPLES, "--examples")
        problems.raise_if_any(ConfigError)


FLAGS = FlagTable(
    ExampleSettings,
    {
        "tokenizer.source": Option(
            "of the text models. auto: a tokenizer of single bytes, in which every other id is a "
            "number; none: no text models; files: named by the flags below",
            flag="tokenizer",
            metavar="auto|none|files",
        ),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Write example models.", ExampleSettings, write_examples, argv, FLAGS)


def write_examples(settings: ExampleSettings) -> None:
    """Write the examples; raises LauncherError where one is there already, cannot be divided, or
    has a smaller vocabulary than the tokenizer.
    """
    exports = {name: export_settings(settings, name) for name in settings.examples}
    if not settings.overwrite:
        reject_existing_models(
            Path(item.model_repository) / folder
            for item in exports.values()
            for folder in (MODEL, *TEXT_MODELS)
        )
    configs, tokenizers = {}, {}
    for name in exports:
        config = EXAMPLES[name].config
        tokenizers[name] = collect_tokenizer(settings.tokenizer, partial(byte_tokenizer, config))
        configs[name] = with_token_ids(config, settings.tokenizer, tokenizers[name], has_ids=True)
    for name, entry in exports.items():
        config, tp_size = configs[name], settings.tensor_parallel_size
        sizes = Path(entry.checkpoint_path)
        sizes.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(sizes, format_config(config, tp_size, settings.data_type))
        for path in tokenizer_files(sizes.parent):
            path.unlink()
        for file_name, content in tokenizers[name].items():
            (sizes.parent / file_name).write_bytes(content)
        if settings.random_weights:
            export(entry)
        checkpoint = FTCheckpoint(entry.checkpoint_dir, config, tp_size, settings.data_type)
        repository = ModelRepository(Path(entry.model_repository))
        models = repository.write(entry, checkpoint, tokenizer_dir=sizes.parent)
        print(f"example {repository.root}: {', '.join(models)}", flush=True)


def byte_tokenizer(config: ModelConfig) -> dict[str, bytes]:
    """The file of a tokenizer with config's special ids: prompts become single bytes, and each id
    that is neither special nor a byte is its own number as text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = {config.pad_id: "<pad>", config.start_id: "<s>", config.end_id: "</s>"}
    alphabet = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    ids = range(config.vocab_size)
    names = [special[i] if i in special else next(alphabet, f"\u0120{i}") for i in ids]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([names[i] for i in ids if i in special])
    return {"tokenizer.json": tokenizer.to_str().encode()}


def export_settings(settings: ExampleSettings, name: str) -> ExportSettings:
    """The export of one example from its own config.ini."""
    example, model_dir = EXAMPLES[name], Path(settings.folder).absolute() / name / MODEL
    tokenizer = settings.tokenizer
    if tokenizer.source == "auto":
        file = str(model_dir / "1" / "tokenizer.json")
        tokenizer = replace(tokenizer, source="files", model=file)
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
        tokenizer=tokenizer,
        overwrite=settings.overwrite,
    )
    return (
        replace(exported, interactive=True, max_batch_size=1) if example.interactive else exported
    )


if __name__ == "__main__":
    sys.exit(main())
