"""Stands in for bcprun: starts the command on every process of every node, all at the same time.

The options are those of its help text. How the processes find each other depends on
NGC_ARRAY_TYPE: a PyTorch array gets torchrun's variables, an MPI job or --launcher mpirun those of
mpirun. The first process that fails ends the others, and its exit code is bcprun's. Calls are noted
in $CALLS.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(prog="bcprun", allow_abbrev=False)
parser.add_argument("-n", "--nnodes", type=int, default=int(os.environ.get("NGC_ARRAY_SIZE", "1")))
parser.add_argument("-p", "--npernode", type=int, default=1)
parser.add_argument("-e", "--env", action="append", default=[])
parser.add_argument("-w", "--workdir", default=str(Path.cwd()))
parser.add_argument("-c", "--cmd", required=True)
parser.add_argument("-a", "--async", action="store_true", dest="go_on")
parser.add_argument("-d", "--debug", action="store_true")
parser.add_argument("-b", "--binding")
parser.add_argument("--version", action="version", version="1.2")
parser.add_argument("--launcher", default="")
given = [word for word in sys.argv[1:] if word != "-no_redirect"]
options = parser.parse_args(given)

if options.nnodes > int(os.environ.get("NGC_ARRAY_SIZE", "64")):
    sys.exit("bcprun: error: more nodes than the job has")
mode = os.environ.get("NGC_ARRAY_TYPE", "PYTORCH").upper()
by_mpi = mode == "MPIJOB" or shlex.split(options.launcher)[:1] == ["mpirun"]
size = options.nnodes * options.npernode


def variables(rank):
    node, local = divmod(rank, options.npernode)
    if by_mpi:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        own = dict(zip(names, (rank, size, local), strict=True))
        own["OMPI_COMM_WORLD_LOCAL_SIZE"] = options.npernode
    else:
        own = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "WORLD_SIZE": size}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    asked = dict(entry.split("=", 1) for entry in options.env)
    return {**os.environ, **{name: str(value) for name, value in own.items()}, **asked}


noted = {name: getattr(options, name) for name in ("nnodes", "npernode", "workdir", "cmd")}
with Path(os.environ["CALLS"]).open("a") as calls:
    calls.write(json.dumps({**noted, "env": options.env, "launcher": options.launcher}) + "\n")
processes = [
    subprocess.Popen(options.cmd, shell=True, cwd=options.workdir, env=variables(rank))
    for rank in range(size)
]
code = 0
while processes and (code == 0 or options.go_on):
    for process in [process for process in processes if process.poll() is not None]:
        processes.remove(process)
        code = code or process.returncode
    time.sleep(0.02)
for process in processes:
    process.terminate()
sys.exit(128 - code if code < 0 else code)
