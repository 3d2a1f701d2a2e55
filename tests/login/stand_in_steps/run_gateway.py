"""Stands in for a gateway's job: a ready file, a clean end on SIGTERM."""

import json
import signal
import sys
import time
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
ready_file = Path(settings["results_dir"]) / "ready.json"
openai = f"http://127.0.0.1:{settings['gateway']['port']}/v1"


def stop(*_: object) -> None:
    ready_file.unlink()
    print("gateway stopped in order", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
partial = ready_file.with_suffix(".partial")
partial.write_text(json.dumps({"openai": openai, "job": {"folder": settings["job_folder"]}}))
partial.replace(ready_file)
while True:
    time.sleep(0.05)
