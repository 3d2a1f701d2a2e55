"""Whole evaluations of one real server, step by step as a job runs them, to their verdicts.

The server has a clean export of an original and several that are broken in one way each.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.config.evaluation import (
    BenchmarkSettings,
    LoadPrompts,
    LoadSettings,
    ReferenceSettings,
    TaskSettings,
)
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.options import build
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.evaluation.load import figures
from launcher_scripts.steps import measure_twin
from tests.evaluation.test_journal import kill_when, lines
from tests.server.processes import running

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("tritonserver")
ITEMS = 200  # that show a drop of 2 %
LM_HEAD = "model.lm_head.weight.bin"


def exchange_layers(folder: Path) -> None:
    one, other = (folder / f"model.layers.{n}.attention.dense.weight.0.bin" for n in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    assert first != second
    one.write_bytes(second)
    other.write_bytes(first)


def scale_logits(folder: Path) -> None:
    change(folder / LM_HEAD, lambda weight: 0.7 * weight)


def damage(folder: Path) -> None:
    noise = np.random.default_rng(0)
    for file in folder.glob("model.layers.1.mlp.*weight*.bin"):
        change(file, lambda weight: weight + noise.normal(0, 0.2, weight.shape))


def change(file: Path, made: Callable[[Any], Any]) -> None:
    file.write_bytes(made(np.fromfile(file, np.float32)).astype(np.float32).tobytes())


def rescale_rope(folder: Path) -> None:
    path = folder / "config.ini"
    before = path.read_text()
    path.write_text(before.replace("rotary_scaling_factor = 8.0", "rotary_scaling_factor = 2.0"))
    assert path.read_text() != before


FAULTS = {
    "swapped": exchange_layers,
    "scaled": scale_logits,
    "rope": rescale_rope,
    "damaged": damage,
}


def seal(folder: Path) -> None:
    """Write the manifest anew, of the files as they are: the server takes them."""
    manifest = read_manifest(folder)
    assert manifest is not None
    files = []
    for entry in manifest.files:
        digest = hashlib.sha256((folder / entry.name).read_bytes()).hexdigest()
        files.append(replace(entry, algorithm="sha256", digest=digest, crc32=None))
    replace(manifest, files=tuple(files)).write(folder)


@dataclass(frozen=True)
class Served:
    """A running server; `data`: LAMBADA-like items of which the original knows four of five."""

    repository: Path
    original: Path
    data: Path
    ready_file: Path

    def settings(self, folder: Path, model: str, **blocks: Any) -> EvaluateSettings:
        """Written to settings.yaml in the folder, with the steps of their blocks."""
        settings = EvaluateSettings(
            ready_file=str(self.ready_file),
            results_dir=str(folder / "results"),
            model_name=model,
            tokenizer_dir=str(self.repository / model / "1" / "1-gpu"),
            ready_timeout=20.0,
            **blocks,
        )
        steps = tuple(step for step, block in STEPS.items() if getattr(settings, block))
        settings = replace(settings, steps=steps)
        folder.mkdir(exist_ok=True)
        write_settings(settings, folder / "settings.yaml")
        return settings

    def evaluated(self, folder: Path, model: str = "clean", **blocks: Any) -> dict[str, Any]:
        """The verdict that a job of these blocks comes to; its exit code is the job's."""
        settings = self.settings(folder, model, **{"policy": PolicySettings(), **blocks})
        code = 0
        for step in settings.steps:
            assert code == 0, f"the job has ended before {step}"
            module = importlib.import_module(f"launcher_scripts.steps.{step}")
            code = module.main(["--settings", str(folder / "settings.yaml")])
        verdict: dict[str, Any] = json.loads((folder / "results" / "verdict.json").read_text())
        assert code == verdict["exit_code"]
        assert not (folder / "results" / "journal").exists()
        return verdict

    def lambada(self, limit: int = ITEMS, *, reference: bool = True) -> dict[str, Any]:
        source = str(self.original) if reference else None
        return {"tasks": (TaskSettings("lambada", str(self.data), limit, reference=source),)}

    def twin(self, limit: int = 32, **more: Any) -> dict[str, Any]:
        values = {"limit": limit, "max_tokens": 24, "continuation": 4, **more}
        return {"twin": ReferenceSettings(data_file=str(self.data), **values)}


CODES = {"GO": 0, "NO-GO": 1, "INCONCLUSIVE": 2}
STEPS = {
    "measure_accuracy": "tasks",
    "measure_speed": "benchmark",
    "measure_twin": "twin",
    "measure_load": "load",
    "judge": "policy",
}


def load(**prompts: Any) -> dict[str, Any]:
    values = {"input": 12, "output": 6, **prompts}
    return {
        "load": LoadSettings(
            paths=("grpc", "http"),
            clients=(2,),
            requests=8,
            seconds=None,
            warmup=0.0,
            prompts=LoadPrompts(**values),
        )
    }


