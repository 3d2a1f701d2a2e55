"""A tiny T5 and its encoder through repository and real tritonserver: ids and text in, ids and
text out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tritonclient.utils import InferenceServerException

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.evaluation import BenchmarkSettings, TaskSettings
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import EvaluateSettings, ExportSettings, write_settings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.steps import (
    measure_accuracy,
    measure_speed,
)
from tests.engine.reference_beams import Settings, search
from tests.engine.small_t5 import Plain, t5_tensors
from tests.gateway.processes import gateway
from tests.http_requests import receive
from tests.server.processes import CHECKOUT, run_export, running
from tests.server.repositories import (
    T5_CONFIG,
    T5_END_ID,
    T5_SHAPES,
    TOKENIZERS,
    VOCAB_SIZE,
    beside,
    export_t5,
)
from tests.server.requests import Client, t5_request, text_rows
from tests.server.test_model_repository import parse

needs_server = pytest.mark.usefixtures("tritonserver")
SOURCES = [(5, 6, 7), (400,), (12, 13, 14, 15, 16, 17, 18, 19, 20)]


def test_a_t5_has_no_sessions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a decoder-only model; got 't5'"):
        export_t5(tmp_path, interactive=True)


@pytest.mark.parametrize("model_type", ["t5", "t5-encoder"])
def test_configurations_follow_the_contract(tmp_path: Path, model_type: str) -> None:
    settings = export_t5(tmp_path, model_type)
    name = {"t5": "T5", "t5-encoder": "T5-Encoder"}[model_type]
    contract, model = CONTRACTS[name], parse(settings.model_repository / "tiny" / "config.pbtxt")
    assert [tensor.name for tensor in model.input] == [spec.name for spec in contract.inputs]
    assert [tensor.name for tensor in model.output] == [spec.name for spec in contract.outputs]
    assert model.parameters["model_type"].string_value == name
    assert not model.HasField("dynamic_batching")
    assert not model.batch_input
    ensemble = parse(settings.model_repository / "ensemble" / "config.pbtxt")
    parameters = {key: value.string_value for key, value in ensemble.parameters.items()}
    assert parameters["token_model"] == "tiny"
    taken = {tensor.name: tensor for tensor in model.input}
    roles = [key for key in contract.text.model_inputs.values() if key in parameters]
    required = {name for name, tensor in taken.items() if not tensor.optional}
    assert {parameters[role] for role in roles} == required
    for tensor in ensemble.input:
        if tensor.name in taken:
            assert tensor.data_type == taken[tensor.name].data_type


def test_an_encoders_outputs_have_the_models_type() -> None:
    outputs = CONTRACTS["T5-Encoder"].declared_outputs("bf16")
    assert {tensor.dtype for tensor in outputs} == {"BF16"}
    assert CONTRACTS["T5"].declared_outputs("bf16") == CONTRACTS["T5"].outputs


def test_a_requests_embeddings_have_the_models_type() -> None:
    for name in ("GPT", "T5", "T5-Encoder"):
        types = {tensor.name: tensor.dtype for tensor in CONTRACTS[name].declared_inputs("bf16")}
        assert types["request_prompt_embedding"] == "BF16"
        assert types["input_ids"] == "UINT32"


def test_a_model_type_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'gpt3'; choices: t5, mt5, t5-encoder"):
        export_t5(tmp_path, "gpt3")


@pytest.mark.parametrize(("source", "closes"), [("huggingface", True), ("nemo", False)])
def test_queries_end_as_the_models_were_trained(tmp_path: Path, source: str, closes: bool) -> None:
    root = export_t5(tmp_path, source=source).model_repository
    parameters = parse(root / "preprocessing" / "config.pbtxt").parameters
    assert ("closing_id" in parameters) == closes
    assert not closes or parameters["closing_id"].string_value == str(T5_END_ID)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("served")
    for name, (tp, pp) in T5_SHAPES.items():
        settings = export_t5(folder, name=name, tp=tp, pp=pp)
    with running(folder / "job", settings.model_repository) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err
        assert step.survivors() == []


@pytest.fixture(params=T5_SHAPES)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(T5_CONFIG, t5_tensors(T5_CONFIG))


@needs_server
def test_ids_of_rows_of_different_lengths(client: Client, plain: Plain, model: str) -> None:
    answer = client.infer(model, **t5_request(SOURCES, max_output_len=9))
    assert set(answer) == {"output_ids", "sequence_length"}
    assert answer["output_ids"].dtype == answer["sequence_length"].dtype == np.int32
    wanted = [plain.greedy(source, 9) for source in SOURCES]
    longest = max(map(len, wanted))
    for row, ids in enumerate(wanted):
        padding = [T5_END_ID] * (longest - len(ids)) + [0] * (9 - longest)
        assert answer["output_ids"][row, 0].tolist() == [*ids, *padding]
        assert answer["sequence_length"][row].tolist() == [len(ids)]


@needs_server
def test_logits_after_forced_ids(client: Client, plain: Plain, model: str) -> None:
    """Rows of different lengths, the shorter one filled up."""
    forced = [(0, 9, 33), (0,)]
    sent = t5_request(SOURCES[:2], max_output_len=2, is_return_context_logits=True)
    sent["decoder_input_ids"] = np.array([[0, 9, 33], [0, 2**32 - 1, 2**32 - 1]], np.uint32)
    answer = client.infer(model, **sent)
    assert answer["context_logits"].shape == (2, 3, VOCAB_SIZE)
    for row, (source, decoder) in enumerate(zip(SOURCES, forced, strict=False)):
        logits = plain.logits(source, decoder).numpy()
        got = answer["context_logits"][row]
        assert np.abs(got[: len(decoder)] - logits).max() <= 2e-4
        assert not got[len(decoder) :].any()
        assert answer["output_ids"][row, 0, 0] == logits[-1].argmax()


@needs_server
def test_requests_at_once_are_answered_as_if_alone(
    served: dict[str, Any], plain: Plain, model: str
) -> None:
    def ask(number: int) -> Any:
        source = (9999,) if number % 4 == 3 else SOURCES[number % 3]
        with Client(served, "http") as client:
            try:
                answer = client.infer(model, **t5_request([source], max_output_len=3 + number))
            except InferenceServerException as error:
                return str(error)
        return answer["output_ids"][0, 0, : answer["sequence_length"][0, 0]].tolist()

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    for number, answer in enumerate(answers):
        if number % 4 == 3:
            assert "outside of the vocabulary" in answer
        else:
            assert answer == plain.greedy(SOURCES[number % 3], 3 + number)


@needs_server
def test_text_through_the_ensemble(client: Client, plain: Plain, model: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    texts = ["The quick brown fox", "Hello"]
    answer = client.infer(
        beside(model, "ensemble"),
        INPUT_0=text_rows(*texts),
        INPUT_1=np.array([[6], [4]], np.uint32),
        is_return_log_probs=np.array([[True], [True]]),
    )
    probabilities = {"cum_log_probs", "output_log_probs"}
    assert set(answer) == {"OUTPUT_0", "OUTPUT_DELTA", "sequence_length", *probabilities}
    for row, (text, length) in enumerate(zip(texts, (6, 4), strict=True)):
        ids = plain.greedy((*tokenizer.encode(text), T5_END_ID), length)
        assert answer["OUTPUT_0"][row, 0, 0].decode() == tokenizer.decode(ids)
        assert answer["sequence_length"][row, 0] == len(ids)


@needs_server
def test_beams(client: Client, plain: Plain, model: str) -> None:
    """Ids and, through the ensemble, texts of the hypotheses that a plain search finds."""
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    text = "The quick brown fox"
    source = (*tokenizer.encode(text), T5_END_ID)
    found = search(
        lambda ids: plain.logits(source, ids)[-1], (0,), Settings(4, 6, T5_END_ID, len_penalty=1.0)
    )
    settings = {
        "beam_width": np.array([[4]], np.uint32),
        "len_penalty": np.array([[1]], np.float32),
    }
    answer = client.infer(model, **t5_request([source], max_output_len=6), **settings)
    padded = [[*ids, *[0] * (6 - len(ids))] for ids, _ in found]
    assert answer["output_ids"][0].tolist() == padded
    assert answer["sequence_length"][0].tolist() == [len(ids) for ids, _ in found]
    answer = client.infer(
        beside(model, "ensemble"),
        INPUT_0=text_rows(text),
        INPUT_1=np.array([[6]], np.uint32),
        **settings,
    )
    texts = [each.decode() for each in answer["OUTPUT_0"][0, :, 0]]
    assert texts == [tokenizer.decode(list(ids)) for ids, _ in found]


@needs_server
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence_length": np.array([[7]], np.uint32)}, "sequence_length must be within"),
        ({"sequence_length": np.array([[0]], np.uint32)}, "input_ids is empty"),
        ({"decoder_input_ids": np.array([[491]], np.uint32)}, "decoder_input_ids has ids outside"),
        ({"ia3_tasks": np.array([[1]], np.int32)}, "model has no IA3 adapters"),
    ],
)
def test_a_wrong_request_has_its_own_error(
    client: Client, changes: dict, reason: str, model: str
) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        client.infer(model, **{**t5_request([(1,)], max_output_len=2), **changes})


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server of the same encoder in three data types, and of one of transformers, in `hf`."""
    folder = tmp_path_factory.mktemp("encoders")
    original = export_original(folder)
    for data_type in ("fp32", "bf16", "fp16"):
        settings = export_t5(folder, "t5-encoder", data_type=data_type, name=data_type)
    with running(folder / "job", settings.model_repository) as step:
        ready_file = str(step.settings.ready_file)
        yield {**step.wait_until_ready(), "hf": str(original), "ready_file": ready_file}
        assert step.stop() == 0, step.err


