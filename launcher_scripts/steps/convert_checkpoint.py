"""Convert a checkpoint to FasterTransformer's shards, as the settings file says.

python3 -m launcher_scripts.steps.convert_checkpoint --settings <file>.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher_scripts.checkpoint.export import export
from launcher_scripts.settings import ExportSettings
from launcher_scripts.steps.command import run_step


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Convert a checkpoint to shards.", ExportSettings, convert, argv)


def convert(settings: ExportSettings) -> None:
    folder = export(settings)
    print(f"checkpoint {folder}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
