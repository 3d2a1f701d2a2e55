"""What the comparison of lm-eval's items with those of transformers finds."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.clients import lm_eval_boolq, lm_eval_lambada
from benchmarks.clients.lm_eval_runs import read_samples


def test_lm_eval_samples_are_compared_item_by_item(tmp_path: Path) -> None:
    reference = lm_eval_lambada.read_reference()
    samples = [
        {"doc_id": index, "acc": int(correct), "perplexity": likelihood + 1e-3}
        for index, (correct, likelihood) in enumerate(reference)
    ]
    samples[3]["acc"] = 1 - samples[3]["acc"]
    samples[7]["perplexity"] += 0.02
    file = tmp_path / "samples.jsonl"
    # lm-eval may write them in another order.
    file.write_text("\n".join(map(json.dumps, reversed(samples))))
    served = lm_eval_lambada.items_of(read_samples(file))
    differing = lm_eval_lambada.compare(served, reference)
    assert [line.partition(":")[0] for line in differing] == ["item 3", "item 7"]
    assert lm_eval_lambada.compare(served[:5], reference) == [
        "lm-eval judged 5 items; the reference has 200"
    ]


def test_the_reference_is_68_of_200_and_perplexity_44() -> None:
    reference = lm_eval_lambada.read_reference()
    lines = lm_eval_lambada.table(reference, reference)
    assert lines[1].split() == ["transformers", "68", "of", "200", "perplexity", "44.1359"]
    assert lines[2].endswith("0.0e+00")


def test_choices_are_compared_by_their_log_likelihoods() -> None:
    samples = [
        {"acc": 1.0, "filtered_resps": [["-1.5", "False"], ["-0.5", "True"]]},
        {"acc": 0.0, "filtered_resps": [["-2.5", "True"], ["-3.5", "False"]]},
    ]
    reference = lm_eval_boolq.items_of(samples)
    samples[1]["filtered_resps"][1][0] = "-3.52"
    served = lm_eval_boolq.items_of(samples)
    assert lm_eval_boolq.compare(reference, reference) == []
    (line,) = lm_eval_boolq.compare(served, reference)
    assert line.startswith("item 1: ")
    assert lm_eval_boolq.table(served, reference) == [
        "served   1 of 2 right",
        "hf       1 of 2 right",
        "largest difference of a log-likelihood: 2.0e-02",
    ]
