"""Convert a checkpoint to FasterTransformer's shards, or to a transformers folder.

python3 -m launcher_scripts.steps.convert_checkpoint --settings <file>.yaml
python3 -m launcher_scripts.steps.convert_checkpoint --checkpoint-path <source> \
    --triton-model-dir <folder>/<model> --tensor-parallel-size 2 --weight-data-type fp16
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from launcher_scripts.common.packages import check_packages, note_slow_checksums

if __name__ == "__main__":
    check_packages("convert_checkpoint")
    note_slow_checksums()

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.huggingface.export import export_huggingface
from launcher_scripts.checkpoint.verification import sign_repository
from launcher_scripts.config.options import Option
from launcher_scripts.config.settings import ExportSettings, ServingOptions
from launcher_scripts.steps.command import FlagTable, Values, resumed, run_step


def _named(values: Values) -> Values:
    """The model is called like its folder; what it may be served as is left open."""
    name = Path(values["triton_model_dir"]).absolute().name
    return {"model_name": name, "model_type": "", **values}


FLAGS = FlagTable(
    ExportSettings,
    {
        "parallelism.tp_size": Option("ranks that share every layer", flag="tensor-parallel-size"),
        "parallelism.pp_size": Option(
            "groups of ranks that share the layers; only checked, files are the same",
            flag="pipeline-parallel-size",
        ),
    },
    left_out=[*(item.name for item in fields(ServingOptions)), "device", "sign"],
    complete=_named,
)


def main(argv: Sequence[str] | None = None) -> int:
    description = (
        "Convert a checkpoint to FasterTransformer's shards for N tensor-parallel ranks. "
        "Takes the settings file of the export stage, or flags."
    )
    return run_step(description, ExportSettings, convert, argv, FLAGS)


def convert(settings: ExportSettings) -> None:
    settings = resumed(settings)
    if settings.format == "huggingface":
        folder = export_huggingface(settings, _compare)
        if settings.sign is not None:
            print(f"signed: {sign_repository(folder, settings.sign)}", flush=True)
    else:
        folder = export(settings, _compare)
    print(f"checkpoint {folder}", flush=True)


def _compare(folder: Path, settings: ExportSettings) -> Mapping[str, Any]:
    """See twin.compare, whose imports take a quarter of the start of an export."""
    from launcher_scripts.steps.twin import compare_shards, compare_transformers

    is_huggingface = settings.format == "huggingface"
    return (compare_transformers if is_huggingface else compare_shards)(folder, settings)


if __name__ == "__main__":
    sys.exit(main())
