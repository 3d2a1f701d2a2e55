"""The backend's own logic behind a stand-in of Triton's module; tests/server has the real one."""

from __future__ import annotations

import gc
import importlib
import json
import socket
import threading
import time
import types
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from launcher_scripts.backends.fastertransformer.server import MAX_WAITING_VARIABLE, engine_settings
from launcher_scripts.backends.fastertransformer.waiting_rows import idle_seconds
from launcher_scripts.backends.text_channel import FORWARDED
from launcher_scripts.checkpoint.huggingface import export as huggingface_export
from launcher_scripts.common.errors import CheckpointError, ConfigError
from launcher_scripts.common.files import DigestChain
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.contracts import served_contract
from launcher_scripts.contract.requests import (
    NO_STREAM,
    OPERATION_PARAMETER,
    GenerateOutput,
    GenerateRequest,
    open_id,
    row_id,
    shared_id,
)
from launcher_scripts.engine.engine import Engine
from tests.backend import fakes
from tests.backend.fakes import GAUGES, Code, Request
from tests.engine.small_models import (
    engine_for,
    generate,
    random_tensors,
    small_config,
    write_checkpoint,
)
from tests.processes import wait_for

CONFIG = small_config(end_id=67)


def request(ids, lengths, output_lens, *requested: str, **more: torch.Tensor) -> Request:
    inputs = {
        "input_ids": torch.tensor(ids).to(torch.uint32),
        "input_lengths": torch.tensor(lengths).to(torch.uint32),
        "request_output_len": torch.tensor(output_lens).to(torch.uint32),
        **more,
    }
    return Request(inputs, requested or ("output_ids", "sequence_length"))


