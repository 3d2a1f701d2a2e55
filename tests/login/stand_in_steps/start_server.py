"""Stands in for the server: a child process of its own, a ready file, a clean end on SIGTERM.

SERVER: dies_early | never_ready | dies_later | deaf (to SIGTERM) | leaves_child
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
known = settings["replica"]
replica = sys.argv[sys.argv.index("--replica") + 1] if "--replica" in sys.argv else known
number = "" if replica is None else f"-{replica}"
published = Path(settings["results_dir"]) / f"ready{number}.json"
held_back = settings["promote"] is not None
ready_file = published.with_name(f"ready.candidate{number}.json") if held_back else published
ready = {"http": "127.0.0.1:8000", "job": {"folder": settings["job_folder"]}}
behaviour = os.environ.get("SERVER", "")
results = Path(settings["results_dir"])
children: list[subprocess.Popen[bytes]] = []
stopping = False


def stop(*_: object) -> None:
    global stopping
    stopping = True
    if behaviour == "deaf" or not children:
        return
    if behaviour != "leaves_child":
        children[0].kill()
        children[0].wait()
    print("server stopped in order", flush=True)
    sys.exit(0)


# Before the child starts: a rank that dies early may have this one ended at any moment.
signal.signal(signal.SIGTERM, stop)
children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
if stopping:
    stop()
(results / f"pids{number}").write_text(f"{os.getpid()} {children[0].pid}")
print("server starts", flush=True)
if settings["gateway"]:
    ready["openai"] = "http://127.0.0.1:8080/v1"
    print('I1127 15:29:47.513300 11846 server.cc:241] "loading"\n+---+\n| a |\n+---+\n', flush=True)
    print("try: curl http://127.0.0.1:8080/v1/completions\nseconds of the start:", flush=True)

if behaviour == "dies_early":
    print("the port is in use", flush=True)
    children[0].kill()
    sys.exit(7)
if behaviour != "never_ready":
    partial = ready_file.with_suffix(".partial")
    partial.write_text(json.dumps(ready))
    partial.replace(ready_file)
if behaviour == "dies_later":
    time.sleep(0.7)
    print("a rank died", flush=True)
    sys.exit(9)
while True:
    time.sleep(0.05)
    if held_back and Path(settings["job_folder"], "promotion.json").exists():
        ready_file.replace(published)
        held_back = False
