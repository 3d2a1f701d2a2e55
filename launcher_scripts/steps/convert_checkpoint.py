"""Convert a checkpoint to FasterTransformer's shards, as a settings file or the flags say.

python3 -m launcher_scripts.steps.convert_checkpoint --settings <file>.yaml
python3 -m launcher_scripts.steps.convert_checkpoint --checkpoint-path <source> \
    --triton-model-dir <folder>/<model> --tensor-parallel-size 2 --weight-data-type fp16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.steps.packages import check_packages, note_slow_checksums

if __name__ == "__main__":
    check_packages("convert_checkpoint", "numpy", "yaml")
    note_slow_checksums()

from launcher_scripts.checkpoint.convert.export import export
from launcher_scripts.config.settings import SOURCES, WEIGHT_DATA_TYPES, ExportSettings
from launcher_scripts.steps.command import run_step
from launcher_scripts.steps.flags import Flag, FlagTable, Values
from launcher_scripts.steps.twin import compare


def _named(values: Values) -> Values:
    """The model is called like its folder; what it may be served as is left open."""
    name = Path(values["triton_model_dir"]).absolute().name
    return {"model_name": name, "model_type": "", **values}


FLAGS = FlagTable(
    ExportSettings,
    {
        "checkpoint_path": Flag(
            "a .nemo file, an unpacked one, the folder of a training, of Megatron-LM or of Hugging "
            "Face, or a GGUF file",
            metavar="PATH",
        ),
        "triton_model_dir": Flag(
            "the model's folder; the shards go to 1/<N>-gpu in it", metavar="FOLDER"
        ),
        "parallelism.tp_size": Flag("ranks that share every layer", "tensor-parallel-size"),
        "parallelism.pp_size": Flag(
            "groups of ranks that share the layers; only checked, files are the same",
            "pipeline-parallel-size",
        ),
        "weight_data_type": Flag("type of the written files", metavar="|".join(WEIGHT_DATA_TYPES)),
        "processes": Flag("threads at most"),
        "overwrite": Flag("replace an earlier export in the same folder"),
        "tokenizer.source": Flag(
            "the checkpoint's own, none, or the files named by the flags below",
            "tokenizer",
            "auto|none|files",
        ),
        "tokenizer.library": Flag("library of --tokenizer files"),
        "tokenizer.model": Flag("SentencePiece model or tokenizer.json", metavar="FILE"),
        "tokenizer.vocab_file": Flag("vocabulary of a byte-level BPE", metavar="FILE"),
        "tokenizer.merge_file": Flag("merges of a byte-level BPE", metavar="FILE"),
        "tokenizer.start_id": Flag("token that starts a sequence", "start-id"),
        "tokenizer.end_id": Flag("token that ends a sequence", "end-id"),
        "tokenizer.pad_id": Flag("token that fills a batch", "pad-id"),
        "source": Flag("format of the checkpoint", metavar="|".join(SOURCES)),
        "num_attention_heads": Flag("for a checkpoint that does not say it"),
        "encoder_only": Flag("of an encoder-decoder, export the encoder alone"),
        "prompt_checkpoints": Flag("virtual tokens to add, in this order", metavar="PATH"),
        "ia3_checkpoints": Flag("IA3 vectors to add, in this order", metavar="PATH"),
        "ia3_in_place": Flag("fold IA3 into the weights"),
        "adapter_checkpoints": Flag("adapters and LoRA to add, in this order", metavar="PATH"),
        "training_checkpoint": Flag("which one of a training's folder", metavar="last|best|NAME"),
        "verify": Flag(
            "rebuild every tensor from the written files and compare with the source; where "
            "transformers (for Megatron-LM core's, megatron-core) is installed, its logits too"
        ),
        "allow_nonfinite": Flag("export NaN and infinite weights as they are"),
    },
    left_out=(
        "model_name",
        "model_type",
        "max_batch_size",
        "int8_mode",
        "enable_custom_all_reduce",
        "data_type",
        "decoupled",
        "interactive",
        "interactive_sessions",
    ),
    complete=_named,
)


def main(argv: Sequence[str] | None = None) -> int:
    description = (
        "Convert a checkpoint to FasterTransformer's shards for N tensor-parallel ranks. "
        "Takes the settings file of the export stage, or flags."
    )
    return run_step(description, ExportSettings, convert, argv, FLAGS)


def convert(settings: ExportSettings) -> None:
    folder = export(settings, compare)
    print(f"checkpoint {folder}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
