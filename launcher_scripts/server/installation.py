"""Finds a tritonserver and gives it a folder of backends that holds ours; or becomes the server.

With `launcher_scripts/bin` in front of PATH, its `tritonserver` is this one, so the documented
command lines work as they stand: `tritonserver --model-repository=...`, alone or behind mpirun,
srun or mpiexec, with every option of the server.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import NoReturn

from launcher_scripts.common.errors import LauncherError, ServerError, problem
from launcher_scripts.common.hosts import unbind_from_core
from launcher_scripts.common.packages import find_overlay
from launcher_scripts.common.processes import is_word, server_limits, set_limits, temporary_folder

CHANGE = (
    "deploy.server.numpy_dir: a folder filled by the server's Python with "
    "`python3 -m pip install --no-deps --target FOLDER numpy==1.26.4`"
)


def check_numpy_dir(folder: Path) -> None:
    """Raise ServerError unless `folder` holds a numpy 1 that this Python can load."""
    versions = {
        package.metadata["Name"]: package.version for package in distributions(path=[str(folder)])
    }
    version = versions.get("numpy", "no numpy")
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


CHECKOUT = Path(__file__).resolve().parents[2]
OUR_BACKEND = CHECKOUT / "launcher_scripts" / "backends" / "fastertransformer"
OUR_PROGRAMS = CHECKOUT / "launcher_scripts" / "bin"
CONTAINER_SERVER = Path("/opt/tritonserver/bin/tritonserver")
STUB = "triton_python_backend_stub"
_OPTION = re.compile(r"^\s*(--[a-z][a-z-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """A tritonserver and what it needs from its surroundings.

    executable:     the server
    backends_dir:   its own backends; `python` among them
    stub:           the Python backend's worker, for the Python that runs this program
    library_dirs:   where its shared libraries lie, when the system does not know
    numpy_dir:      where its Python backend's models find numpy; None: where everybody does
    """

    executable: Path
    backends_dir: Path
    stub: Path
    library_dirs: tuple[Path, ...] = ()
    numpy_dir: Path | None = None

    def environment(self) -> dict[str, str]:
        """Variables for the server alone; its library path would break other programs.

        The Python backend embeds the `python3` it finds on PATH, so this program's comes first,
        with the shared library of the same interpreter.
        """
        libraries = [str(path) for path in self.library_dirs]
        paths = {
            "PATH": [str(Path(sys.executable).parent)],
            "PYTHONPATH": [str(CHECKOUT)],
            "LD_LIBRARY_PATH": [*libraries, *python_library_dirs()],
        }
        variables = {}
        for name, first in paths.items():
            inherited = [os.environ[name]] if os.environ.get(name) else []
            if first:
                variables[name] = os.pathsep.join([*first, *inherited])
        return variables

    @property
    def names_memory_apart(self) -> bool:
        """Return whether every region of shared memory has a name of its own under one prefix.

        Before Triton 2.45 (24.04) regions are counted in each backend, so that two backends with
        one prefix take each other's.
        """
        library = self.backends_dir / "python" / "libtriton_python.so"
        return library.is_file() and b"uuid" in library.read_bytes()

    def require_options(self, arguments: Sequence[str]) -> None:
        """Raises ServerError where the server is old and has no such options."""
        if self.names_memory_apart:
            return
        command = [str(self.executable), "--help"]
        environment = {**os.environ, **self.environment()}
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        supported = set(_OPTION.findall(process.stdout + process.stderr))
        options = [argument.partition("=")[0] for argument in arguments]
        unknown = [option for option in options if supported and option not in supported]
        if unknown:
            raise ServerError(
                problem(
                    "this tritonserver is too old to have these options",
                    got=unknown,
                    change="deploy.server.tritonserver or the container (Triton 24.01 has them "
                    "all), or leave out what needs them: "
                    "'deploy.server.security.restricted_apis=[]'",
                )
            )

    def make_backends(self, folder: Path) -> None:
        """Fill `folder` with the server's backends and ours, for --backend-directory.

        Ours takes the place of a FasterTransformer backend that the server may have itself.
        Raises ServerError for a server whose backends cannot be written in Python.
        """
        if b"is_cancelled" not in self.stub.read_bytes():  # came in the same release
            raise ServerError(
                problem(
                    "this tritonserver is too old",
                    got=str(self.executable),
                    choices=["Triton 2.39 (container 23.10) or later"],
                    change="deploy.server.tritonserver, or the container",
                )
            )
        (folder / "python").mkdir(parents=True)
        for path in self.backends_dir.iterdir():
            if path.name not in ("python", OUR_BACKEND.name):
                (folder / path.name).symlink_to(path.resolve())
        # Copies: Triton refuses a library that resolves to outside of the backends' folder.
        for path in (self.backends_dir / "python").iterdir():
            if path.is_file() and path.name != STUB:
                shutil.copyfile(path, folder / "python" / path.name)
        # Wheels lose the run bit with some installers, and their folder may be read-only.
        stub = folder / "python" / STUB
        shutil.copyfile(self.stub, stub)
        stub.chmod(0o755)
        (folder / OUR_BACKEND.name).symlink_to(OUR_BACKEND)
        # The stub's Python ignores PYTHONPATH since 3.11; this folder is on its path.
        (folder / "python" / "launcher_scripts").symlink_to(CHECKOUT / "launcher_scripts")
        overlay = find_overlay()
        for path in [] if overlay is None else overlay[0].iterdir():
            (folder / "python" / path.name).symlink_to(path)
        self.check_stub(stub)

    def check_stub(self, stub: Path) -> None:
        """Say now, in one line, what the server would bury in its log: a missing library."""
        started = subprocess.run(
            [str(stub)],
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
            check=False,
        )
        if "error while loading shared libraries" in started.stderr:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise ServerError(
                problem(
                    f"Triton's Python backend cannot start: {started.stderr.strip()}",
                    change=f"the system: libpython{version} is a package of its own on Debian and "
                    f"Ubuntu (apt-get install libpython{version})",
                )
            )


def find_installation(configured: str | None, numpy_dir: str | None = None) -> Installation:
    """The configured server, else the container's or the one on PATH, else the pip package's.

    numpy_dir: see Installation. Raises ServerError that lists where was looked.
    """
    installation = _find(configured)
    if numpy_dir is None:
        return installation
    check_numpy_dir(Path(numpy_dir))
    return replace(installation, numpy_dir=Path(numpy_dir))


def _find(configured: str | None) -> Installation:
    if configured is not None:
        executable = shutil.which(configured)
        if executable is None:
            raise ServerError(
                problem(
                    "there is no such server program",
                    got=configured,
                    change="deploy.server.tritonserver",
                )
            )
        return _at(Path(executable))
    on_path = shutil.which("tritonserver", path=_path()) or shutil.which(CONTAINER_SERVER)
    if on_path is not None:
        return _at(Path(on_path))
    packaged = _packaged()
    if packaged is None:
        raise ServerError(
            problem(
                "there is no tritonserver",
                choices=[
                    "on PATH",
                    str(CONTAINER_SERVER),
                    f"the package nvidia-pytriton of {sys.executable}",
                ],
                change="deploy.server.tritonserver",
            )
        )
    return _usable(packaged)


def _path() -> str:
    """PATH without the folder whose tritonserver starts the one that is looked for."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if Path(folder).resolve() != OUR_PROGRAMS)


