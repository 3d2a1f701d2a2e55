"""Packages of the Python that runs the steps: what each step needs, and the folder of those that an
image lacks, as requirements/overlay.py makes it.

Any Python 3 can read this file, also one that is too old for the rest.
"""

import json
import sys
from pathlib import Path

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