def arguments(folder: Path, **parameters: str) -> dict[str, str]:
    parameters = {"tensor_para_size": "1", "model_checkpoint_path": "1/1-gpu", **parameters}
    config = {
        "max_batch_size": 4,
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    return {
        "model_name": "tiny",
        "model_config": json.dumps(config),
        "model_repository": str(folder),
        "model_version": "1",
    }


def test_a_node_that_does_not_serve_ends(backend, tmp_path, monkeypatch):
    hosted = []
    group = types.SimpleNamespace(node_rank=types.SimpleNamespace(serves=False))
    monkeypatch.setattr(backend, "node_group", lambda *_: group)
    monkeypatch.setattr(backend, "host_ranks", lambda *given: hosted.append(given[0]))
    model = backend.TritonPythonModel()
    model.initialize(arguments(tmp_path / "tiny"))
    assert hosted == [group]
    model.finalize()


def test_one_thread_alone_changes_the_servers_metrics(backend, tmp_path, monkeypatch):
    """Triton's server dies where two threads change a value at once."""
    monkeypatch.setenv("LAUNCHER_DEVICE", "cpu")
    write_checkpoint(tmp_path / "tiny" / "1" / "1-gpu", CONFIG, random_tensors(CONFIG), 1)
    threads = set()

    class Recording(dict):
        def update(self, *given):
            threads.add(threading.current_thread().name)
            super().update(*given)

    monkeypatch.setattr(fakes, "GAUGES", recorded := Recording())
    model = backend.TritonPythonModel()
    model.initialize(arguments(tmp_path / "tiny"))
    refused = [request([[3, 4]], [9], [[2]]) for _ in range(8)]
    callers = [threading.Thread(target=model.execute, args=([one],)) for one in refused]
    for caller in callers:
        caller.start()
    wait_for(lambda: recorded.get(("launcher_request_failure_total", "tiny", "refused")) == 8)
    for caller in callers:
        caller.join()
    model.finalize()
    assert threads == {"metrics"}


class OperationOf(Request):
    """A request for an operation, as the gateway sends it."""

    def __init__(self, **operation: object) -> None:
        super().__init__({}, ("news",))
        self._operation = operation

    def parameters(self):
        return json.dumps({OPERATION_PARAMETER: json.dumps(self._operation)})

    def reply(self) -> dict[str, object]:
        assert self.answered.wait(60)
        (answer,) = self.answers
        return json.loads(bytes(answer.tensors["news"].reshape(-1).tolist()))


def test_weights_are_exchanged_only_in_a_closed_server(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHER_DEVICE", "cpu")
    folder = tmp_path / "tiny" / "1" / "1-gpu"
    write_checkpoint(folder, CONFIG, random_tensors(CONFIG), 1)
    second = write_checkpoint(tmp_path / "second", CONFIG, random_tensors(CONFIG, 1), 1)
    swap = {"operation": "swap", "checkpoint": str(second), "mode": "mixed"}
    for closed in ("", "1"):
        monkeypatch.setenv("LAUNCHER_CLOSED_SERVER", closed)
        model = backend.TritonPythonModel()
        model.initialize(arguments(tmp_path / "tiny"))
        adapter = {"name": "law", "path": "/nowhere"}
        kinds = (
            swap,
            {**swap, "mode": "now"},
            {"operation": "weights"},
            {"operation": "stop"},
            {"operation": "load_lora", **adapter},
            {"operation": "unload_lora", **adapter},
            {"operation": "refit", "folder": "/nowhere"},
            {"operation": "refit", "folder": "/nowhere", "mode": "now"},
            {"operation": "wake"},
        )
        requests = [OperationOf(**kind) for kind in kinds[1:]]
        assert model.execute(requests) is None
        wrong_mode, weights, unknown, load, unload, *others = (one.reply() for one in requests)
        refit, wrong_refit, wake = others
        first = DigestChain.of(folder).values()
        assert weights == {"version": 0, "digests": first, "sleeping": False}
        assert "unknown operation" in unknown["error"]
        for refused, words in (
            (wrong_mode, "unknown mode"),
            (load, "export.triton_deployment.max_loras=N"),
            (unload, "there is no such adapter"),
            (refit, "not a transformers folder"),
            (wrong_refit, "unknown mode"),
        ):
            assert (words if closed else "deploy.gateway.api_keys") in refused["error"]
        assert wake == {"sleeping": False} if closed else "api_keys" in wake["error"]
        asked = OperationOf(**swap)
        model.execute([asked])
        reply = asked.reply()
        if closed:
            assert (reply["version"], reply["digests"]) == (1, DigestChain.of(second).values())
            current = ("launcher_weights_info", "tiny", reply["digests"]["system_fingerprint"])
            wait_for(lambda key=current: GAUGES.get(key) == 1)
            assert GAUGES["launcher_weights_info", "tiny", first["system_fingerprint"]] == 0
        else:
            assert reply["kind"] == "ConfigError"
        model.finalize()


def test_requests_are_answered_each_on_its_own(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHER_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("LAUNCHER_DEVICE", "cpu")
    tensors = random_tensors(CONFIG)
    write_checkpoint(tmp_path / "tiny" / "1" / "1-gpu", CONFIG, tensors, 1)
    model = backend.TritonPythonModel()
    model.initialize(arguments(tmp_path / "tiny"))
    status = json.loads((tmp_path / "tiny.json").read_text())
    assert (status["state"], status["reason"]) == ("ready", None)
    assert status["ranks"][0]["device"] == "cpu"
    assert status["versions"]["torch"] == torch.__version__
    wait_for(lambda: GAUGES.get(("launcher_kv_cache_tokens", "tiny"), 0) > 0)
    assert GAUGES["launcher_kv_cache_tokens_used", "tiny"] == 0
    refused = ("launcher_request_failure_total", "tiny", "refused")
    before = GAUGES.get(refused, 0)
    good = request([[3, 4, 5], [6, 7, 0]], [3, 2], [[2], [4]])
    bad_row = request([[98, 4], [99, 0]], [2, 1], [[2], [2]])
    bad_tensor = request([[3, 4]], [9], [[2]])
    assert model.execute([good, bad_row, bad_tensor]) is None
    for one in (good, bad_row, bad_tensor):
        assert one.answered.wait(120)
    # A request counts once until its rows are known.
    wait_for(lambda: GAUGES.get(refused, 0) == before + 2 + 1)
    model.finalize()
    reference = engine_for(CONFIG, tensors)
    expected = [generate(reference, (3, 4, 5), 2), generate(reference, (6, 7), 4)]
    reference.close()
    answer = good.answers[0].tensors
    assert set(answer) == {"output_ids", "sequence_length"}
    assert answer["output_ids"].dtype == torch.uint32
    assert answer["output_ids"].tolist() == [
        [[3, 4, 5, *expected[0], 67, 67]],
        [[6, 7, *expected[1], 67]],
    ]
    for one, text in ((bad_row, "outside of the vocabulary"), (bad_tensor, "input_lengths")):
        assert len(one.answers) == 1
        assert text in str(one.answers[0].error())
        assert one.answers[0].error().code() is Code.INVALID_ARG


class NamedRequest(Request):
    """A request with an id of its own."""

    def __init__(self, request_id: str, inputs: dict[str, torch.Tensor], *requested: str) -> None:
        super().__init__(inputs, requested)
        self._id = request_id

    def request_id(self):
        return self._id


def test_a_row_of_a_shared_stream_says_so_once(backend, tmp_path, monkeypatch):
    """Its id is read for every request, so it is not read again."""
    read = []
    monkeypatch.setenv("LAUNCHER_DEVICE", "cpu")
    monkeypatch.setattr(backend, "shared_id", lambda said: read.append(said) or shared_id(said))
    write_checkpoint(tmp_path / "tiny" / "1" / "1-gpu", CONFIG, random_tensors(CONFIG), 1)
    given = arguments(tmp_path / "tiny")
    decoupled = {"model_transaction_policy": {"decoupled": True}}
    given["model_config"] = json.dumps(json.loads(given["model_config"]) | decoupled)
    model = backend.TritonPythonModel()
    model.initialize(given)
    inputs = request([[3, 4, 5]], [3], [[2]]).tensors
    stream = NamedRequest(open_id("mine"), inputs, "news")
    row = NamedRequest(row_id("mine", 7, "x"), inputs, "news")
    lost = NamedRequest(row_id("another", 7, "x"), inputs, "news")
    model.execute([stream, row, lost])
    assert row.answered.wait(120) and lost.answered.wait(120)
    assert read == [one.request_id() for one in (stream, row, lost)]
    assert not row.answers[0].has_error()
    assert NO_STREAM in str(lost.answers[0].error())
    stream.left = True
    assert stream.answered.wait(10)
    model.finalize()


def test_a_gateway_names_the_client_of_a_request(backend):
    class OfClient(NamedRequest):
        def parameters(self):
            return '{"client": "c0ffee", "random_seed": 3}'

    contract = served_contract("GPT", sessions=False)
    inputs = request([[3, 4, 5]], [3], [[2]]).tensors
    named = OfClient("", inputs, "news")
    assert backend.client_of(named) == "c0ffee"
    assert backend.with_parameters(named, contract, inputs)["random_seed"].tolist() == [[3]]
    # Its parameters are the text model's, which has read them.
    assert backend.client_of(OfClient("forwarded a b 1", inputs, "news")) == "c0ffee"
    assert backend.client_of(OfClient(f"{FORWARDED} a b 1", inputs, "news")) == ""
    assert backend.client_of(request([[3]], [1], [[2]])) == ""


@pytest.mark.parametrize("fails", [False, True])
def test_an_answered_request_keeps_nothing(backend, fails):
    """Its tensors lie in shared memory, which must not wait for the collection of circles."""
    module = importlib.import_module(f"{backend.__package__}.answer")
    futures: list[Future[GenerateOutput]] = []

    def submit(*_: object) -> Future[GenerateOutput]:
        futures.append(Future())
        return futures[-1]

    rows = (GenerateRequest((1,), 1), GenerateRequest((2,), 1))
    one, thread = Request({}, ()), module.Answers(lambda *_: None)
    answer = module.Answer(thread, one, rows, {}, set(), lambda _: {}, streams=False)
    left = weakref.ref(answer)
    gc.disable()
    try:
        answer.start(submit)
        if fails:
            futures[1].set_exception(ValueError("no"))
        else:
            futures[0].set_result(GenerateOutput((1,)))
            futures[1].set_result(GenerateOutput((1,)))
        assert one.answered.wait(120)
        thread.close()
        futures.clear()
        del answer
        assert left() is None
    finally:
        gc.enable()


def test_a_model_that_cannot_load_says_why(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHER_STATUS_DIR", str(tmp_path))
    model = backend.TritonPythonModel()
    with pytest.raises(RuntimeError, match="the checkpoint is not a folder"):
        model.initialize(arguments(tmp_path / "tiny"))
    status = json.loads((tmp_path / "tiny.json").read_text())
    assert status["state"] == "failed"
    assert "the checkpoint is not a folder" in status["reason"]


def settings(folder: Path, **parameters: str):
    given = json.loads(arguments(folder, **parameters)["model_config"])
    return engine_settings(given, folder, "3", "cpu")


def test_parameters_become_settings(tmp_path):
    got = settings(
        tmp_path,
        tensor_para_size="2",
        pipeline_para_size="3",
        data_type="bf16",
        model_checkpoint_path="/elsewhere/2-gpu",
        enable_custom_all_reduce="1",
        enable_prefix_caching="1",
    )
    assert got.parallelism == Parallelism(2, 3)
    assert (got.data_type, got.device) == ("bf16", "cpu")
    assert got.max_batch_size == 64  # rows in flight; the requests' own batches are smaller
    assert got.checkpoint_dir == Path("/elsewhere/2-gpu")
    assert got.enable_custom_all_reduce
    assert got.enable_prefix_caching
    assert not settings(tmp_path).enable_prefix_caching
    assert settings(tmp_path, deterministic="1").deterministic
    assert not settings(tmp_path).deterministic
    assert settings(tmp_path).draft_checkpoint_dir is None
    draft = tmp_path.parent / "draft" / "1" / "1-gpu"
    draft.mkdir(parents=True)
    for path in ("../draft/1/1-gpu", str(draft)):
        named = settings(tmp_path, draft_model_checkpoint_path=path).draft_checkpoint_dir
        assert named is not None
        assert named.samefile(draft)
    assert settings(tmp_path).quantization is None
    assert settings(tmp_path, int8_mode="1").quantization == "int8"
    assert settings(tmp_path, int8_mode="0", quantization="fp8").quantization == "fp8"
    assert settings(tmp_path).kv_cache_dtype == "auto"
    assert settings(tmp_path).inter_token_target == 0.05
    assert settings(tmp_path, inter_token_target="0").inter_token_target == 0
    assert settings(tmp_path, kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    assert settings(tmp_path, enable_custom_all_reduce="True").enable_custom_all_reduce
    assert not settings(tmp_path, enable_custom_all_reduce="false").enable_custom_all_reduce


def test_parameters_without_a_meaning_are_named(tmp_path, capsys):
    settings(tmp_path, data_type="fp16")
    assert capsys.readouterr().err == ""
    got = settings(tmp_path, is_half="1", FORCE_CPU_ONLY_INPUT_TENSORS="no", datatype="fp16")
    assert got.data_type == "fp32"
    said = "parameters in config.pbtxt without a meaning: datatype, is_half\n"
    assert capsys.readouterr().err == said


def test_the_pipelines_old_name_is_not_overheard(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"layer_para_size is not read.*got '2'.*pipeline_para"):
        settings(tmp_path, layer_para_size="2")
    sizes = {"layer_para_size": "2", "pipeline_para_size": "2"}
    assert settings(tmp_path, **sizes).parallelism == Parallelism(1, 2)
    assert capsys.readouterr().err.endswith("without a meaning: layer_para_size\n")


def test_the_checkpoint_path_is_relative_to_the_model(tmp_path):
    (tmp_path / "3" / "inner").mkdir(parents=True)
    assert settings(tmp_path, model_checkpoint_path="inner").checkpoint_dir == (
        tmp_path / "3" / "inner"
    )
    assert settings(tmp_path, model_checkpoint_path="1/1-gpu").checkpoint_dir == (
        tmp_path / "1" / "1-gpu"
    )
    assert settings(tmp_path, model_checkpoint_path="").checkpoint_dir == tmp_path / "3" / "1-gpu"
    for path in (".", "./"):
        assert settings(tmp_path, model_checkpoint_path=path).checkpoint_dir == tmp_path / "3"


def test_every_version_has_its_own_checkpoint(tmp_path):
    """Version 3 is a copy of version 1, beside it, with other weights."""
    for version in ("1", "3"):
        (tmp_path / version / "1-gpu").mkdir(parents=True)
    got = settings(tmp_path, model_checkpoint_path="1/1-gpu").checkpoint_dir
    assert got == tmp_path / "3" / "1-gpu"
    (tmp_path / "3" / "1-gpu").rmdir()
    got = settings(tmp_path, model_checkpoint_path="1/1-gpu").checkpoint_dir
    assert got == tmp_path / "1" / "1-gpu"


def test_a_checkpoint_path_from_where_the_server_was_started(tmp_path, monkeypatch):
    """As in the repositories that the original ships: ./all_models/agm/fastertransformer/1/..."""
    model, path = tmp_path / "repository" / "tiny", "./all_models/tiny/1/1-gpu"
    monkeypatch.chdir(tmp_path)
    assert settings(model, model_checkpoint_path=path).checkpoint_dir == model / path
    (tmp_path / path).mkdir(parents=True)
    assert settings(model, model_checkpoint_path=path).checkpoint_dir == tmp_path / path


def test_without_a_path_the_default_filename_names_the_checkpoint(tmp_path):
    given = json.loads(arguments(tmp_path, model_checkpoint_path="")["model_config"])

    def found(default: str) -> Path:
        config = {**given, "default_model_filename": default}
        return engine_settings(config, tmp_path, "3", "cpu").checkpoint_dir

    (tmp_path / "3" / "gpt3_345M").mkdir(parents=True)
    assert found("gpt3_345M") == tmp_path / "3" / "gpt3_345M"
    assert found("gone") == found("") == tmp_path / "3" / "1-gpu"


def test_an_encoder_decoder_is_refused_sessions():
    with pytest.raises(ConfigError, match="needs a decoder-only model; got 'T5'; choices: GPT"):
        served_contract("T5", sessions=True)


def test_a_model_without_sequence_batching_has_no_sessions():
    assert idle_seconds({"max_batch_size": 8, "dynamic_batching": {}}) is None
    assert idle_seconds({"max_batch_size": 1, "sequence_batching": {}}) == 1
    told = {"max_sequence_idle_microseconds": "60000000", "direct": {}}
    assert idle_seconds({"max_batch_size": 1, "sequence_batching": told}) == 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 2}, "only supports max batch size = 1"),
        ({"dynamic_batching": {}}, "cannot work with dynamic batching"),
        ({"instance_group": [{"count": 3}]}, "one instance serves all sessions"),
    ],
)
def test_sequence_batching_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        idle_seconds({"max_batch_size": 1, "sequence_batching": {}, **changes})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tensor_para_size": "two"}, "tensor_para_size must be a number"),
        ({"enable_custom_all_reduce": "maybe"}, "enable_custom_all_reduce must be a number"),
        ({"pipeline_para_size": "0"}, "pipeline_para_size must be a number of at least 1"),
        ({"model_type": "GPT-J"}, "unknown model_type; got 'GPT-J'; choices: GPT"),
        ({"data_type": "int4"}, "unknown data_type; got 'int4'; choices: fp32, fp16, bf16"),
        ({"int8_mode": "2"}, "int8_mode is not supported; got 2"),
        (
            {"quantization": "fp4"},
            "unknown quantization .*got 'fp4'; choices: fp8, int4, int8, mxfp4, nvfp4",
        ),
        ({"inter_token_target": "soon"}, "inter_token_target must be a number of seconds"),
        ({"inter_token_target": "-1"}, "inter_token_target must be a number of seconds.*'-1'"),
        ({"inter_token_target": "inf"}, "inter_token_target must be a number of seconds"),
        ({"kv_cache_dtype": "int8"}, "unknown kv_cache_dtype .*got 'int8'; choices: auto, fp8"),
        ({"int8_mode": "1", "quantization": "fp8"}, "int8_mode 1 and quantization fp8 exclude"),
    ],
)
def test_wrong_parameters_are_named(tmp_path, parameters, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **parameters)


