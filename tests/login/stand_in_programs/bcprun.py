"""Stands in for bcprun: starts the command once per process, with its environment and folder.

Every call is noted in the file $CALLS. The exit code is that of the first process that fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

arguments = sys.argv[1:]
options, env = {}, dict(os.environ)
while arguments:
    name = arguments.pop(0)
    if name == "--env":
        key, _, value = arguments.pop(0).partition("=")
        env[key] = value
    elif name in ("--nnodes", "--npernode", "--workdir", "--cmd", "--launcher"):
        options[name] = arguments.pop(0)
    elif name != "-no_redirect":
        sys.exit(f"bcprun: unrecognized arguments: {name}")
with Path(os.environ["CALLS"]).open("a") as calls:
    calls.write(json.dumps(options) + "\n")
for rank in range(int(options["--nnodes"]) * int(options["--npernode"])):
    code = subprocess.run(
        options["--cmd"],
        shell=True,
        cwd=options["--workdir"],
        env={**env, "RANK": str(rank)},
        check=False,
    ).returncode
    if code:
        sys.exit(code)
