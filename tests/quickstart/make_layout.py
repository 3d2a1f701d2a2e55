"""Make tests/data/nemo_mcore_gpt_layout.json: what NeMo 1.23 put into a small mcore GPT.

Run it from the checkout, with the path of the .nemo file:
    python -m tests.quickstart.make_layout model.nemo
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "data" / "nemo_mcore_gpt_layout.json"
TEXTS = (".zarray", "metadata.json")
SIZE_OF_ITS_OWN = (".yaml", ".pt")


def read_members(nemo: Path) -> dict[str, bytes | None]:
    """Every member in order; None for a folder."""
    members: dict[str, bytes | None] = {}
    with tarfile.open(nemo) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            members[member.name] = stream.read() if stream else None
    return members


def layout(nemo: Path) -> dict[str, Any]:
    """Members in order with their sizes (None where it may differ), texts and config in full."""
    members = read_members(nemo)
    config = members["./model_config.yaml"]
    return {
        "config": yaml.safe_load(config or b""),
        "members": [
            [name, None if content is None or name.endswith(SIZE_OF_ITS_OWN) else len(content)]
            for name, content in members.items()
        ],
        "texts": {
            name: content.decode()
            for name, content in members.items()
            if content and name.endswith(TEXTS)
        },
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(layout(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