@pytest.fixture
def most_waiting():
    """How many rows may wait; tests parametrize it."""
    return 512


@pytest.fixture
def streaming_model(backend, tmp_path, monkeypatch, most_waiting):
    """A decoupled model."""
    monkeypatch.setenv("LAUNCHER_DEVICE", "cpu")
    monkeypatch.setenv(MAX_WAITING_VARIABLE, str(most_waiting))
    tensors = random_tensors(CONFIG)
    write_checkpoint(tmp_path / "tiny" / "1" / "1-gpu", CONFIG, tensors, 1)
    model = backend.TritonPythonModel()
    given = arguments(tmp_path / "tiny")
    config = {**json.loads(given["model_config"]), "model_transaction_policy": {"decoupled": True}}
    model.initialize({**given, "model_config": json.dumps(config)})
    yield model
    model.finalize()


def test_rows_stream_in_step_until_the_longest_ends(streaming_model):
    asked = request([[3, 4, 5], [6, 7, 0]], [3, 2], [[2], [4]])
    asked.tensors["is_return_progress"] = torch.tensor([True, True])
    asked.requested = ("sequence_length", "streamed_length", "is_finished", "text_start")
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    seen = [
        [answer.tensors[name][:, 0].tolist() for name in asked.requested]
        for answer in asked.answers
    ]
    assert seen == [
        [[4, 3], [0, 0], [False, False], [3, 2]],
        [[5, 4], [1, 1], [True, False], [3, 2]],
        [[5, 5], [2, 2], [True, False], [3, 2]],
        [[5, 6], [2, 3], [True, True], [3, 2]],
    ]


