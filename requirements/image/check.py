"""Build the image's root file system without docker, and run the whole job in it.

    make image-check
    make image-check TORCH_WHEEL=/wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl

mmdebstrap makes the Debian that the Dockerfile starts from, packages.sh fills it, and main.py
exports, serves and evaluates a tiny model with a Python that runs in there (chroot). That needs
root. `--root FOLDER` checks an unpacked image of another origin: docker export, enroot create.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from tests.whole_job import run_whole_job  # noqa: E402

# A Python inside of the root, with the folders of this machine that a container would have.
PYTHON = """#!/bin/sh
exec unshare --mount --propagation private sh -c '
    set -eu
    root=$1; shift
    for folder in /proc /dev {folders}; do
        mkdir -p "$root$folder"
        mount --rbind "$folder" "$root$folder"
    done
    exec chroot "$root" env --chdir="$PWD" /usr/bin/python3 "$@"
' sh {root} "$@"
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check.py", description="Check the image for jobs.")
    parser.add_argument("--root", type=Path, help="an unpacked image; default: it is made")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "results" / "image")
    parser.add_argument("--torch", default="", help="a wheel, in place of torch.txt")
    given = parser.parse_args(argv)
    folder = given.folder.absolute()
    if os.geteuid() != 0 or (given.root is None and shutil.which("mmdebstrap") is None):
        print("error: this needs root, for chroot, and mmdebstrap (apt-get install mmdebstrap)")
        return 1
    try:
        root = given.root.absolute() if given.root else make_root(folder / "root", given.torch)
        shutil.rmtree(folder / "job", ignore_errors=True)
        run_job(root, folder / "job")
    except subprocess.CalledProcessError as error:
        print(f"error: {shlex.join(map(str, error.cmd))} gave {error.returncode}", file=sys.stderr)
        return 1
    return 0


def make_root(root: Path, torch: str) -> Path:
    """What the Dockerfile makes, as a folder."""
    root.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(root, ignore_errors=True)
    print(f"Making {root}", flush=True)
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(root)], check=True
    )
    target = root / "opt" / "requirements"
    shutil.copytree(CHECKOUT / "requirements", target)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    # A network that signs for itself is trusted as on this machine.
    trusted = os.environ.get("PIP_CERT")
    if trusted:
        shutil.copy(trusted, target / "trusted.pem")
        variables["PIP_CERT"] = "/opt/requirements/trusted.pem"
    if torch:
        shutil.copy(torch, target)
        variables["TORCH"] = f"/opt/requirements/{Path(torch).name}"
    subprocess.run(
        ["chroot", str(root), "sh", "/opt/requirements/image/packages.sh"],
        env={**{k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}, **variables},
        check=True,
    )
    return root


def run_job(root: Path, folder: Path) -> None:
    """Export, serve and evaluate a tiny model with the image's Python."""
    folder.mkdir(parents=True)
    python = folder / "python"
    folders = shlex.join(map(str, (CHECKOUT, folder)))
    python.write_text(PYTHON.format(folders=folders, root=shlex.quote(str(root))))
    python.chmod(0o755)
    items = run_whole_job(folder, python)["tasks"]["lambada"]["items"]
    print(f"{root}: exported, served and answered {len(items)} items")


if __name__ == "__main__":
    sys.exit(main())
