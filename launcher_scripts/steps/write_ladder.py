"""Step: compare the evaluations of one model in several precisions."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("write_ladder")

from launcher_scripts.checkpoint.fastertransformer.manifest import FileEntry, read_manifest
from launcher_scripts.common.errors import CheckpointError, ServerError
from launcher_scripts.common.quantization import (
    BYTES_PER_WEIGHT,
    FOUR_BITS,
    QUANTIZATIONS,
    Quantization,
)
from launcher_scripts.config.evaluation import LadderPrecision, LadderSettings
from launcher_scripts.evaluation.report import Report
from launcher_scripts.evaluation.tables import choose_rung, exit_code, ladder_table, read_row
from launcher_scripts.steps.command import run_step

_SCALE_BYTES = 4  # of an output channel of a matrix in bytes
_LAYERS = (".layers.", ".block.")  # in the names of what is quantized


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Compare a ladder's rungs.", LadderSettings, write_ladder, argv)


def write_ladder(settings: LadderSettings) -> int:
    """Write the report's section `ladder` and print its table; the status is the best verdict's.

    Raises ServerError where no rung was evaluated.
    """
    rows = [read_row(precision, precision_bytes(precision)) for precision in settings.rungs]
    selected, why = choose_rung(rows)
    report = Report(Path(settings.results_dir), settings.model_name)
    report.add_ladder(settings, rows, selected, why)
    print("\n".join([ladder_table(rows), "", why, f"report: {report.html_file}"]), flush=True)
    if all(row.failure for row in rows):
        raise ServerError("no rung of the ladder was evaluated")
    return exit_code(rows)


def precision_bytes(precision: LadderPrecision) -> int | None:
    """Bytes of the weight files of all ranks; None where no manifest tells.

    Where the server quantizes the files' matrices, what it makes of them is counted.
    """
    try:
        manifest = (
            None
            if precision.checkpoint_dir is None
            else read_manifest(Path(precision.checkpoint_dir))
        )
    except CheckpointError:
        return None
    if manifest is None:
        return None
    quantization = QUANTIZATIONS.get(precision.name)
    return sum(_bytes(entry, quantization) for entry in manifest.files if entry.shape is not None)


def _bytes(entry: FileEntry, quantization: Quantization | None) -> int:
    shape = entry.shape or ()
    matrix = len(shape) > 1 and any(part in entry.name for part in _LAYERS)
    if quantization is None or not matrix:
        return entry.bytes
    if quantization in FOUR_BITS:
        return int(math.prod(shape) * BYTES_PER_WEIGHT[quantization])
    return math.prod(shape) + _SCALE_BYTES * math.prod(shape[1:])


if __name__ == "__main__":
    sys.exit(main())
