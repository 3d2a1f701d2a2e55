"""The command `launcher`: a service, a verdict, or a look at the jobs, in one word.

    launcher serve PATH [KEY=VALUE ...]        export a checkpoint and serve it with OpenAI's
                                               interface
    launcher judge PATH [KEY=VALUE ...]        export, serve and evaluate it: GO or NO-GO
    launcher watch DIR [KEY=VALUE ...]         judge every checkpoint that a training writes into
                                               DIR
    launcher convert PATH OUT [KEY=VALUE ...]  write it as a transformers folder (Hugging Face)
    launcher swap JOB CHECKPOINT [--mode mixed]
                                               serve the weights of another export, without a pause
    launcher certificate verify FILE ...       check a certificate of equivalence, its digests and
                                               its signature; or show FILE
    launcher jobs COMMAND ...                  list, status, logs, info, wait, tunnel, stop ...

PATH is any checkpoint: a Hugging Face folder, a GGUF or .nemo file, the folder of a training.
Results are in ./results. The command prints the line of main.py that it stands for, and runs it;
KEY=VALUE are the keys of that line (python3 main.py --help).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Word -> the paths that it takes, and the stages that it runs.
_PATHS = {
    "serve": ("the PATH of a checkpoint",),
    "judge": ("the PATH of a checkpoint",),
    "watch": ("the DIR of a training",),
    "convert": ("the PATH of a checkpoint", "the folder OUT"),
}
_STAGES = {
    "serve": "export,deploy",
    "judge": "export,deploy,evaluate",
    "watch": "watch",
    "convert": "export",
}
# Words with their own module, and its first arguments.
_MODULES = {
    "jobs": ("launcher_scripts.jobs",),
    "swap": ("launcher_scripts.jobs", "swap"),
    "certificate": ("launcher_scripts.steps.certificate",),
}
CHECKOUT = Path(__file__).resolve().parent.parent
_SLURM_TIMEOUT = 10.0
# Names of folders inside a checkpoint and of its file, which do not name the model.
_INNER_FOLDERS = re.compile(
    r"checkpoints?|iter_\d+|weights|snapshots|[0-9a-f]{40}|\d+|model\.(nemo|gguf)"
)
_HUB_FOLDER = re.compile(r"models--[^/]+?--(?P<name>[^/]+)")
_EXPORT_FILES = {"t5": "t5/export_t5", "bart": "bart/export_bart", "agm": "agm/export_agm"}
_ENCODER_FILE = "t5/export_t5_encoder"


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by main.py or the command of jobs; returns only for errors and help."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("error: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    from launcher_scripts.common.command_line import open_missing_streams, with_open_output

    open_missing_streams()
    word, *others = arguments or ["--help"]
    if word in ("-h", "--help", "help"):
        return with_open_output(lambda: print(__doc__))
    if word in _MODULES:
        return _run(["-m", *_MODULES[word], *others])
    needed = _PATHS.get(word, ())
    paths, overrides = others[: len(needed)], others[len(needed) :]
    if len(paths) < max(len(needed), 1) or any("=" in path for path in paths):
        message = f"{word} needs {' and '.join(needed)}" if needed else f"unknown word {word}"
        print(f"error: {message}\n{__doc__}", file=sys.stderr)
        return 3
    if word == "convert":
        overrides = [_folder_option(paths[1]), *overrides]
    line = [str(CHECKOUT / "main.py"), *launcher_arguments(word, Path(paths[0]), overrides)]
    print(shlex.join(["python3", *line]), flush=True)
    return _run(line)


def _folder_option(folder: str) -> str:
    from launcher_scripts.common.command_line import hydra_value

    return f"export.huggingface.folder={hydra_value(str(Path(folder).expanduser().absolute()))}"


def launcher_arguments(word: str, path: Path, overrides: Sequence[str]) -> list[str]:
    """The arguments of main.py; a key of `overrides` replaces the one that would be chosen."""
    from launcher_scripts.common.command_line import hydra_value
    from launcher_scripts.config.settings import CHECKPOINT_KEY

    export_file = _export_file(path)
    path_key = "watch.training_dir" if word == "watch" else CHECKPOINT_KEY
    keys = {
        "stages": f"[{_STAGES[word]}]",
        "cluster_type": "bcm" if slurm_answers() else "interactive",
        "base_results_dir": hydra_value(str(Path("results").absolute())),
        "export.run.model_train_name": model_name(path),
        path_key: hydra_value(str(path.expanduser().absolute())),
    }
    if word == "convert":
        keys["export.format"] = "huggingface"
    else:
        keys |= {f"deploy.server.{kind}_port": "0" for kind in ("http", "grpc", "metrics")}
    if word == "serve":
        keys["deploy.gateway.port"] = "8000"
    if export_file is not None:
        keys = {"export": export_file, **keys}
        if word == "judge":
            keys["evaluate"] = "t5/evaluate_t5_encoder" if "encoder" in export_file else "benchmark"
    overridden = {override.partition("=")[0].lstrip("+") for override in overrides}
    selected = [f"{key}={value}" for key, value in keys.items() if key not in overridden]
    return [*selected, *overrides]


def model_name(path: Path) -> str:
    """A name that Triton takes, from the checkpoint's file or folder."""
    from launcher_scripts.models.repository import TEXT_MODELS

    parts = [part for part in reversed(path.expanduser().absolute().parts) if part != "/"]
    hub = next((match for part in parts if (match := _HUB_FOLDER.fullmatch(part))), None)
    name = next((part for part in parts if not _INNER_FOLDERS.fullmatch(part)), "model")
    name = hub["name"] if hub else re.sub(r"\.(nemo|gguf)$", "", name)
    name = re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).strip("-.+") or "model"
    return f"{name}-model" if name in TEXT_MODELS else name


def slurm_answers() -> bool:
    """True if jobs can be submitted from here; inside an allocation they run in place."""
    if (
        shutil.which("sbatch") is None
        or shutil.which("sinfo") is None
        or "SLURM_JOB_ID" in os.environ
    ):
        return False
    try:
        command = ["sinfo", "--noheader", "--format=%P"]
        answer = subprocess.run(command, capture_output=True, check=False, timeout=_SLURM_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def _export_file(path: Path) -> str | None:
    """The file of conf/export for a checkpoint of another family than GPT; None for GPT."""
    from launcher_scripts.checkpoint.formats import nemo_config
    from launcher_scripts.checkpoint.sources import huggingface_architectures, locations
    from launcher_scripts.common.errors import LauncherError
    from launcher_scripts.models import family_of

    try:
        checkpoint = nemo_config.find_nemo_file(path.expanduser())
        nemo = nemo_config.read_nemo_config(checkpoint)
        if nemo is not None:
            return _EXPORT_FILES["t5"] if isinstance(nemo[1].get("encoder"), dict) else None
        config = huggingface_architectures.read_sizes(checkpoint)
    except (LauncherError, OSError):
        return None  # main.py says what is wrong with the checkpoint
    if config is None:
        return _EXPORT_FILES["t5"] if locations.holds_core_t5(checkpoint) else None
    name = family_of(config).name
    return _ENCODER_FILE if name == "t5" and _is_encoder(checkpoint) else _EXPORT_FILES.get(name)


def _is_encoder(folder: Path) -> bool:
    """True if a Hugging Face folder has the encoder of a T5 alone."""
    kinds = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    return any(str(kind).endswith("EncoderModel") for kind in kinds or ())


def _run(arguments: Sequence[str]) -> int:
    """Replace this process by Python with these arguments."""
    path = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    sys.exit(main())
