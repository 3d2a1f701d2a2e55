"""The signature of a model repository: made by the export, verified before it is served.

It has the format of OpenSSF's model signing (github.com/sigstore/model-transparency), so that
the command `model_signing` of that package makes and verifies the same one. It covers every file of
the repository: weights, manifests, config.pbtxt, tokenizers, and the code of the text models.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.config.security import SIGN, VERIFY_SIGNATURE, SigningKey, TrustedSigner
from launcher_scripts.models.repository import serving_options

FILE_NAME = "model.sig"
PACKAGE = "the package model-signing (requirements/sign.txt)"
_COMPILED = "__pycache__"
# How the package lists files that are not as they were signed.
_DIFFERENCES = {
    "altered": re.compile(r"Hash mismatch for \\*'(.*?)\\*'"),
    "not in the signature": re.compile(r"Extra files found in model \\*'.*?\\*': (.*?)[\"']"),
    "missing": re.compile(r"Missing files in model \\*'.*?\\*': (.*?)[\"']"),
}


def sign_repository(repository: Path, signer: SigningKey, change: str = SIGN) -> Path:
    """Write the signature of all files in the folder; returns its path.

    change: the key that names the signer

    Raises CheckpointError where a key cannot be used or a file is a link.
    """
    with _errors(f"{repository} cannot be signed", change):
        from model_signing import hashing, signing

        _remove_compiled(repository)
        path = repository / FILE_NAME
        partial = path.with_name(f"{FILE_NAME}.partial")
        config = signing.Config()
        if signer.certificate is None:
            config.use_elliptic_key_signer(private_key=signer.key)
        else:
            config.use_certificate_signer(
                private_key=signer.key,
                signing_certificate=signer.certificate,
                certificate_chain=signer.chain,
            )
        # BLAKE3 reads a file with all processors; no other file may be left out.
        hashed = hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        hashed.set_ignored_paths(paths=[path, partial], ignore_git_paths=False)
        config.set_hashing_config(hashed)
        try:
            config.sign(repository, partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def verify_signature(repository: Path, signer: TrustedSigner) -> None:
    """Raise CheckpointError unless `signer` signed all files of the folder as they are.

    What Python compiled of the text models is removed before, since no signature covers it.
    """
    path = repository / FILE_NAME
    if not path.is_file():
        change = f"{VERIFY_SIGNATURE}=null, or export again with {SIGN}"
        raise CheckpointError(problem(f"{repository} is not signed: no {FILE_NAME}", change=change))
    _check_inside(repository)
    with _errors(f"the signature of {repository} is not valid", VERIFY_SIGNATURE):
        from model_signing import hashing, verifying

        _remove_compiled(repository)
        config = verifying.Config()
        if signer.public_key is not None:
            config.use_elliptic_key_verifier(public_key=signer.public_key)
        else:
            config.use_certificate_verifier(certificate_chain=signer.certificates)
        hashed = hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        hashed.set_ignored_paths(paths=[path], ignore_git_paths=False)
        config.set_hashing_config(hashed)
        config.verify(repository, path)


def _check_inside(repository: Path) -> None:
    """Raise CheckpointError for a draft model that is outside of the signed folder."""
    problems = Problems(f"what the signature of {repository} does not cover")
    for config in sorted(repository.glob("*/config.pbtxt")):
        draft = serving_options(config)["draft_model_dir"]
        if draft and not Path(draft).is_relative_to(repository):
            change = f"export.triton_deployment.draft_model_dir, or {VERIFY_SIGNATURE}=null"
            problems.add(f"the draft model of {config.parent.name}", got=draft, change=change)
    problems.raise_if_any(CheckpointError)


def _remove_compiled(repository: Path) -> None:
    """Remove bytecode, which Python would believe without a look at the code."""
    for folder in [*map(Path, (root for root, _, _ in os.walk(repository)))]:
        if folder.name == _COMPILED:
            shutil.rmtree(folder)


@contextmanager
def _errors(message: str, change: str) -> Iterator[None]:
    """Whatever the package raises is one CheckpointError, with its reason in one line."""
    try:
        yield
    except LauncherError:
        raise
    except ImportError as error:
        raise CheckpointError(
            problem(f"{message}: this Python lacks {PACKAGE}: {error}", change=change)
        ) from error
    except Exception as error:
        raise CheckpointError(problem(f"{message}: {_reason(error)}", change=change)) from error


def _reason(error: Exception) -> str:
    """The differing files by kind, else the message, in one line."""
    text = " ".join(str(error).split())
    result = {kind: pattern.findall(text) for kind, pattern in _DIFFERENCES.items()}
    kinds = [f"{kind}: {', '.join(names)}" for kind, names in result.items() if names]
    return "; ".join(kinds) or text or type(error).__name__
