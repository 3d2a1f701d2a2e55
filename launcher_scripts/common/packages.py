"""Packages of the Python that runs the steps: what each step needs, the folder of those that an
image lacks, as requirements/overlay.py makes it, and the check before anything else is imported.

Any Python 3 can read this file, also one that is too old for the rest: standard library only, no
new syntax.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Of a verdict that was reached.
VERDICTS = {0: "GO", 1: "NO-GO", 2: "INCONCLUSIVE"}
VERDICT_FILE = "verdict.json"
# Of what could not be done, so that nobody takes it for a verdict.
ERROR = 3


COMMAND = Path(__file__).resolve().parents[2] / "requirements" / "overlay.py"
# What the command leaves in its folder.
FILE_NAME = "overlay.json"

_GATEWAY = (
    "httpx",
    "numpy",
    "prometheus_client",
    "pydantic",
    "starlette",
    "tritonclient",
    "uvicorn",
    "uvloop",
)
# Step -> the modules that it imports from packages.
STEP_PACKAGES = {
    "convert_checkpoint": ("gguf", "numpy", "yaml"),
    "judge": ("jinja2", "matplotlib", "numpy", "yaml"),
    "measure_accuracy": ("jinja2", "matplotlib", "numpy", "tritonclient", "yaml"),
    "measure_load": ("aiohttp", "jinja2", "matplotlib", "numpy", "tritonclient", "yaml"),
    "measure_reference": ("jinja2", "matplotlib", "numpy", "yaml"),
    "measure_speed": ("jinja2", "matplotlib", "numpy", "tritonclient", "yaml"),
    "measure_twin": ("jinja2", "matplotlib", "numpy", "torch", "tritonclient", "yaml"),
    "prepare_triton_model_config": ("gguf", "jinja2", "numpy", "yaml"),
    "quickstart": ("gguf", "httpx", "jinja2", "numpy", "yaml"),
    "resave_checkpoint": ("numpy", "yaml"),
    "run_gateway": ("yaml", *_GATEWAY),
    "run_harness": ("httpx", "jinja2", "matplotlib", "numpy", "tritonclient", "yaml"),
    "start_gateway": _GATEWAY,
    "start_server": ("httpx", "jinja2", "msgspec", "numpy", "torch", "yaml"),
    "watch": ("hydra", "jinja2", "numpy", "yaml"),
    "write_example_models": ("gguf", "jinja2", "numpy", "tokenizers", "yaml"),
    "write_ladder": ("jinja2", "matplotlib", "numpy", "yaml"),
    "write_model_repository": ("jinja2", "numpy", "yaml"),
}
# Variable of the first job: the later steps of the same image and Python, and further packages.
LATER_STEPS = "LAUNCHER_LATER_STEPS"
CLOSED_PACKAGES = ("cryptography",)  # of a server that its gateway alone reaches
# What computes a task's figures, and is needed when all has been asked.
TASK_PACKAGES = {"summarization": ("rouge_score",), "translation": ("sacrebleu",)}


def find_overlay() -> "tuple[Path, str] | None":
    """The first such folder that this Python imports from, and the Python that it is for."""
    for entry in filter(None, sys.path):
        path = Path(entry) / FILE_NAME
        if path.is_file():
            return path.parent, json.loads(path.read_text(encoding="utf-8"))["python"]
    return None


def remedy(python: str, torch: bool = False) -> str:
    """Return the command that installs the packages, and the key that names them."""
    extra = " --with torch" if torch else ""
    return (
        "name an interpreter that has them as cluster.python, load a module that puts them on "
        "PYTHONPATH in cluster.setup, or make a folder of packages where there is a network, and "
        f"name it as cluster.overlay: python3 {COMMAND} --python {python}{extra} FOLDER"
    )


OLDEST = (3, 10)
# Without these the standard library does the same.
SAVE_TIME = ("blake3", "zlib_ng")


def check_packages(step: str, *modules: str) -> None:
    """End the process with one line unless this Python has what the step needs, and `modules`.

    The first step of a command line also looks for what the later ones need, before it writes
    anything: they are named in LATER_STEPS. The exit code is none of an evaluation's verdicts.
    """
    later = os.environ.get(LATER_STEPS, "").split(",")
    needed = [*STEP_PACKAGES.get(step, ()), *modules]
    for name in filter(None, later):
        needed += STEP_PACKAGES.get(name, (name,))
    reason = _unfit(step, tuple(sorted(set(needed))))
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        raise SystemExit(ERROR)


def _unfit(step: str, modules: "tuple[str, ...]") -> "str | None":
    here = version(sys.version_info[:2])
    python = f"{sys.executable} (Python {here})"
    if sys.version_info[:2] < OLDEST:
        return (
            f"{step} needs Python {version(OLDEST)} or later; got {python}; change "
            "cluster.python to a newer one of the image, or container to a newer image"
        )
    overlay = find_overlay()
    if overlay is not None and overlay[1] != here:
        return (
            f"{step}: the packages in {overlay[0]} are for another Python; got Python "
            f"{overlay[1]}; this is {python}; {remedy(here)}"
        )
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        lacks = f"{step}: {python} does not have {', '.join(missing)}"
        return f"{lacks}; {remedy(here, torch='torch' in missing)}"
    return None


def note_slow_checksums() -> None:
    """Say which packages would save time."""
    absent = [name for name in SAVE_TIME if find_spec(name) is None]
    if absent:
        print(
            f"note: without {' and '.join(absent)} the standard library computes digests and "
            "checksums, three to eight times as slowly (docs/containers.md)",
            file=sys.stderr,
            flush=True,
        )


def version(numbers: "tuple[int, int]") -> str:
    return f"{numbers[0]}.{numbers[1]}"
