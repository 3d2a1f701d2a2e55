"""A numpy 1 for the models of a server whose Python backend was built for it.

nvidia-pytriton's backend cannot carry text with numpy 2, while the Python that runs may need
numpy 2 for everything else. The processes of its models look into the server's working directory
before all other places, so that is where another numpy is put.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from launcher_scripts.common.errors import ServerError, problem

CHANGE = (
    "deploy.server.numpy_dir: a folder filled by the server's Python with "
    "`python3 -m pip install --no-deps --target FOLDER numpy==1.26.4`"
)


def check_numpy_dir(folder: Path) -> None:
    """Raise ServerError unless `folder` holds a numpy 1 that this Python can load."""
    found = {
        package.metadata["Name"]: package.version for package in distributions(path=[str(folder)])
    }
    version = found.get("numpy", "no numpy")
    if not version.startswith("1."):
        raise ServerError(problem(f"{folder} must hold numpy 1", got=version, change=CHANGE))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (folder / "numpy" / "core" / f"_multiarray_umath{suffix}").is_file():
        raise ServerError(
            problem(f"the numpy in {folder} is for another Python, not *{suffix}", change=CHANGE)
        )


def prefer_numpy(working_dir: Path, folder: Path) -> None:
    """Have the models of a server that works in `working_dir` import the numpy of `folder`."""
    for name in ("numpy", "numpy.libs"):
        (working_dir / name).symlink_to((folder / name).resolve())