def policy(**values: Any) -> PolicySettings:
    return build(PolicySettings, values, "the test's policy", key="evaluate.policy")


def write_items(original: Path, file: Path) -> Path:
    """Texts that the original would end so, but for the last word of every fifth."""
    import torch
    import transformers

    from tests.evaluation.twins import TEXTS

    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    model = transformers.AutoModelForCausalLM.from_pretrained(original).eval()
    words, shuffler = sorted(set(" ".join(TEXTS).split())), random.Random(0)
    contexts = [" ".join(shuffler.choices(words, k=shuffler.randint(3, 9))) for _ in range(1500)]
    by_length = defaultdict(list)
    for context in contexts:
        ids = tokenizer.encode(context, add_special_tokens=False)
        by_length[len(ids)].append((context, ids))
    texts = []
    for group in by_length.values():
        with torch.inference_mode():
            likeliest = model(torch.tensor([ids for _, ids in group])).logits[:, -1].argmax(-1)
        for (context, ids), token in zip(group, likeliest.tolist(), strict=True):
            word = tokenizer.decode([token])
            text = context + word
            alike = tokenizer.encode(text, add_special_tokens=False) == [*ids, token]
            if alike and word[:1] == " " and word[1:].isalpha():
                texts.append(text)
    shuffler.shuffle(texts)
    assert len(texts) >= ITEMS
    items = (f"{text} so" if n % 5 == 0 else text for n, text in enumerate(texts[:ITEMS]))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in items))
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An original and its items."""
    from tests.evaluation import twins

    folder = tmp_path_factory.mktemp("source")
    original = twins.write_original(folder / "original")
    return original, write_items(original, folder / "items.jsonl")


@contextmanager
def serving(folder: Path, source: tuple[Path, Path], names: Iterable[str]) -> Iterator[Served]:
    """Exports of the original that are broken as their names say."""
    from tests.evaluation import twins

    repository = folder / "model_repo"
    for name in names:
        tokenizer = TokenizerSettings()
        if name == "unopened":
            twins.write_tokenizer(folder, bos=False)
            tokenizer = TokenizerSettings("files", model=str(folder / "tokenizer.json"))
        exported = twins.put_original(repository, name, source[0], tokenizer=tokenizer)
        if name in FAULTS:
            FAULTS[name](exported)
            seal(exported)
    with running(folder / "deploy", repository, device="cpu") as step:
        step.wait_until_ready()
        yield Served(repository, *source, step.settings.ready_file)


@pytest.fixture(scope="module")
def served(source: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), source, ("clean", "damaged")) as server:
        yield server


@pytest.fixture(scope="module")
def broken(source: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ("swapped", "unopened", "scaled", "rope")
    with serving(tmp_path_factory.mktemp("broken"), source, names) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def patient_client() -> Iterator[None]:
    """A busy machine delays the client of a load test, too, which is not a fault here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "LAG_MS", math.inf)
        patch.setattr(figures, "MAX_BUSY", math.inf)
        yield


