"""The prompts of benchmarks.prefix_cache: what they have in common, and with whom."""

from __future__ import annotations

import numpy as np

from benchmarks.prefix_cache import asked_by, requests
from benchmarks.repositories import RandomModel
from benchmarks.shapes import TINY


def test_prompts_of_one_round_share_a_prefix_of_their_own() -> None:
    random, model = np.random.default_rng(0), RandomModel("tiny", TINY["tiny"], 4)
    rounds = [requests(random, (40, 5, 3), 8, model) for _ in range(2)]
    for asked in rounds:
        assert {(len(each.prompt_ids), each.output_len) for each in asked} == {(45, 3)}
        assert len({each.prompt_ids[:40] for each in asked}) == 1
        assert len({each.prompt_ids for each in asked}) == 8
    assert rounds[0][0].prompt_ids[:16] != rounds[1][0].prompt_ids[:16]
    assert [part.clients for part in asked_by(8, rounds[0]).divided(3)] == [3, 3, 2]
