"""lm_eval's tasks through a gateway, item by item as lm_eval's `hf` model on the same weights.

    python3 -m benchmarks.clients.lm_eval_agreement http://127.0.0.1:8080 smollm2_135m GGUF_FILE \\
        --python LM_EVAL/bin/python3 [--report evaluate/report.json] [--limit 20]

Serve the model of benchmarks/clients/serve.py. --python has lm_eval, torch, transformers and gguf
(benchmarks/clients/requirements.txt); transformers computes the weights of the GGUF file that the
model was exported from, dequantised to fp32. lambada_openai has the 200 items and boolq the 64
that come with the project. --report is that of an evaluation of the same model, whose own task
lambada is compared with hf's lambada_openai, too. Prints a table; exit code 1 when an item is
judged otherwise or a log-likelihood differs by more than 0.01.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.config.evaluation import HarnessSettings
from launcher_scripts.evaluation.harness import (
    HarnessGateway,
    HarnessResult,
    lm_eval_version,
    models_of,
    run_harness,
    run_lm_eval,
)

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
LAMBADA = CHECKOUT / "launcher_scripts/evaluation/data/lambada_first200.jsonl"
BOOLQ = HERE / "boolq_shortest64.jsonl"
TASKS = ("lambada_openai", "boolq")
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Item:
    """One item: the log-likelihood of its target or of each choice, and whether it is right."""

    likelihoods: tuple[float, ...]
    right: bool


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address", help="the gateway's, as http://host:port")
    parser.add_argument("model")
    parser.add_argument("gguf", type=Path, help="the file that the model was exported from")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of lm_eval")
    parser.add_argument("--report", type=Path, help="with the model's own task lambada")
    parser.add_argument("--limit", type=int, help="of the items of each task")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        sides = answers(Path(folder), given)
    differing = [line for task, (ours, hf) in sides.items() for line in compare(task, ours, hf)]
    print("\n".join([*differing, *table(sides)]))
    return 1 if differing else 0


def answers(folder: Path, given: argparse.Namespace) -> dict[str, tuple[list[Item], list[Item]]]:
    """Of each task: what was served, and what hf makes of the same items."""
    own = None if given.report is None else native_items(read_report(given.report)[: given.limit])
    settings = HarnessSettings(
        TASKS, str(write_data(folder / "data")), given.limit, python=given.python
    )
    address = f"{given.address.rstrip('/')}/v1"
    card = models_of(address)[given.model]
    gateway = HarnessGateway(address, given.model, card["max_model_len"])
    version = lm_eval_version(settings)
    served = run_harness(settings, version, gateway, folder / "served")
    reference = run_lm_eval(settings, version, hf_model(given.gguf), folder / "hf")
    sides = {
        task: (items_of(folder / "served", served, task), items_of(folder / "hf", reference, task))
        for task in TASKS
    }
    if own is not None:
        sides["lambada"] = (own, sides["lambada_openai"][1])
    return sides


def hf_model(gguf: Path) -> tuple[str, dict[str, Any]]:
    """lm_eval's model that transformers computes, and its arguments."""
    return "hf", {"pretrained": str(gguf.parent), "gguf_file": gguf.name, "dtype": "float32"}


def write_data(folder: Path) -> Path:
    """The items that come with the project, as lm_eval's data sets are on the hub."""
    lambada, boolq = folder / "EleutherAI/lambada_openai", folder / "aps/super_glue"
    for each in (lambada, boolq / "boolq"):
        each.mkdir(parents=True)
    (lambada / "test.jsonl").write_text(LAMBADA.read_text(encoding="utf-8"), encoding="utf-8")
    lines = [json.loads(line) for line in BOOLQ.read_text(encoding="utf-8").splitlines()]
    rows = [
        {
            "question": line["question"],
            "passage": line["passage"],
            "idx": index,
            "label": int(line["answer"] == "true"),
        }
        for index, line in enumerate(lines)
    ]
    # The task wants a split of examples, too, even where it shows none.
    for split in ("train", "validation"):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (boolq / "boolq" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (boolq / "README.md").write_text(
        "---\nconfigs:\n- config_name: boolq\n  data_files:\n"
        "  - {split: train, path: boolq/train.jsonl}\n"
        "  - {split: validation, path: boolq/validation.jsonl}\n---\n",
        encoding="utf-8",
    )
    return folder


def items_of(folder: Path, result: HarnessResult, task: str) -> list[Item]:
    """What lm_eval noted of each item."""
    name = result.tasks[task].samples
    return [] if name is None else read_samples(folder / name)


def read_samples(path: Path) -> list[Item]:
    """The items of a file of samples, in their order, which need not be the file's."""
    lines = path.read_text(encoding="utf-8").splitlines()
    samples = sorted(map(json.loads, lines), key=lambda sample: int(sample["doc_id"]))
    return [
        Item(tuple(float(each[0]) for each in sample["filtered_resps"]), bool(sample["acc"]))
        for sample in samples
    ]


def read_report(path: Path) -> list[dict[str, Any]]:
    """The items of the project's own lambada."""
    tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    return list(tasks["lambada"]["items"])


def native_items(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Those of the project's own lambada."""
    return [Item((item["log_likelihood"],), item["correct"]) for item in items]


def compare(task: str, served: Sequence[Item], hf: Sequence[Item]) -> list[str]:
    """A line for every item that differs."""
    if len(served) != len(hf):
        return [f"{task}: {len(served)} items were served, hf has {len(hf)}"]
    return [
        f"{task}, item {index}: served {ours}, hf {theirs}"
        for index, (ours, theirs) in enumerate(zip(served, hf, strict=True))
        if ours.right != theirs.right or difference(ours, theirs) > TOLERANCE
    ]


def difference(ours: Item, theirs: Item) -> float:
    """The largest one of the log-likelihoods."""
    pairs = zip(ours.likelihoods, theirs.likelihoods, strict=True)
    return max(abs(one - other) for one, other in pairs)


def table(sides: Mapping[str, tuple[Sequence[Item], Sequence[Item]]]) -> list[str]:
    """A line for each task."""
    lines = [
        "| task | items | served right | hf right | largest difference |",
        "|---|---|---|---|---|",
    ]
    for task, (served, hf) in sides.items():
        right = [str(sum(item.right for item in side)) for side in (served, hf)]
        largest = max(map(difference, served, hf), default=0.0)
        lines.append(f"| {task} | {len(hf)} | {' | '.join(right)} | {largest:.1e} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
