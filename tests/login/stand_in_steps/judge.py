"""Stands in for the gate: exits with the verdict that it is told."""

import os
import sys

print("judging the report", flush=True)
sys.exit(int(os.environ.get("VERDICT", "0")))