def _at(executable: Path) -> Installation:
    """The installation around a server program, laid out as in Triton's containers or the wheel."""
    root = executable.resolve().parents[1]
    packaged = _packaged()
    if packaged is not None and packaged.executable.resolve() == executable.resolve():
        return _usable(packaged)
    backends_dir = root / "backends"
    return _usable(Installation(executable, backends_dir, backends_dir / "python" / STUB))


def _usable(installation: Installation) -> Installation:
    """The installation, with the run bit that some installers lose; raises when a part is gone."""
    executable, stub = installation.executable, installation.stub
    if not stub.is_file():
        raise ServerError(
            problem(
                f"{executable} has no Python backend for this Python",
                got=f"no {stub}",
                change="deploy.server.tritonserver",
            )
        )
    if not os.access(executable, os.X_OK):
        try:
            executable.chmod(executable.stat().st_mode | 0o111)
        except OSError as error:
            raise ServerError(f"{executable} has no run bit: {error}") from error
    return installation


def _packaged() -> Installation | None:
    """The server inside the nvidia-pytriton wheel, if it is installed for this Python."""
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        return None
    site_packages = Path(package.submodule_search_locations[0]).parent
    root = site_packages / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Installation(
        root / "bin" / "tritonserver",
        root / "backends",
        root / "python_backend_stubs" / version / STUB,
        (site_packages / "nvidia_pytriton.libs",),
    )


