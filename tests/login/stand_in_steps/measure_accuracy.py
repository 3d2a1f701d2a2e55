"""Stands in for the evaluation: needs the server's ready file."""

import os
import sys
import time
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
print("measuring at", Path(settings["ready_file"]).read_text(), flush=True)
time.sleep(float(os.environ.get("EVALUATE_SECONDS", "0")))
sys.exit(int(os.environ.get("EVALUATE_EXITS", "0")))