def test_every_response_of_a_stream_has_the_log_probabilities_so_far(streaming_model):
    asked = request([[3, 4, 5]], [3], [[3]])
    asked.tensors["num_log_probs"] = torch.tensor([[2]], dtype=torch.int32)
    asked.tensors["num_prompt_log_probs"] = torch.tensor([[0]], dtype=torch.int32)
    asked.requested = ("token_ranks", "top_log_probs", "prompt_log_probs")
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    ranks, tops, prompts = (
        [answer.tensors[name][0].tolist() for answer in asked.answers] for name in asked.requested
    )
    assert ranks == [[[1, 0, 0]], [[1, 1, 0]], [[1, 1, 1]]]
    assert [[bool(first) for first, _ in beam[0]] for beam in tops] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert prompts[0] == prompts[1] == prompts[2]
    assert [value < 0 for value in prompts[0]] == [False, True, True]


def test_a_response_with_news_has_the_log_probabilities_of_its_tokens_alone(streaming_model):
    asked = request([[3, 4, 5], [6, 7, 0]], [3, 2], [[2], [4]])
    asked.tensors["num_log_probs"] = torch.tensor([[2], [2]], dtype=torch.int32)
    asked.tensors["num_prompt_log_probs"] = torch.tensor([[0], [0]], dtype=torch.int32)
    asked.tensors["is_return_log_probs"] = torch.tensor([True, True])
    outputs = ("token_log_probs", "token_ranks", "top_log_probs", "output_log_probs")
    plain = request([[3, 4, 5], [6, 7, 0]], [3, 2], [[2], [4]])
    plain.tensors = dict(asked.tensors)
    plain.requested = outputs
    asked.tensors["is_return_progress"] = torch.tensor([True, True])
    asked.requested = ("news", "prompt_ranks", *outputs)
    streaming_model.execute([plain])
    assert plain.answered.wait(120)
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    assert ["prompt_ranks" in answer.tensors for answer in asked.answers] == [
        True,
        *[False] * (len(asked.answers) - 1),
    ]
    for name in outputs:
        complete = plain.answers[-1].tensors[name][:, 0]
        for row, count in enumerate((2, 4)):
            pieces = []
            for answer in asked.answers:
                total, prompt, first = answer.tensors["news"][row, 0, :3].tolist()
                values = answer.tensors[name][row, 0]
                new = total - max(first, prompt)
                assert len(values) <= max(1, count)
                pieces += values[:new].tolist()
            assert pieces == complete[row, :count].tolist()
    assert asked.answers[-1].tensors["token_ranks"].shape[2] == 1


