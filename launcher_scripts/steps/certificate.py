"""The command `launcher certificate`: read a certificate, and verify what it is bound to.

launcher certificate show FILE
launcher certificate verify FILE [--export FOLDER] [--source PATH] [--public-key PEM]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.command_line import CommandParser, installed_packages, with_open_output
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems
from launcher_scripts.common.packages import ERROR

with installed_packages("evaluation"):
    from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
    from launcher_scripts.checkpoint.fastertransformer.manifest import source_digest
    from launcher_scripts.checkpoint.verification import FILE_NAME, verify_signature
    from launcher_scripts.common.files import MANIFEST, file_digest
    from launcher_scripts.config.security import TrustedSigner
    from launcher_scripts.evaluation.report import tokenizer_digests
    from launcher_scripts.evaluation.twin.certificate import DIFFERENT, EQUIVALENT, lines, read

CODES = {EQUIVALENT: 0, DIFFERENT: 1}  # 2: inconclusive


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="launcher certificate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("show", "print the statement"),
        ("verify", "recompute the digests, and check the signature"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("file", type=Path, help="certificate.json, or its results folder")
        if name == "verify":
            command.add_argument("--export", type=Path, help="folder of the exported shards")
            command.add_argument("--source", type=Path, help="the checkpoint that was exported")
            command.add_argument("--public-key", type=Path, help="PEM file of who signed it")
            command.add_argument(
                "--ca", type=Path, action="append", help="PEM file of an authority"
            )
    args = parser.parse_args(argv)
    try:
        return with_open_output(lambda: _run(args))
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR


def _run(args: argparse.Namespace) -> int:
    """0: equivalent, 1: different, 2: inconclusive; 3: the certificate is not valid."""
    file, content = read(args.file)
    print("\n".join(lines(content)))
    if args.command == "verify":
        for line in verify(file, content, args.export, args.source, _signer(args)):
            print(line)
    return CODES.get(content["statement"], 2)


def _signer(args: argparse.Namespace) -> TrustedSigner | None:
    if args.public_key is None and not args.ca:
        return None
    key = None if args.public_key is None else str(args.public_key)
    return TrustedSigner(key, tuple(map(str, args.ca or ())))


def verify(
    file: Path,
    content: Mapping[str, Any],
    export: Path | None = None,
    source: Path | None = None,
    signer: TrustedSigner | None = None,
) -> Iterator[str]:
    """Check every digest that can be recomputed; yields what was verified, a line each.

    export, source: where these are now; None: not checked
    Raises CheckpointError with everything that is not as the certificate says.
    """
    digests, problems = content["digests"], Problems(f"the certificate {file}")
    if signer is not None:
        verify_signature(file.parent, signer)
        yield "signature: valid"
    elif (file.parent / FILE_NAME).exists():
        yield "signature: not checked; --public-key or --ca checks it"
    expected, checks = dict(digests), dict[str, Callable[[], Mapping[str, Any]]]()
    if export is not None:
        checks["manifest"] = lambda: {"manifest": file_digest(export / MANIFEST)}
        checks["tokenizer"] = lambda: tokenizer_digests(export)
    if source is not None:
        expected["source"] = dict(digests["source"] or {}).get(source.name)
        checks["source"] = lambda: {"source": source_digest(source)}
    for kind, compute in checks.items():
        try:
            computed = compute()
        except (OSError, ValueError) as error:
            problems.add(f"its {kind} cannot be read: {error}")
            continue
        for name, digest in computed.items():
            if digest == expected[name]:
                yield f"{name}: {json.dumps(digest)}"
            else:
                problems.add(f"it is of another {name}", got=digest, choices=[expected[name]])
    if export is not None:
        with problems.collecting():
            FTCheckpoint.open(export)  # every shard has the digest of the manifest
            yield "shards: as the manifest says"
    problems.raise_if_any(CheckpointError)


if __name__ == "__main__":
    sys.exit(main())
