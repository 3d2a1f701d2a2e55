"""Stands in for srun: starts the command once, in the folder asked for."""

import os
import sys

arguments = sys.argv[1:]
while arguments[0].startswith("--"):
    option, _, value = arguments.pop(0).partition("=")
    if option == "--chdir":
        os.chdir(value)
    elif option not in (
        *("--nodes", "--ntasks", "--ntasks-per-node", "--mpi", "--label"),
        *("--kill-on-bad-exit", "--overlap"),
    ):
        sys.exit(f"srun: unrecognized option '{option}'")
os.execvp(arguments[0], arguments)
