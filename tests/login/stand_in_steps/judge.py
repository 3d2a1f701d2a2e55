"""Stands in for the gate: writes a verdict, and exits with the one that it is told."""

import os
import sys
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
print("judging the report", flush=True)
results = Path(settings["results_dir"])
report = os.environ.get("REPORT")  # of a series: what a real evaluation would have written
if report:
    (results / "report.json").write_text(report)
(results / "verdict.json").write_text('{"verdict": "GO"}' if report else "{}")
sys.exit(int(os.environ.get("VERDICT", "0")))
