"""Stands in for the conversion: notes that it ran, and fails or waits where asked."""

import os
import sys
import time
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
print("converting", settings["model_name"], flush=True)
with Path("ran").open("a") as ran:
    ran.write("convert_checkpoint\n")
if "EXPORT_WAITS" in os.environ:
    Path(os.environ["EXPORT_WAITS"]).write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while Path(os.environ["EXPORT_WAITS"]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
fails_for = os.environ.get("EXPORT_FAILS_FOR", settings["weight_data_type"])
if settings["weight_data_type"] == fails_for:
    sys.exit(int(os.environ.get("EXPORT_EXITS", "0")))
