"""The figures of two models' logits, beside what they are by definition."""

from __future__ import annotations

import numpy as np
import pytest

from launcher_scripts.evaluation.tasks.logits import buckets, by_position, compare_logits, fit
from launcher_scripts.evaluation.twin.diagnosis import Finding, chat_finding, text_findings

IDS = (3, 1, 4, 1, 5)


def logits(seed: int, width: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(IDS), width)).astype(np.float32)


def test_figures_are_those_of_the_probabilities() -> None:
    ours, theirs = logits(0), logits(1)
    found = compare_logits(IDS, ours, theirs)
    q, p = (np.exp(each.astype(np.float64)) for each in (ours, theirs))
    q, p = q / q.sum(-1, keepdims=True), p / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(-1))
    next_ones = [q[place, token] for place, token in enumerate(IDS[1:])]
    assert found.log_likelihood == pytest.approx(np.log(next_ones).sum())
    same = ours.argmax(-1) == theirs.argmax(-1)
    assert found.same.tolist() == same.tolist()
    assert found.first_divergence == same.tolist().index(False)
    assert compare_logits(IDS, ours, ours).first_divergence is None


def test_a_constant_and_padding_mean_nothing_and_a_factor_is_found() -> None:
    theirs = logits(1)
    moved = np.pad(3 * theirs + np.arange(len(IDS))[:, None], ((0, 0), (0, 2)))
    found = fit([compare_logits(IDS, moved.astype(np.float32), theirs)])
    assert found.scale == pytest.approx(3)
    assert found.error == pytest.approx(2)
    assert found.residual < 1e-5


def test_ranges_of_positions_double_and_hold_the_rows_that_reach_them() -> None:
    assert buckets(1) == [(0, 1)]
    assert buckets(6) == [(0, 1), (1, 2), (2, 4), (4, 6)]
    long = compare_logits(IDS, logits(0), logits(1))
    found = by_position([long, long.part(0, 3)])
    assert [(each.first, each.last) for each in found] == [(0, 0), (1, 1), (2, 3), (4, 4)]
    assert found[2].kl == pytest.approx((2 * long.kl[2] + long.kl[3]) / 3)
    assert found[3].kl == pytest.approx(long.kl[4])


@pytest.mark.parametrize(
    ("served", "original", "name", "ids"),
    [
        ([[1, 2], [3, 4]], [[0, 1, 2], [0, 3, 4]], "lost_bos", [0]),
        ([[0, 0, 1, 2], [0, 0, 3, 4]], [[1, 2], [3, 4]], "added_bos", [0, 0]),
        ([[1, 2, 9], [3, 4, 9]], [[1, 2], [3, 4]], "other", [9]),
        ([[1, 2], [3, 5]], [[1, 2], [3, 4]], "tokenizer", None),
        ([[7, 1, 2], [8, 3, 4]], [[1, 2], [3, 4]], "tokenizer", None),
    ],
)
def test_ids_tell_an_opening_token_from_another_tokenizer(
    served: list[list[int]], original: list[list[int]], name: str, ids: list[int] | None
) -> None:
    (finding,) = text_findings(["one", "two"], served, original)
    assert finding.name == name
    assert finding.evidence.get("opening_ids", finding.evidence.get("closing_ids")) == ids
    assert text_findings(["one", "two"], original, original) == []


def test_templates_may_refuse_the_same_chats() -> None:
    def refuses(messages: object) -> str:
        raise ValueError(str(messages))

    assert chat_finding(refuses, refuses) is None
    assert chat_finding(refuses, None) is None
    for served, original in ((refuses, str), (None, refuses)):
        found = chat_finding(served, original)
        assert isinstance(found, Finding)
        assert found.name == "chat_template"
