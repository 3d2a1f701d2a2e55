"""Prompts and IA3 over the wire: a GPT and a T5 in one server, mixed rows in one request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from launcher_scripts.common.rendering import render
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.tensors import GPT_INPUTS, GPT_OUTPUTS
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import engine_for, write_checkpoint
from tests.engine.test_adapters import BOOLQ, CASES, SQUAD, TEXT, Model, gpt, t5
from tests.server import repositories
from tests.server.processes import running
from tests.server.requests import Client, generated, ids_request

pytestmark = pytest.mark.usefixtures("tritonserver")

MODELS = {"gpt3": ("gpt", gpt, "fp32"), "t5": ("t5", t5, "bf16")}


def export(folder: Path, name: str, model_type: str, model: Model, data_type: str) -> Path:
    settings = repositories.export(
        folder,
        model.config,
        model.tensors,
        name=name,
        tokenizer=TokenizerSettings("none"),
        model_type=model_type,
        data_type=data_type,
    )
    return settings.model_repository


def as_the_original_ships_it(repository: Path, model: Model) -> None:
    """A repository made by hand from the original's guide: its config.pbtxt, its tensors alone."""
    folder = repository / "by_hand"
    write_checkpoint(folder / "1" / "gpt3_345M", model.config, model.tensors, 1)
    added = ("presence_penalty", "min_length")  # no shipped config.pbtxt has them
    config = render(
        "model.pbtxt.j2",
        name="by_hand",
        max_batch_size=1024,
        max_queue_delay_microseconds=50_000,
        batched=True,
        sessions=None,
        decoupled=False,
        inputs=[t for t in GPT_INPUTS if not t.extension and t.name not in added],
        outputs=[t for t in GPT_OUTPUTS if not t.extension],
        parameters={"tensor_para_size": 1, "pipeline_para_size": 1, "model_type": "GPT"},
    )
    default = 'default_model_filename: "gpt3_345M"\n'
    (folder / "config.pbtxt").write_text(config + default)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("learned")
    for model_type, (name, make, data_type) in MODELS.items():
        repository = export(folder, name, model_type, make(), data_type)
    as_the_original_ships_it(repository, gpt())
    with running(folder / "job", repository) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err


@pytest.fixture(scope="module")
def model() -> Model:
    return gpt()


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    engine = engine_for(model.config, model.tensors)
    yield engine
    engine.close()


def column(kind: type, *values: int) -> np.ndarray:
    return np.array(values, kind)[:, None]


def test_rows_of_every_kind(client: Client, model: Model, engine: Engine) -> None:
    """Tasks, no task and IA3 in one batch: logits at all ids, and answers without virtual ones."""
    rows = [case.request.input_ids for case in CASES]
    sent = ids_request(rows, 3, is_return_context_logits=True)
    tasks = [case.request.prompt_task or 0 for case in CASES]
    ia3 = [-1 if case.ia3 is None else case.ia3 for case in CASES]
    answer = client.infer(
        "gpt",
        **sent,
        prompt_learning_task_name_ids=column(np.uint32, *tasks),
        ia3_tasks=column(np.int32, *ia3),
    )
    for row, (case, expected) in enumerate(zip(CASES, model.served(engine), strict=True)):
        got = answer["context_logits"][row, : len(case.request.input_ids)]
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=2e-4)
    assert answer["response_input_lengths"].ravel().tolist() == [5, 5, 2, 5, 5]
    assert answer["sequence_length"].ravel().tolist() == [8, 8, 5, 8, 8]
    assert answer["output_ids"][1, 0, :5].tolist() == list(TEXT)
    assert answer["output_ids"][2, 0, :2].tolist() == [5, 9]
    assert answer["output_ids"].shape == (5, 1, 8)


