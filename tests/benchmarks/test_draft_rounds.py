"""A round of a draft model is timed as a step is."""

from __future__ import annotations

import pytest

from benchmarks import draft_rounds
from tests.engine.small_models import engine_for, random_tensors, small_config
from tests.engine.test_drafts import accepted, tried


def test_rounds_and_steps_are_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rounds, "COUNTS", (0, 3))
    monkeypatch.setattr(draft_rounds, "PROMPT", 9)
    monkeypatch.setattr(draft_rounds, "TOKENS", 16)
    config = small_config(vocab_size=32000, end_id=32000, start_id=0)
    tensors, draft = (random_tensors(config, seed) for seed in range(2))
    engine = engine_for(config, tensors, draft=(config, draft))
    plain, drafting = draft_rounds.measured(engine, 2)
    assert (plain["proposed"], drafting["proposed"]) == (0, 3)
    assert plain["pays_at"] == 1
    assert drafting["pays_at"] == pytest.approx(drafting["ms"] / plain["ms"], abs=0.01)
    assert accepted(engine) < 0.1 * tried(engine)
    engine.close()
