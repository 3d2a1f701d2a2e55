"""A model that was exported decoupled is evaluated as the same model that gives whole answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.clients.model_client import Client, open_client
from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.files import replica_files
from launcher_scripts.config.evaluation import BenchmarkSettings, GenerationSettings, TaskSettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.steps import measure_accuracy, measure_speed
from tests.server.processes import RunningStep
from tests.server.requests import Client as TritonClient
from tests.server.requests import Stream, t5_request
from tests.server.shared import given_up

pytestmark = pytest.mark.usefixtures("tritonserver")
ROWS = [(1, 2, 3, 4, 5), (7,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0), (400, 2)]


def settings_for(folder: Path, ready_file: Path, model: str, **more: Any) -> EvaluateSettings:
    ready = json.loads(ready_file.read_text())
    return EvaluateSettings(
        ready_file=str(ready_file),
        results_dir=str(folder / model),
        model_name=model,
        tokenizer_dir=f"{ready['model_repository']}/{model}/1/1-gpu",
        ready_timeout=10.0,
        **{"benchmark": BenchmarkSettings(), **more},
    )


@pytest.fixture
def ready(shared_server: RunningStep) -> dict[str, Any]:
    return shared_server.ready


def generated(client: Client, rows: Sequence[GenerateRequest]) -> list[tuple[int, ...]]:
    return [output.output_ids for output in client.generate_rows(rows, in_flight=3)]


def test_tasks_and_sweep_are_those_of_whole_answers(
    shared_server: RunningStep, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the default protocol, HTTP, which cannot carry a stream."""
    texts = tmp_path / "items.jsonl"
    texts.write_text('{"text": "The harbour was quiet"}\n{"text": "Contents and glossary"}\n')
    short = GenerationSettings(output_len=6, max_input_len=40)
    questions = str(data_dir / "tasks" / "squad.json")
    reports = {}
    for model in ("plain", "gpt"):
        settings = settings_for(
            tmp_path,
            shared_server.settings.ready_file,
            model,
            tasks=(
                TaskSettings("lambada", str(texts)),
                TaskSettings("squad", questions, limit=3, batch_size=2, generation=short),
            ),
            benchmark=BenchmarkSettings((1, 2), ((6, 3),), requests=2, warmup=0),
        )
        write_settings(settings, tmp_path / "settings.yaml")
        for step in (measure_accuracy, measure_speed):
            code = step.main(["--settings", str(tmp_path / "settings.yaml")])
            assert code == 0, capsys.readouterr().err
        reports[model] = json.loads((tmp_path / model / "report.json").read_text())
    plain, streamed = reports["plain"], reports["gpt"]
    items = (each["tasks"]["lambada"]["items"] for each in (streamed, plain))
    for ours, theirs in zip(*items, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert streamed["tasks"]["squad"]["items"] == plain["tasks"]["squad"]["items"]
    for task in ("lambada", "squad"):
        assert streamed["tasks"][task]["measured_on"]["protocol"] == "grpc"
        assert plain["tasks"][task]["measured_on"]["protocol"] == "http"
    assert any(item["prediction"] for item in streamed["tasks"]["squad"]["items"])
    sizes = [(row["batch_size"], row["output_len"]) for row in streamed["speed"]["rows"]]
    assert sizes == [(1, 3), (2, 3)]


def test_replicas_of_a_model_that_streams(shared_server: RunningStep, tmp_path: Path) -> None:
    """Two ready files of one server: each connection takes its share of the requests."""
    ready_file = tmp_path / "ready.json"
    ready_file.write_text(json.dumps(shared_server.ready))
    settings = settings_for(tmp_path, ready_file, "gpt", replicas=2)
    for file in replica_files(ready_file, 2):
        ready_file.rename(file)
        ready_file.write_text(file.read_text())
    requests = [GenerateRequest(row, 5) for row in ROWS]
    with Client(shared_server.ready["http"], "plain") as client:
        wanted = generated(client, requests)
        scores = list(client.score(ROWS))
    client, ready = open_client(settings)
    assert (ready["protocol"], ready["replicas"]) == ("grpc", [shared_server.ready["grpc"]] * 2)
    with client:
        assert generated(client, requests) == wanted
        for ours, theirs in zip(client.score(ROWS, in_flight=3), scores, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_t5_that_streams_gives_its_last_answer(
    shared_server: RunningStep, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, shared_server.settings.ready_file, "t5")
    client, _ = open_client(settings)
    with client:
        answers = generated(client, [GenerateRequest(row, 6, end_id=1000) for row in ROWS])
    with Stream(shared_server.ready) as stream:
        for row, answer in zip(ROWS, answers, strict=True):
            request = t5_request([row], max_output_len=6, end_id=1000)
            last = stream.ask("t5", **request)[-1]["output_ids"]
            assert list(answer) == last[0, 0].tolist()


def test_requests_overlap_and_closing_gives_them_up(ready: dict[str, Any]) -> None:
    endless = [GenerateRequest((1, 2), 16000, end_id=1000)] * 2
    with given_up(ready, "gpt"), Client(ready["grpc"], "gpt", protocol="grpc") as client:
        answers = client.generate_rows([GenerateRequest((5, 6), 2), *endless], in_flight=3)
        assert len(next(answers).output_ids) == 2


def test_a_refused_request_leaves_the_others_alone(ready: dict[str, Any]) -> None:
    rows = [GenerateRequest((5, 6), 2), GenerateRequest((491,), 2), GenerateRequest((7,), 2)]
    with Client(ready["grpc"], "gpt", protocol="grpc") as client:
        answers = client.generate_rows(rows, in_flight=3)
        next(answers)
        with pytest.raises(ServerError, match="refused a request to model gpt: "):
            next(answers)
        alone = [client.generate([row])[0].output_ids for row in rows[::2]]
        assert generated(client, rows[::2]) == alone


def test_a_stream_over_http_names_the_protocol_that_has_them(ready: dict[str, Any]) -> None:
    message = "gpt streams, which only gRPC can carry; got 'http'; choices: grpc"
    with Client(ready["http"], "gpt") as client, pytest.raises(ServerError, match=message):
        client.generate([GenerateRequest((5, 6), 2)])
    with TritonClient(ready, "http") as triton, pytest.raises(Exception, match="decoupled"):
        triton.infer("gpt", **t5_request([(1,)], max_output_len=2))