@pytest.fixture(scope="module")
def clean(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a whole evaluation of the clean export."""
    folder = tmp_path_factory.mktemp("clean")
    served.evaluated(
        folder,
        **served.lambada(),
        **served.twin(),
        **load(),
        benchmark=BenchmarkSettings(batch_sizes=(2,), lengths=((8, 4),), requests=2, warmup=1),
        policy=policy(
            metrics={"lambada": {"accuracy": {"min": 0.6}}},
            speed={"min_tokens_per_second": 0.1},
            load={"min_tokens_per_second": 0.1},
        ),
    )
    return folder / "results" / "report.json"


def first_reason(verdict: dict[str, Any], expected: str = "NO-GO") -> tuple[str, str]:
    """Its bound and text; verdict and exit code are the expected ones."""
    assert (verdict["verdict"], verdict["exit_code"]) == (expected, CODES[expected])
    return verdict["reasons"][0]["bound"], verdict["reasons"][0]["text"]


def test_a_clean_export_may_go_live(clean: Path) -> None:
    content = json.loads(clean.read_text())
    first_reason(content["verdict"], "GO")
    assert [reason["bound"] for reason in content["verdict"]["reasons"]] == [
        "if_measured.twin.max_findings",
        "metrics.lambada.accuracy.min",
        "speed.min_tokens_per_second",
        "load.min_tokens_per_second",
        *["if_measured.reference.max_drop"] * 3,
        "if_measured.twin.max_kl",
        "if_measured.twin.min_top1",
        "if_measured.load.max_failed",
        "if_measured.load.max_invalid",
    ]
    assert content["tasks"]["lambada"]["metrics"]["accuracy"]["value"] == 0.8
    assert content["tasks"]["lambada"]["reference"]["different"] == []


def test_a_drop_from_an_earlier_report_holds_back(
    served: Served, clean: Path, tmp_path: Path
) -> None:
    asked = policy(baseline={"report": str(clean), "max_drop": 0.02})
    same = served.evaluated(tmp_path / "same", **served.lambada(reference=False), policy=asked)
    assert first_reason(same, "GO")[1].endswith(
        "at most 2 % is asked; 0 lost, 0 won, McNemar's p 1"
    )
    worse = served.evaluated(
        tmp_path / "worse", "damaged", **served.lambada(reference=False), policy=asked
    )
    bound, text = first_reason(worse)
    assert bound == "baseline.max_drop"
    said = re.search(r"200 items, Tango\).*; (\d+) lost, (\d+) won, McNemar's p (\S+)$", text)
    assert said is not None, text
    assert int(said[1]) > 50 > 10 > int(said[2]) and float(said[3]) < 1e-6


@pytest.mark.parametrize("prompts", [{"input": 4096, "spread": 0.9}, {"input": 8192}])
def test_failed_requests_hold_back(served: Served, tmp_path: Path, prompts: dict[str, Any]) -> None:
    """The server refuses prompts that its cache of 4096 tokens does not hold: some, or all."""
    verdict = served.evaluated(tmp_path, **load(**prompts))
    assert first_reason(verdict)[0] == "if_measured.load.max_failed"
    failed, invalid = verdict["reasons"]
    assert failed["measured"] == 16 if "spread" not in prompts else 0 < failed["measured"] < 16
    assert (invalid["bound"], invalid["measured"]) == ("if_measured.load.max_invalid", 2)
    assert "of 8 requests failed; the first: " in invalid["text"]
    assert "which holds 4096" in invalid["text"] and "\n" not in invalid["text"]


@pytest.mark.parametrize("section", ["load", "speed"])
def test_a_broken_latency_bound_holds_back(served: Served, tmp_path: Path, section: str) -> None:
    sweep = BenchmarkSettings(batch_sizes=(1,), lengths=((8, 4),), requests=2, warmup=0)
    blocks = load() if section == "load" else {"benchmark": sweep}
    asked = policy(**{section: {"max_latency_ms": {"p50": 0.001}}})
    bound, text = first_reason(served.evaluated(tmp_path, **blocks, policy=asked))
    assert bound == f"{section}.max_latency_ms.p50"
    assert text.endswith(" ms; at most 0.001 ms is asked")


def test_too_few_items_decide_nothing(served: Served, tmp_path: Path) -> None:
    verdict = served.evaluated(tmp_path, **served.lambada(4), **served.twin(3))
    first_reason(verdict, "INCONCLUSIVE")
    is_open = [each for each in verdict["reasons"] if each["level"] == "inconclusive"]
    assert [each["bound"].rpartition("if_measured.")[2] for each in is_open] == [
        *["reference.max_drop"] * 3,
        "twin.max_kl",
        "twin.min_top1",
    ]
    for each in is_open:
        assert re.search(r"; it takes about \d+ items like these to decide it$", each["text"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("swapped", "swapped_shard"),
        ("unopened", "lost_bos"),
        ("scaled", "scaled_logits"),
        ("rope", "rope_scaling"),
    ],
)
def test_a_fault_holds_back_by_its_name(
    broken: Served, tmp_path: Path, model: str, name: str
) -> None:
    verdict = broken.evaluated(tmp_path, model, **broken.lambada(), **broken.twin())
    bound, text = first_reason(verdict)
    assert bound == "if_measured.twin.max_findings"
    said = "the number of findings of the twin is 1; at most 0 is asked"
    assert text.startswith(f"{said}; {name}: ")


@pytest.mark.slow
def test_a_killed_twin_goes_on_to_the_same_section(served: Served, tmp_path: Path) -> None:
    twin = served.twin(ITEMS, batch_size=1)
    arguments = ["--settings", str(tmp_path / "settings.yaml")]
    sections = []
    for killed in (False, True):
        results = Path(served.settings(tmp_path, "clean", **twin).results_dir)
        notes = results / "journal" / "twin.jsonl"
        if killed:
            kill_when("measure_twin", arguments, lambda file=notes: lines(file) > 20)
            assert 20 < lines(notes) < ITEMS
        assert measure_twin.main(arguments) == 0
        assert not notes.exists()
        sections.append(json.loads((results / "report.json").read_text())["twin"])
    runs = [len(section["measured_on"]["runs"]) for section in sections]
    assert runs == [1, 2]
    whole, resumed = sections
    assert len(resumed["items"]) == ITEMS
    for one, other in zip(whole["items"], resumed["items"], strict=True):
        assert other == pytest.approx(one, abs=1e-4)
    assert (resumed["findings"], resumed["source"]) == ([], whole["source"])
