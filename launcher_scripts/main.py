"""The documented second entry: runs the main.py of the checkout, from any working directory.

The root file is run, not imported: Hydra finds conf/ beside the file that it is started from.
"""

import runpy
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    # This folder's modules (errors, settings, ...) are not top-level modules.
    sys.path[0] = str(CHECKOUT)
    runpy.run_path(str(CHECKOUT / "main.py"), run_name="__main__")
