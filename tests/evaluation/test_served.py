"""The whole evaluation against a real tritonserver with the project's own backend on two ranks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.evaluation import BenchmarkSettings, TaskSettings
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import EvaluateSettings, ExportSettings, write_settings
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.steps import measure_accuracy, measure_speed
from tests.evaluation.text_tasks import write_letters
from tests.server.processes import running

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("tritonserver")

MODEL_NAME = "small_gpt"
ROWS = [(1, 2, 3, 4, 5), (7,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]


@pytest.fixture(scope="module")
def engine():
    """The same model in this process: what the served one must agree with."""
    from tests.engine import small_models

    config = small_models.small_config()
    engine = small_models.engine_for(config, small_models.random_tensors(config))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory, engine):
    """A folder with ready.json of a running server, the repository and a tokenizer."""
    from tests.engine import small_models

    folder = tmp_path_factory.mktemp("served")
    config = engine.config
    export = ExportSettings(
        model_name=MODEL_NAME,
        model_type="gpt3",
        checkpoint_path="unused",
        triton_model_dir=str(folder / "model_repo" / MODEL_NAME),
        parallelism=Parallelism(2, 1),
        tokenizer=TokenizerSettings(source="none"),
        max_batch_size=4,
        data_type="fp32",
    )
    tensors = small_models.random_tensors(config)
    small_models.write_checkpoint(export.checkpoint_dir, config, tensors, 2)
    ModelRepository(export.model_repository).write(export)
    letters = "".join(chr(ord("A") + index) for index in range(config.vocab_size))
    write_letters(export.checkpoint_dir, letters)
    with running(folder / "deploy", export.model_repository, device="cpu") as step:
        step.wait_until_ready()
        yield evaluate_settings(folder, export, step.settings.ready_file)


def evaluate_settings(folder, export, ready_file):
    (folder / "items.jsonl").write_text('{"text": "ABC DE"}\n{"text": "F GHI J"}\n')
    return EvaluateSettings(
        ready_file=str(ready_file),
        results_dir=str(folder / "evaluate"),
        model_name=MODEL_NAME,
        tokenizer_dir=str(export.checkpoint_dir),
        tasks=(TaskSettings("lambada", str(folder / "items.jsonl"), batch_size=2),),
        benchmark=BenchmarkSettings((1, 4), ((6, 3), (20, 10)), requests=3, warmup=1),
        ready_timeout=10.0,
    )


@pytest.fixture(params=["http", "grpc"])
def client(served, request):
    client, _ = open_client(dataclasses.replace(served, protocol=request.param))
    with client:
        yield client


def test_scores_are_the_engines_context_logits(client, engine):
    requests = [GenerateRequest(row, 0, return_context_logits=True) for row in ROWS]
    expected = [engine.submit(request).result(60).context_logits for request in requests]
    for ours, theirs in zip(client.score(ROWS), expected, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs), atol=1e-4)


def test_a_ragged_request_generates_what_the_engine_does(client, engine):
    requests = [
        GenerateRequest(row, 6, SamplingParameters(min_length=6), return_log_probs=True)
        for row in ROWS
    ]
    expected = [engine.submit(request).result(60) for request in requests]
    for ours, theirs in zip(client.generate(requests), expected, strict=True):
        assert ours.output_ids == tuple(theirs.output_ids)
        assert ours.cum_log_probs == pytest.approx(theirs.cum_log_probs, abs=1e-4)
        assert ours.output_log_probs == pytest.approx(theirs.output_log_probs, abs=1e-4)
    assert client.max_batch_size() == 4


def test_the_steps_report_what_they_measured(served, tmp_path, capsys):
    write_settings(served, tmp_path / "settings.yaml")
    arguments = ["--settings", str(tmp_path / "settings.yaml")]
    assert measure_accuracy.main(arguments) == 0, capsys.readouterr().err
    assert measure_speed.main(arguments) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / served.results_dir / "report.json").read_text())
    assert [item["target"] for item in report["tasks"]["lambada"]["items"]] == [" DE", " J"]
    ranks = report["speed"]["measured_on"]["server"]["ranks"]
    assert [rank["device"] for rank in ranks] == ["cpu", "cpu"]
    reads = report["speed"]["measured_on"]["reads"]
    folder = Path(served.tokenizer_dir)
    weights = [*folder.glob("model.layers.*.bin"), *folder.glob("model.final_layernorm*.bin")]
    weights.append(folder / "model.wte.bin")
    assert reads["step_bytes"] == sum(file.stat().st_size for file in weights)
    assert reads["ranks"] == 2 and reads["token_bytes"] > 0
    for row in report["speed"]["rows"]:
        assert 0 < row["latency_p50_ms"] <= row["latency_p99_ms"]
        generated = row["batch_size"] * row["output_len"] * 1000
        assert row["tokens_per_second"] == pytest.approx(generated / row["latency_mean_ms"])
