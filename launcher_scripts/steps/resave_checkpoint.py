"""Have NeMo read a GPT checkpoint that the export refuses, and write one that it takes.

    python3 -m launcher_scripts.steps.resave_checkpoint SOURCE.nemo TARGET.nemo

It runs in a Python with nemo_toolkit (docs/nemo-toolkit.md). NeMo runs the code that the source
names: only for files that you trust.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("resave_checkpoint")

from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import CheckpointError, LauncherError, problem
from launcher_scripts.evaluation.tasks.megatron_models import NemoReference


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="resave_checkpoint", description=__doc__)
    parser.add_argument("source", type=Path, help="a .nemo file that you trust")
    parser.add_argument("target", type=Path, help="a new .nemo file")
    args = parser.parse_args(argv)
    try:
        resave(args.source.absolute(), args.target.absolute())
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def resave(source: Path, target: Path) -> None:
    """Raises CheckpointError for paths that cannot be, ConfigError where NeMo cannot read."""
    if not source.exists():
        raise CheckpointError(problem("there is no such checkpoint", got=str(source)))
    if target.exists() or target.suffix != ".nemo" or not target.parent.is_dir():
        message = "the target must be a new .nemo file in a folder that is there"
        raise CheckpointError(problem(message, got=str(target)))
    partial = target.with_name(f"{target.stem}.partial.nemo")
    try:
        NemoReference(source, any_class=True).save(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    print(f"checkpoint {target}")


if __name__ == "__main__":
    sys.exit(main())
