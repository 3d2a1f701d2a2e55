"""Whoever waits for a kernel learns that it is being compiled."""

from __future__ import annotations

import pytest

from launcher_scripts.kernels.compiling import tell_of_compilation


def test_a_compilation_is_told_of(monkeypatch: pytest.MonkeyPatch):
    knobs = pytest.importorskip("triton.knobs")
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    told: list[str] = []
    assert tell_of_compilation(lambda: told.append("begins"), lambda: told.append("ended"))
    details = {"key": "", "repr": "", "fn": None, "compile": {}, "is_manual_warmup": False}
    assert knobs.runtime.jit_cache_hook(**details, already_compiled=False) is False
    assert told == ["begins"]
    assert knobs.runtime.jit_post_compile_hook(**details, already_compiled=False) is False
    assert told == ["begins", "ended"]