def test_a_requests_own_prompts(client: Client, model: Model) -> None:
    """The same table loaded, as a table of the request, and as a soft prompt: the same tokens."""
    table = model.tensors["prompt_table.squad.weight"]
    loaded = client.infer("gpt", **ids_request([SQUAD], 6, prompt_learning_task_name_ids=0))
    sent = ids_request([SQUAD, TEXT, TEXT], 6)
    answer = client.infer(
        "gpt",
        **sent,
        request_prompt_embedding=np.stack([table] * 3),
        request_prompt_lengths=column(np.uint32, 3, 3, 3),
        request_prompt_type=column(np.uint32, 3, 1, 0),
    )
    assert answer["response_input_lengths"].ravel().tolist() == [5, 5, 5]
    assert generated(answer, 0) == generated(answer, 1) == generated(loaded)
    plain = client.infer("gpt", **ids_request([TEXT], 6))
    assert generated(answer, 2) == generated(plain) != generated(loaded)


def test_a_repository_made_by_hand(client: Client, model: Model) -> None:
    """It declares embeddings FP16, whatever the model computes in, and no tensor of ours."""
    table = model.tensors["prompt_table.squad.weight"].astype(np.float16)
    sent = ids_request([TEXT], 6, is_return_log_probs=True, beam_width=2)
    prompt = {
        "request_prompt_lengths": column(np.uint32, 3),
        "request_prompt_type": column(np.uint32, 1),
    }
    answer = client.infer("by_hand", **sent, **prompt, request_prompt_embedding=table[None])
    rounded = table.astype(np.float32)[None]
    wanted = client.infer("gpt", **sent, **prompt, request_prompt_embedding=rounded)
    assert answer.keys() == wanted.keys() - {"num_cached_tokens"}
    for name, values in answer.items():
        np.testing.assert_allclose(values, wanted[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt_learning_task_name_ids": column(np.uint32, 7)}, "names no loaded prompt table"),
        ({"ia3_tasks": column(np.int32, 2)}, "IA3 tasks aren't in the range"),
        ({"request_prompt_type": column(np.uint32, 2)}, "request_prompt_type is not supported"),
    ],
)
def test_a_wrong_task_has_its_own_error(client: Client, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        client.infer("gpt", **ids_request([TEXT], 2), **more)
    assert len(generated(client.infer("gpt", **ids_request([TEXT], 2)))) == 2


def test_t5_takes_bfloat16_embeddings(served: dict[str, Any]) -> None:
    """A bf16 model declares them so; the encoder reads them like the loaded table."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="tritonclient needs it for BF16")
    table = t5().tensors["prompt_table.boolq.weight"].astype(ml_dtypes.bfloat16)
    both = {
        "loaded": [("prompt_learning_task_name_ids", "UINT32", column(np.uint32, 1))],
        "own": [
            ("request_prompt_embedding", "BF16", table[None]),
            ("request_prompt_lengths", "UINT32", column(np.uint32, 5)),
        ],
    }
    answers = {}
    with tritonclient.grpc.InferenceServerClient(served["grpc"]) as client:
        for name, prompt in both.items():
            tensors = [
                ("input_ids", "UINT32", np.array([BOOLQ], np.uint32)),
                ("sequence_length", "UINT32", column(np.uint32, len(BOOLQ))),
                ("max_output_len", "UINT32", column(np.uint32, 6)),
                ("ia3_tasks", "INT32", column(np.int32, 1)),
                ("is_return_log_probs", "BOOL", column(np.bool_, True)),
                *prompt,
            ]
            inputs = []
            for key, kind, value in tensors:
                inputs.append(tritonclient.grpc.InferInput(key, list(value.shape), kind))
                inputs[-1].set_data_from_numpy(value)
            answers[name] = client.infer("t5", inputs, client_timeout=300)
    ids = [answer.as_numpy("output_ids").tolist() for answer in answers.values()]
    sums = [float(answer.as_numpy("cum_log_probs")[0, 0]) for answer in answers.values()]
    assert ids[0] == ids[1]
    assert sums[0] == pytest.approx(sums[1], abs=1e-3)