def test_a_row_that_cannot_run_ends_its_request(streaming_model):
    asked = request([[3, 4], [99, 0]], [2, 1], [[60], [2]])
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    error = asked.answers[-1].error()
    assert "outside of the vocabulary" in str(error)
    # Of a stream's errors Triton gives clients the text alone.
    assert str(error).startswith("INVALID_ARG: ")
    assert error.code() is Code.INVALID_ARG
    assert all(not answer.has_error() for answer in asked.answers[:-1])


def test_a_client_that_left_is_generated_for_no_longer(streaming_model):
    asked = request([[3, 4]], [2], [[90]])
    asked.left = True
    given_up = ("launcher_requests_given_up", "tiny")
    cancelled = ("launcher_request_failure_total", "tiny", "cancelled")
    before = [GAUGES.get(key, 0) for key in (given_up, cancelled)]
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    assert asked.answers[-1].error().code() is Code.CANCELLED
    after = [before[0] + 1, before[1] + 1]
    wait_for(lambda: [GAUGES.get(key, 0) for key in (given_up, cancelled)] == after)


def test_a_request_takes_no_longer_than_its_timeout(streaming_model):
    asked, other = (request([[3, 4]], [2], [[length]]) for length in (90, 3))
    asked.microseconds, other.microseconds = 1, 60_000_000
    streaming_model.execute([asked, other])
    assert asked.answered.wait(120) and other.answered.wait(120)
    assert asked.answers[-1].error().code() is Code.UNAVAILABLE
    assert all(not answer.has_error() for answer in other.answers)


