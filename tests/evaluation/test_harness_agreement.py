"""SmolLM2 behind a server and a gateway, item by item as lm_eval's `hf` model on its weights.

It needs lm_eval with torch, transformers and gguf, installed where the program `lm_eval` on PATH
is: benchmarks/clients/requirements.txt.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from benchmarks.clients.lm_eval_agreement import (
    LAMBADA,
    TASKS,
    compare,
    hf_model,
    items_of,
    native_items,
    read_report,
    table,
    write_data,
)
from launcher_scripts.config.evaluation import HarnessSettings, TaskSettings
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.config.settings import EvaluateSettings, ExportSettings, write_settings
from launcher_scripts.evaluation.harness import lm_eval_version, read_results, run_lm_eval
from launcher_scripts.steps import (
    measure_accuracy,
    run_harness,
)
from launcher_scripts.steps.quickstart import gguf_file
from tests.evaluation.test_journal import kill_when
from tests.server.processes import run_export, running

PROGRAM = shutil.which("lm_eval")
ITEMS = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="there is no lm_eval on PATH"),
    pytest.mark.usefixtures("tritonserver"),
]


def answers(results: Path) -> int:
    """How many the journal of lm_eval has."""
    for file in results.glob("journal/harness-*.db"):
        with (
            contextlib.suppress(sqlite3.OperationalError),  # it has no table yet
            contextlib.closing(sqlite3.connect(file)) as journal,
        ):
            (count,) = journal.execute("select count(*) from unnamed").fetchone()
            return int(count)
    return 0


def test_every_item_is_that_of_the_hf_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The project's own lambada, lm_eval's lambada_openai, and the choices of its boolq.

    lm_eval is killed half-way and goes on.
    """
    python = Path(str(PROGRAM)).with_name("python3")
    data = write_data(tmp_path / "data")
    keys = tmp_path / "keys"
    keys.write_text("tester=the-key\n")
    keys.chmod(0o600)
    harness = HarnessSettings(TASKS, str(data), limit=ITEMS, api_keys=str(keys), python=str(python))
    export = ExportSettings(
        model_name="smollm2",
        model_type="gpt3",
        source="gguf",
        checkpoint_path=str(gguf_file()),
        triton_model_dir=str(tmp_path / "model_repo" / "smollm2"),
        max_batch_size=8,
        weight_data_type="fp32",
        data_type="fp32",
    )
    run_export(export, tmp_path)
    repository, gateway = export.model_repository, DeployedGateway(port=0, api_keys=str(keys))
    with running(tmp_path / "job", repository, gateway=gateway, device="cpu") as server:
        server.wait_until_ready()
        settings = EvaluateSettings(
            ready_file=str(server.settings.ready_file),
            results_dir=str(tmp_path / "results"),
            model_name="smollm2",
            tokenizer_dir=str(export.checkpoint_dir),
            tasks=(TaskSettings("lambada", str(LAMBADA), limit=ITEMS),),
            harness=harness,
        )
        write_settings(settings, tmp_path / "evaluate.yaml")
        arguments = ["--settings", str(tmp_path / "evaluate.yaml")]
        assert measure_accuracy.main(arguments) == 0
        kill_when("run_harness", arguments, lambda: answers(tmp_path / "results") >= ITEMS)
        kept = answers(tmp_path / "results")
        capfd.readouterr()
        assert run_harness.main(arguments) == 0
        found = re.findall(r"Cached requests: (\d+)", capfd.readouterr().err)
        assert sum(map(int, found)) == kept
        assert server.stop() == 0, server.err

    version = lm_eval_version(harness)
    hf = run_lm_eval(harness, version, hf_model(gguf_file()), tmp_path / "hf")
    of_hf = {task: items_of(tmp_path / "hf", hf, task) for task in TASKS}
    folder = tmp_path / "results" / "harness"
    served = {task: items_of(folder, read_results(folder, version), task) for task in TASKS}
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    own = native_items(read_report(tmp_path / "results" / "report.json"))
    sides = {task: (served[task], of_hf[task]) for task in TASKS}
    sides["lambada"] = (own, of_hf["lambada_openai"])
    print("\n".join(table(sides)))
    assert [len(side) for both in sides.values() for side in both] == [ITEMS] * 6
    assert not any(
        b"the-key" in path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()
    )
    assert [line for task, both in sides.items() for line in compare(task, *both)] == []
    right = {task: sum(item.right for item in items) for task, items in served.items()}
    for task, count in right.items():
        metric = report["harness"]["tasks"][task]["metrics"]["acc"]
        assert metric["value"] == pytest.approx(count / ITEMS)
