"""Whoever waits for a kernel learns that it is being compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from triton import knobs
from triton.runtime import build

from launcher_scripts.kernels.cuda.compiling import (
    compiling_in,
    launchers_kept_apart,
    tell_of_compilation,
)
from launcher_scripts.kernels.cuda.embedding import embed
from tests.kernels.hopper import Hopper, hopper

__all__ = ["hopper"]


def test_a_compilation_is_told_of(monkeypatch: pytest.MonkeyPatch):
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    told: list[str] = []
    assert tell_of_compilation(lambda: told.append("begins"), lambda: told.append("ended"))
    details = {"key": "", "repr": "", "fn": None, "compile": {}, "is_manual_warmup": False}
    assert knobs.runtime.jit_cache_hook(**details, already_compiled=False) is False
    assert told == ["begins"]
    assert knobs.runtime.jit_post_compile_hook(**details, already_compiled=False) is False
    assert told == ["begins", "ended"]


MODULE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "apart_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_apart_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C compiler, or Python's headers are not there",
)
def test_a_launcher_stays_what_it_was_when_another_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of one name, as Triton makes them, each loaded twice."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "gcc")
    sources = [MODULE.replace("NUMBER", number) for number in "12"]

    def loaded() -> list[int]:
        modules = [build.compile_module_from_src(each, "apart_launcher") for each in sources * 2]
        return [module.launch() for module in modules]

    try:
        with launchers_kept_apart():
            assert loaded() == [1, 2, 1, 2]
        assert loaded() != [1, 2, 1, 2], "Python keeps them apart itself"
    finally:
        sys.modules.pop("apart_launcher", None)


KEYS = """
import json, sys
from importlib import import_module
from triton.runtime.jit import JITFunction
from launcher_scripts.kernels.cuda.compiling import settle_keys

package = "launcher_scripts.kernels.cuda"
for name in sys.argv[1:]:
    import_module(f"{package}.{name}")
settle_keys(package)
keys, globals_of = {}, {}
for name in sys.argv[1:]:
    for item, value in vars(sys.modules[f"{package}.{name}"]).items():
        if isinstance(value, JITFunction):
            keys[item] = value.cache_key
            globals_of[item] = [(name, repr(value)) for (name, _), (value, _) in
                                value.used_global_vals.items()]
print(json.dumps([keys, globals_of]))
"""


def test_a_kernel_has_the_same_key_whatever_is_imported(checkout: Path):
    """Triton orders the globals of one name by their addresses, so these must not differ."""
    sets = (["dot"], ["beams", "experts", "dot"], ["fused", "gemv", "convolution", "dot"])
    results = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", KEYS, *modules],
                env={**os.environ, "PYTHONPATH": str(checkout)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for modules in sets
    ]
    for keys, globals_of in results:
        assert keys["dot_rows"] == results[0][0]["dot_rows"]
        for kernel, used in globals_of.items():
            assert len(dict(used)) == len(set(map(tuple, used))), kernel


def test_threads_compile_all_that_can_be(hopper: Hopper) -> None:
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    table = torch.empty(8, 24, device="meta")
    with compiling_in(1):
        embed(ids, torch.empty(8, 1 << 24, device="meta"), 0)  # more than a program can have
        embed(ids, table, 0)
        embed(ids, table, 0)
    assert hopper.loaded == ["look_up"]
    embed(ids, table, 0)
    assert hopper.loaded == ["look_up"]
