"""A server that somebody types: the installed tritonserver, which knows this project's backend.

With `launcher_scripts/bin` in front of PATH, its `tritonserver` is this one, so the documented
command lines work as they stand: `tritonserver --model-repository=...`, alone or behind mpirun,
srun or mpiexec, with every option of the server.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launcher_scripts.common.errors import LauncherError, ServerError, problem
from launcher_scripts.common.hosts import unbind_from_core
from launcher_scripts.common.overlay import find_overlay
from launcher_scripts.common.processes import is_word, server_limits, set_limits, temporary_folder
from launcher_scripts.server.installation import (
    CHECKOUT,
    OUR_BACKEND,
    STUB,
    Installation,
    find_installation,
)

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
    if _usable(folder, installation):
        return folder
    try:
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            installation.make_backends(new)
            if not _usable(folder, installation):
                shutil.rmtree(folder, ignore_errors=True)
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        if not _usable(folder, installation):
            raise ServerError(f"cannot prepare the backends' folder {folder}: {error}") from error
    return folder


def _usable(folder: Path, installation: Installation) -> bool:
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