def test_what_cannot_be_answered_is_an_error_of_its_own(streaming_model, monkeypatch):
    def broken(*_):
        raise ValueError("no such shape")

    monkeypatch.setattr(streaming_model, "_to_tensors", broken)
    asked = request([[3, 4]], [2], [[4]])
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    assert asked.answers[-1].error().code() is Code.INTERNAL
    monkeypatch.undo()
    again = request([[3, 4]], [2], [[4]])
    streaming_model.execute([again])
    assert again.answered.wait(120)
    assert len(again.answers) == 4


@pytest.mark.parametrize("most_waiting", [4])
def test_a_request_that_would_wait_behind_too_many_is_refused(streaming_model, monkeypatch):
    monkeypatch.setattr(Engine, "rows_waiting", property(lambda _: 3))
    two, one = request([[3, 4], [5, 6]], [2, 2], [[2], [2]]), request([[3, 4]], [2], [[2]])
    streaming_model.execute([two, one])
    assert two.answered.wait(120) and one.answered.wait(120)
    assert two.answers[-1].error().code() is Code.UNAVAILABLE
    assert "got '3 and 2 of this request'; choices: at most 4" in str(two.answers[-1].error())
    assert all(not answer.has_error() for answer in one.answers)


@pytest.mark.parametrize("most_waiting", [1])
def test_one_request_may_be_larger_than_what_may_wait(streaming_model):
    asked = request([[3, 4]] * 3, [2] * 3, [[2]] * 3)
    streaming_model.execute([asked])
    assert asked.answered.wait(120)
    assert all(not answer.has_error() for answer in asked.answers)


