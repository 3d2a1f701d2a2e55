"""Stands in for the evaluation: needs the server's ready file, waits for it where asked."""

import os
import sys
import time
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
patience = time.monotonic() + float(os.environ.get("EVALUATE_WAITS", "0"))
files = [Path(settings["ready_file"])]
if settings["replicas"]:
    files = [files[0].with_name(f"ready-{k}.json") for k in range(settings["replicas"])]
while not all(file.exists() for file in files) and time.monotonic() < patience:
    time.sleep(0.05)
print("measuring at", *(file.read_text() for file in files), flush=True)
time.sleep(float(os.environ.get("EVALUATE_SECONDS", "0")))
sys.exit(int(os.environ.get("EVALUATE_EXITS", "0")))
