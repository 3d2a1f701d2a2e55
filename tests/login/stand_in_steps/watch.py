"""The real step of the checkout that CHECKOUT names, in place of the stand-ins' one."""

import os
import sys

environment = {**os.environ, "PYTHONPATH": os.environ["CHECKOUT"]}
command = [sys.executable, "-m", "launcher_scripts.steps.watch", *sys.argv[1:]]
os.execve(sys.executable, command, environment)
