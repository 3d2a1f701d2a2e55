"""Packages of `pip install .`: the checkout as it is, in one folder of its own.

Programs find conf/ and templates/ next to launcher_scripts/, in a checkout and when installed.
"""

from pathlib import Path

from setuptools import find_packages, setup

NAME = "nemo_deployment_launcher"
DATA = ("conf", "templates")
CHECKOUT = Path(__file__).parent


def data_files(folder: Path) -> list[str]:
    """Paths of a folder's files that are not modules, relative to the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [
        str(path.relative_to(folder))
        for path in files
        if path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    ]


packages = find_packages(include=["launcher_scripts*", "stages*"])
setup(
    packages=[NAME, *(f"{NAME}.{package}" for package in packages)],
    package_dir={NAME: "."},
    package_data={
        NAME: [f"{name}/{path}" for name in DATA for path in data_files(CHECKOUT / name)],
        f"{NAME}.launcher_scripts": [
            path
            for path in data_files(CHECKOUT / "launcher_scripts")
            if path.split("/")[0] not in ("data", "results")
        ],
    },
)
