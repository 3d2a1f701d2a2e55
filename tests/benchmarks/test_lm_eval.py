"""What the comparison of lm_eval's items finds, on items that lm_eval wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.clients.lm_eval_agreement import (
    compare,
    native_items,
    read_samples,
    table,
    write_data,
)

DATA = Path(__file__).parents[1] / "data" / "lm_eval"


def test_samples_are_read_in_the_order_of_the_items(tmp_path: Path) -> None:
    (recorded,) = DATA.glob("samples_boolq_*")
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(reversed(recorded.read_text().splitlines())))
    items = read_samples(file)
    assert items == read_samples(recorded)
    assert [len(item.likelihoods) for item in items] == [2, 2]


def test_items_are_compared_by_judgement_and_by_log_likelihood() -> None:
    (recorded,) = DATA.glob("samples_lambada_openai_*")
    hf = read_samples(recorded) * 3
    served = [*hf]
    served[1] = replace(hf[1], right=not hf[1].right)
    served[3] = replace(hf[3], likelihoods=(hf[3].likelihoods[0] - 0.02,))
    served[4] = replace(hf[4], likelihoods=(hf[4].likelihoods[0] - 0.002,))
    assert compare("t", hf, hf) == []
    lines = compare("t", served, hf)
    assert [line.partition(":")[0] for line in lines] == ["t, item 1", "t, item 3"]
    assert compare("t", served[:5], hf) == ["t: 5 items were served, hf has 6"]
    assert table({"t": (served, hf)})[-1].split()[-2] == "2.0e-02"


def test_the_projects_own_items_are_compared_too() -> None:
    (recorded,) = DATA.glob("samples_lambada_openai_*")
    hf = read_samples(recorded)
    own = [
        {"log_likelihood": item.likelihoods[0] + 1e-4, "correct": item.right, "index": index}
        for index, item in enumerate(hf)
    ]
    assert compare("lambada", native_items(own), hf) == []


def test_the_data_sets_are_those_that_lm_eval_asks_for(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data")
    rows = (folder / "aps/super_glue/boolq/validation.jsonl").read_text().splitlines()
    assert len(rows) == 64 and sum(json.loads(row)["label"] for row in rows) == 39
    lambada = (folder / "EleutherAI/lambada_openai/test.jsonl").read_text().splitlines()
    assert len(lambada) == 200
