"""Stands in for the gate: writes a verdict, and exits with the one that it is told."""

import os
import sys
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
print("judging the report", flush=True)
(Path(settings["results_dir"]) / "verdict.json").write_text("{}")
sys.exit(int(os.environ.get("VERDICT", "0")))
