"""Every kernel against the reference, on odd sizes and poisoned outputs, without a GPU.

The Triton language's interpreter runs kernels on CPU tensors; the module is loaded in a process of
its own because the interpreter is chosen when the language is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.engine.model.families import kernels_for
from launcher_scripts.kernels import reference

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the Triton language is not installed"
)

FOLDER = Path(__file__).parent
CHECKS = sorted(FOLDER.glob("*_checks.py"))
PLUGIN = ("-p", "tests.kernels.quick_interpreter")
INTERPRETER_WARNINGS = ("-W", "ignore:Conversion of an array:DeprecationWarning")


@needs_triton
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["--share", "48", *CHECKS], id="a share"),
        *(pytest.param([path], marks=pytest.mark.slow, id=path.name) for path in CHECKS),
    ],
)
def test_interpreted_kernels_equal_the_reference(checkout, chosen):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(checkout),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to load than some checks
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q"),
            *(*PLUGIN, *INTERPRETER_WARNINGS, *chosen),
        ],
        env=environment,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_cpu_gets_the_reference_and_cuda_needs_the_language():
    assert kernels_for("cpu") is reference
    with pytest.raises(KeyError):
        kernels_for("tpu")
