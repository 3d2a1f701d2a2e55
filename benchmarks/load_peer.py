"""Seconds from the start of a process to CTranslate2's first token, as a JSON line.

    python3 -m benchmarks.load_peer --folder FOLDER --shape 5b [--write]

`--write` makes the model's files, which must be there otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import ctranslate2_models
from benchmarks.peers import config_of, say
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.server.service import process_started


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args(argv)
    folder, config = arguments.folder / "ctranslate2", config_of(arguments.shape)
    if arguments.write:
        ctranslate2_models.write(folder, config)
        return 0
    imported = time.time()
    model = ctranslate2_models.Model(folder, config, arguments.device)
    loaded = time.time()
    model.generate([[2, 3, 4]], 1)
    started = process_started()
    say(
        version=ctranslate2_models.VERSION,
        imported_s=round(imported - started, 2),
        loaded_s=round(loaded - started, 2),
        first_token_s=round(time.time() - started, 2),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