def export_original(folder: Path) -> Path:
    """A random T5 of transformers, in the repository as the encoder `original`."""
    transformers.set_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB_SIZE, **sizes)
    )
    model.save_pretrained(folder / "hf")
    settings = ExportSettings(
        model_name="original",
        model_type="t5-encoder",
        checkpoint_path=str(folder / "hf"),
        triton_model_dir=str(folder / "model_repo" / "original"),
        tokenizer=TokenizerSettings("none"),
        max_batch_size=4,
        weight_data_type="fp32",
        data_type="fp32",
    )
    run_export(settings, folder)
    return folder / "hf"


@needs_server
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_encoder_is_evaluated(
    encoders: dict[str, Any], protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its states beside those of transformers, and its speed."""
    (tmp_path / "texts").write_text("The quick brown fox\nHello\n")
    task = TaskSettings("encode", str(tmp_path / "texts"), reference=encoders["hf"])
    settings = EvaluateSettings(
        ready_file=encoders["ready_file"],
        results_dir=str(tmp_path / "results"),
        model_name="original",
        tokenizer_dir=str(TOKENIZERS / "gpt2bpe"),
        tasks=(task,),
        benchmark=BenchmarkSettings((1, 2), ((6, 3),), requests=2, warmup=0),
        protocol=protocol,
    )
    write_settings(settings, tmp_path / "settings.yaml")
    for step in (measure_accuracy, measure_speed):
        assert step.main(["--settings", str(tmp_path / "settings.yaml")]) == 0
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    metrics = report["tasks"]["encode"]["metrics"]
    assert metrics["cosine_similarity"]["value"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["largest_difference"]["value"] < 1e-4
    assert [item["text"] for item in report["tasks"]["encode"]["items"]] == [
        "The quick brown fox",
        "Hello",
    ]
    sizes = [(row["batch_size"], row["input_len"]) for row in report["speed"]["rows"]]
    assert sizes == [(1, 6), (2, 6)] and "encode (2 items)" in capsys.readouterr().out


def post_json(ready: dict[str, Any], model: str, verb: str, body: dict[str, Any]) -> Any:
    url = f"http://{ready['http']}/v2/models/{model}/{verb}"
    return receive(url, body)


@needs_server
@pytest.mark.parametrize(
    ("data_type", "ensemble", "tolerance"),
    [
        ("fp32", "ensemble", 2e-4),
        ("bf16", "bf16_ensemble", 0.1),
        ("fp16", "fp16_ensemble", 0.02),
    ],
)
def test_states_of_the_encoder(
    encoders: dict[str, Any], plain: Plain, data_type: str, ensemble: str, tolerance: float
) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    text = (*tokenizer.encode("Hello"), T5_END_ID)
    with Client(encoders, "grpc") as client:
        answer = client.infer(data_type, **t5_request(SOURCES, is_return_attentions=True))
        told = client.infer(ensemble, INPUT_0=text_rows("Hello"))
        short = client.infer(data_type, **t5_request(SOURCES[:1]))
    # As curl does, with JSON both ways.
    given = {"name": "INPUT_0", "shape": [1, 1], "datatype": "BYTES", "data": ["Hello"]}
    inferred = post_json(encoders, ensemble, "infer", {"inputs": [given]})
    (output,) = inferred["outputs"]
    assert output["datatype"] == "FP32" and output["name"] == "output_hidden_state"
    generated = post_json(encoders, ensemble, "generate", {"INPUT_0": ["Hello"]})
    for values in (output["data"], generated["output_hidden_state"]):
        states = np.float32(values).reshape(told["output_hidden_state"].shape)
        np.testing.assert_array_equal(states, told["output_hidden_state"])
    width = max(map(len, SOURCES))
    assert answer["output_attentions"].shape == (3, 2, 4, width, width)
    assert set(short) == {"output_hidden_state"}
    for row, source in enumerate(SOURCES):
        got = answer["output_hidden_state"][row]
        assert np.abs(got[: len(source)] - plain.hidden(source).numpy()).max() <= tolerance
        assert not got[len(source) :].any()
        sums = answer["output_attentions"][row].sum(-1)
        assert np.abs(sums[..., : len(source)] - 1).max() <= tolerance
        assert not sums[..., len(source) :].any()
    assert np.abs(told["output_hidden_state"][0] - plain.hidden(text).numpy()).max() <= tolerance


@needs_server
def test_the_gateway_gives_an_encoders_vectors(
    encoders: dict[str, Any], plain: Plain, tmp_path: Path
) -> None:
    """Of every data type the means of the states, by OpenAI's client."""
    openai = pytest.importorskip("openai")
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    texts = ["Hello", "The quick brown fox"]
    tolerances = {"fp32": 2e-4, "bf16": 0.1, "fp16": 0.02}
    with gateway(tmp_path, "--ready", encoders["ready_file"]) as started:
        text = (CHECKOUT / "docs" / "gateway.md").read_text(encoding="utf-8")
        (body,) = re.findall(r"^    curl .*/v1/embeddings -d '(.*)'$", text, re.MULTILINE)
        url = f"{started.facts['openai']}/embeddings"
        documented = {"model": "fp32", **json.loads(body)}
        assert len(receive(url, documented)["data"]) == 2
        client = openai.OpenAI(base_url=started.facts["openai"], api_key="none")
        assert started.facts["models"] == sorted(tolerances)  # `original` has no tokenizer
        for name, tolerance in tolerances.items():
            answer = client.embeddings.create(model=name, input=texts)
            for text, each in zip(texts, answer.data, strict=True):
                expected = plain.hidden((*tokenizer.encode(text), T5_END_ID)).numpy().mean(0)
                assert np.abs(np.float32(each.embedding) - expected).max() <= tolerance
