"""Describe an exported checkpoint to Triton: config.pbtxt and the text models around it.

    python3 -m launcher_scripts.steps.write_model_repository --settings <file>.yaml

The file holds ExportSettings; the checkpoint must already lie in its checkpoint_dir.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("write_model_repository")

from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.checkpoint.verification import sign_repository
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.steps.command import resumed, run_step


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Describe a checkpoint to Triton.", ExportSettings, write_repository, argv)


def write_repository(settings: ExportSettings) -> None:
    repository = ModelRepository(settings.model_repository)
    models = repository.write(resumed(settings))
    if settings.sign is not None:
        print(f"signed: {sign_repository(repository.root, settings.sign)}")
    print(f"model repository {repository.root}: {', '.join(models)}")


if __name__ == "__main__":
    sys.exit(main())