def python_library_dirs() -> list[str]:
    """Return the folders of the running Python's shared library; [] if it has none of its own."""
    folder = sysconfig.get_config_var("LIBDIR")
    name = sysconfig.get_config_var("INSTSONAME")
    return [folder] if folder and name and (Path(folder) / name).is_file() else []


_BACKENDS = "--backend-directory"
_REPOSITORIES = ("--model-repository", "--model-store")
# The models' files say everything; Triton would ask each of them once more.
_NO_COMPLETION = "--disable-auto-complete-config"


def main(argv: Sequence[str]) -> int:
    """Become the server. Returns only where there is none to become, with the exit status."""
    note = unbind_from_core(os.environ)
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    try:
        become(find_installation(None), argv)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def become(installation: Installation, argv: Sequence[str]) -> NoReturn:
    """Replace this process by the server: same process id, signals and working directory.

    Raises ServerError for a repository whose path would break in Triton's shell; see is_word.
    """
    for repository in _repositories(argv):
        if not is_word(repository):
            message = "Triton cannot start models below a path with blanks or a shell's characters"
            link = "--model-repository to a link to it: ln -s FOLDER /tmp/models"
            raise ServerError(problem(message, got=repository, change=link))
    names = {argument.partition("=")[0] for argument in argv}
    added = []
    if _BACKENDS not in names:
        added.append(f"{_BACKENDS}={backends_folder(installation)}")
    if _NO_COMPLETION not in names:
        added.append(_NO_COMPLETION)
    set_limits(server_limits())
    program = str(installation.executable.absolute())
    os.execve(program, [program, *added, *argv], {**os.environ, **installation.environment()})


def _repositories(argv: Sequence[str]) -> list[str]:
    """The repositories that are named, as `--option=PATH` or `--option PATH`."""
    result = []
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        option, equal, value = argument.partition("=")
        if option in _REPOSITORIES and (equal or following):
            result.append(value if equal else following)
    return result


def backends_folder(installation: Installation) -> Path:
    """The server's backends and ours, in a folder that later servers of this user share.

    It appears complete. Raises ServerError where somebody else may write to it.
    """
    status = installation.stub.stat()
    stub = (installation.stub, status.st_mtime_ns, status.st_size)
    identity = (CHECKOUT, installation.executable, *stub, find_overlay())
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = temporary_folder() / f"launcher-backends-{os.geteuid()}-{digest}"
    if _is_usable_folder(folder, installation):
        return folder
    try:
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            installation.make_backends(new)
            if not _is_usable_folder(folder, installation):
                shutil.rmtree(folder, ignore_errors=True)
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        if not _is_usable_folder(folder, installation):
            raise ServerError(f"cannot prepare the backends' folder {folder}: {error}") from error
    return folder


def _is_usable_folder(folder: Path, installation: Installation) -> bool:
    """Return whether it is there with all of its parts: somebody may clean the temporary folder
    up."""
    if not os.path.lexists(folder):
        return False
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        message = "somebody else may write to the folder of backends"
        raise ServerError(problem(message, got=str(folder), change="TMPDIR"))
    python = {path.name for path in (installation.backends_dir / "python").iterdir()}
    parts = [OUR_BACKEND.name, *(f"python/{name}" for name in {*python, STUB, "launcher_scripts"})]
    return all((folder / part).exists() for part in parts if "__pycache__" not in part)