def test_an_error_of_one_request_leaves_the_others(streaming_model, monkeypatch):
    broken, good = (request([[3, 4]], [2], [[2]]) for _ in range(2))
    monkeypatch.setattr(broken, "timeout", lambda: 1 / 0)
    streaming_model.execute([broken, good])
    assert broken.answered.wait(120) and good.answered.wait(120)
    assert broken.answers[-1].error().code() is Code.INTERNAL
    assert all(not answer.has_error() for answer in good.answers)


@pytest.mark.usefixtures("backend")
def test_files_that_a_refit_cannot_read_are_answered_and_the_next_one_is_served(
    monkeypatch,
) -> None:
    operations = importlib.import_module("launcher_scripts.backends.fastertransformer.operations")
    served: list[str] = []

    def refit(
        folder: Path, version: str, *_: object, began: float, memory: object
    ) -> types.SimpleNamespace:
        assert began <= time.perf_counter() and memory is None
        assert (folder / "model.safetensors").read_bytes() == framed({"__metadata__": {}})
        served.append(version)
        return types.SimpleNamespace(values=lambda: {"version": len(served)})

    settings = types.SimpleNamespace(nodes=1, checkpoint_dir=Path("nowhere"))
    model = types.SimpleNamespace(config={})
    monkeypatch.setattr(huggingface_export, "exported_model", lambda _: model)
    refits = operations.RefitSocket(types.SimpleNamespace(settings=settings, refit=refit))
    entry = {"dtype": "F32", "shape": [1]}
    for content, says in (
        (b"\xff" * 8, "too many for the header"),
        (framed([]), "no header of a safetensors file"),
        (framed({"x": 3}), "no header of a safetensors file"),
        (framed({"x": {**entry, "data_offsets": [0, -400]}}), "end nowhere"),
        (framed({"x": {**entry, "data_offsets": [0, "4"]}}), "end nowhere"),
        (framed({"x": {**entry, "data_offsets": [0, 1 << 60]}}), "has no room"),
        (framed({"__metadata__": {"drain_timeout": []}}), "drain_timeout is no number"),
        (framed({"__metadata__": {"mode": "now"}}), "unknown mode"),
        (framed(b"[" * 100_000), "no header of a safetensors file"),
    ):
        assert says in answered(refits.path, content)["error"]
    assert served == []
    assert answered(refits.path, framed({"__metadata__": {}}))["version"] == 1
    assert not [*refits.path.parent.rglob("*.safetensors")]


@pytest.mark.usefixtures("backend")
def test_a_path_that_is_no_export_is_refused_by_what_it_is(tmp_path: Path) -> None:
    operations = importlib.import_module("launcher_scripts.backends.fastertransformer.operations")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("absent", "a path that this node does not have"),
        ("trained", "a transformers folder, which POST /admin/refit takes"),
        ("empty", "nothing of the kind"),
    ):
        with pytest.raises(CheckpointError, match=f"is not an export of model gpt.*{says}"):
            operations.export_folder(tmp_path / name, "gpt")


def framed(header: object) -> bytes:
    """A safetensors file without values."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def answered(path: Path, content: bytes) -> dict[str, object]:
    """What a socket for refits answers to a file."""
    with socket.socket(socket.AF_UNIX) as client, client.makefile("rb") as reader:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(content)
        length = int.from_bytes(reader.read(8), "little")
        return dict(json.loads(reader.read(length)))
