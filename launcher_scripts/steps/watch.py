"""Step: evaluate the checkpoints of a training as they are written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("watch")

from launcher_scripts.common.errors import ClusterError
from launcher_scripts.config.evaluation import WatchSettings
from launcher_scripts.steps.command import run_step
from launcher_scripts.watch.series import Series
from launcher_scripts.watch.watcher import Runs, Watcher

_KEPT_LOOKS = 10


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Evaluate a training's checkpoints.", WatchSettings, watch, argv)


def watch(settings: WatchSettings) -> int:
    """Look on until the configured end, or once if the scheduler starts the next look.

    The next look is submitted first: it survives whatever happens to this one, and waits for it.
    """
    with Series(Path(settings.results_dir)) as series, Runs(settings, series) as runs:
        watcher = Watcher(settings, series, runs)
        if not settings.successor:
            return watcher.until_done()
        if watcher.is_done():
            return watcher.exit_code()
        _submit(settings)
        watcher.poll()
        _remove_old_looks(settings)
        return 0


def _submit(settings: WatchSettings) -> None:
    """Submit the next look. Raises ClusterError with the launcher's words."""
    submitted = subprocess.run(
        settings.successor,
        cwd=settings.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if submitted.returncode:
        raise ClusterError(f"the next look was not submitted: {submitted.stderr.strip()}")


def _remove_old_looks(settings: WatchSettings) -> None:
    """Remove the job folders of all looks but the latest: there is one every few minutes."""
    if settings.job_folder is None:
        return
    local = Path(settings.job_folder)
    looks = [path for path in local.parent.iterdir() if path.name.isdecimal()]
    earlier = sorted((path for path in looks if int(path.name) < int(local.name)), key=_number)
    for path in earlier[:-_KEPT_LOOKS]:
        shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    return int(path.name)


if __name__ == "__main__":
    sys.exit(main())
