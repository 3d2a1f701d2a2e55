"""Where the figures of a section come from: digests of what was read, and whose code asked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher_scripts.common.digests import file_digest, value_digest
from launcher_scripts.common.tokenizer import (
    CHAT_TEMPLATE_FILES,
    GENERATION_FILE,
    OPTIONAL_FILES,
    chat_templates,
    tokenizer_files,
)
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.config.tasks import TaskSettings

CHECKOUT = Path(__file__).resolve().parents[2]
MANIFEST = "manifest.json"
# What figures are computed with, where a client has it: NeMo is asked without any.
CLIENT_PACKAGES = (
    *("numpy", "rouge_score", "sacrebleu", "sentencepiece", "tokenizers", "torch"),
    *("transformers", "tritonclient"),
)
# Where the server is and how long to wait for it: no figure depends on these.
_PLACES = (
    *("ready_file", "results_dir", "ready_timeout", "request_timeout", "grpc_tls"),
    *("server_job_folder", "published_as", "resume", "steps"),
)


def digests(settings: EvaluateSettings, data: Iterable[str] = ()) -> dict[str, Any]:
    """BLAKE2b digests of 256 bits; null where there is no such thing.

    data:          of every file that was read, by its name
    tokenizer:     of the tokenizer's files, chat templates left out
    chat_template: of the tokenizer's templates
    manifest:      of the served checkpoint's manifest.json, which has the digest of every weight
    configuration: of the settings, without where the server is and how long to wait for it
    reasons:       why one of them is null, by its name
    """
    folder = Path(settings.tokenizer_dir)
    reasons = {}
    manifest = tokenizer = template = None
    try:
        manifest = file_digest(folder / MANIFEST)
    except OSError as error:
        reasons["manifest"] = f"{folder / MANIFEST}: {error.strerror}"
    try:
        files = {path.name: path.read_bytes() for path in tokenizer_files(folder)}
        if files:
            tokenizer = value_digest(_of_tokenizer(files))
        else:
            reasons["tokenizer"] = f"{folder} has no tokenizer"
        templates = chat_templates(files)
        template = value_digest(templates) if templates else None
    except (OSError, ValueError) as error:
        reasons["tokenizer"] = f"{folder}: {error}"
    found = {
        "data": _data(data),
        "tokenizer": tokenizer,
        "chat_template": template,
        "manifest": manifest,
        "configuration": value_digest(_configuration(settings)),
    }
    return {**found, "reasons": reasons} if reasons else found


def _data(files: Iterable[str]) -> dict[str, str]:
    """A file that cannot be read is left out: who reads it says why."""
    result = {}
    for file in files:
        with contextlib.suppress(OSError):
            result[Path(file).name] = file_digest(Path(file))
    return result


def _of_tokenizer(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What makes tokens of text: the files without how chats and texts are written."""
    left_out = (*CHAT_TEMPLATE_FILES, GENERATION_FILE)
    kept: dict[str, Any] = {
        name: content.hex() for name, content in files.items() if name not in left_out
    }
    name = OPTIONAL_FILES[1]
    if name in files:
        said = json.loads(files[name])
        if isinstance(said, dict):
            said.pop("chat_template", None)
        kept[name] = said
    return kept


def _configuration(settings: EvaluateSettings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    return {name: value for name, value in values.items() if name not in _PLACES}


def data_files(task: TaskSettings) -> tuple[str, ...]:
    """What a task reads."""
    target = task.generation.target_file
    return (task.data_file,) if target is None else (task.data_file, target)


def questions_of(task: TaskSettings) -> dict[str, Any]:
    """Of a task's settings, what its questions are made of besides the data."""
    left_out = ("data_file", "batch_size", "reference")
    values = dataclasses.asdict(task)
    return {name: value for name, value in values.items() if name not in left_out}


def client_versions() -> dict[str, str]:
    """Of the packages of CLIENT_PACKAGES that are there."""
    result = {}
    for package in CLIENT_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            result[package] = version(package)
    return result


def project_commit() -> str | None:
    """The checkout's commit, with -dirty where files are changed; None outside of git."""
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def set_up(measured_on: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """What answers depend on: a journal goes on while this stays as it is.

    The server may have been started again, elsewhere, where a manifest says that it serves the same
    weights. Without one only the same start of a server is known to.

    own: what the measurement asks, as plain values
    """
    server, found = measured_on["server"], dict(measured_on["digests"])
    same = {
        "versions": server.get("versions"),
        "devices": sorted(str(rank.get("device")) for rank in server.get("ranks", [])),
    }
    if found["manifest"] is None:
        same = {name: value for name, value in server.items() if name != "alive_at"}
    dropped = ("configuration", "reasons")
    return {
        **own,
        **{name: value for name, value in found.items() if name not in dropped},
        "parameters": measured_on["parameters"],
        "server": same,
        "commit": measured_on["client"]["commit"],
        "client": {name: measured_on["client"].get(name) for name in CLIENT_PACKAGES},
    }


def reference_set_up(measured_on: Mapping[str, Any], path: Path, **own: Any) -> dict[str, Any]:
    """What the answers of a reference in the folder or file `path` depend on."""
    return {
        **own,
        "data": measured_on["digests"]["data"],
        "tokenizer": measured_on["digests"]["tokenizer"],
        "reference": files_of(path),
        "commit": measured_on["client"]["commit"],
        "client": {name: measured_on["client"].get(name) for name in CLIENT_PACKAGES},
    }


def files_of(path: Path) -> dict[str, str]:
    """The folder or file `path`, with a digest of its files' names, sizes and times."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    stamps = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]
    return {"path": str(path), "files": value_digest(stamps)}
