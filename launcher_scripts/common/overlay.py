"""The folder of Python packages that an image lacks, as requirements/overlay.py makes it.

Any Python 3 can read this file, also one that is too old for the rest.
"""

import json
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parents[2] / "requirements" / "overlay.py"
# What the command leaves in its folder.
FILE_NAME = "overlay.json"


def find_overlay() -> "tuple[Path, str] | None":
    """The first such folder that this Python imports from, and the Python that it is for."""
    for entry in filter(None, sys.path):
        path = Path(entry) / FILE_NAME
        if path.is_file():
            return path.parent, json.loads(path.read_text(encoding="utf-8"))["python"]
    return None
