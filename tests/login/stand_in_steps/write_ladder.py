"""Stands in for the comparison of a ladder's rungs: says what it was given."""

import sys
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
for rung in settings["rungs"]:
    names = [Path(job).parents[1].name.split("_")[0] for job in rung["jobs"]]
    print("compares", rung["name"], *names, flush=True)
