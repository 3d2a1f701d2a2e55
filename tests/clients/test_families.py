"""The sample requests of the other families, and their ensembles as a user asks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts import clients
from launcher_scripts.clients.__main__ import main
from launcher_scripts.clients.end_to_end_test import column
from launcher_scripts.clients.remote import RemoteServer, find_models
from launcher_scripts.common.tokenizer import load_tokenizer
from tests.engine.small_agm import agm_config, agm_tensors
from tests.server.processes import running
from tests.server.repositories import (
    NO_TEXT,
    TOKENIZERS,
    VOCAB_SIZE,
    export,
    export_t5,
    text_config,
)

pytestmark = pytest.mark.usefixtures("tritonserver")
REQUESTS = Path(clients.__file__).parent / "requests"
TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A BLOOM (ALiBi, a norm behind the embedding), T5s, an encoder and an Agm."""
    folder = tmp_path_factory.mktemp("families")
    bloom = text_config(position_embedding="alibi", embedding_norm=True)
    settings = export(folder, bloom, name="bloom")
    export_t5(folder, name="t5")
    export_t5(folder, name="live", decoupled=True)
    export_t5(folder, "t5-encoder", name="encoder")
    agm = agm_config(vocab_size=VOCAB_SIZE, end_id=3)
    export(folder, agm, agm_tensors(agm), name="agm", model_type="agm", tokenizer=NO_TEXT)
    with running(folder / "job", settings.model_repository) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err


@pytest.fixture
def server(served: dict[str, Any]) -> Iterator[RemoteServer]:
    with RemoteServer(served["grpc"], protocol="grpc") as server:
        yield server


@pytest.mark.parametrize(
    ("sample", "model", "outputs"),
    [
        ("gpt", "bloom", ["output_ids", "sequence_length", "cum_log_probs"]),
        ("gpt_sampling", "bloom", ["output_ids", "output_log_probs"]),
        ("t5", "t5", ["output_ids", "sequence_length", "cum_log_probs"]),
        ("t5_encoder", "encoder", ["output_hidden_state", "output_attentions"]),
        ("agm", "agm", ["output_ids", "sequence_length", "cum_log_probs"]),
    ],
)
def test_a_sample_is_answered(
    capsys: pytest.CaptureFixture[str],
    served: dict[str, Any],
    sample: str,
    model: str,
    outputs: list[str],
) -> None:
    config = {"url": served["http"], "model_name": model}
    arguments = [str(REQUESTS / f"{sample}.json"), "--params", json.dumps({"config": config})]
    assert main(["issue_request", *arguments]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    for name in outputs:
        assert f"{name}:\n[" in printed


def test_the_sample_of_a_t5_streams_what_it_answers_whole(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    lines = {}
    for sample, model, protocol in (("t5", "t5", "http"), ("t5_stream", "live", "grpc")):
        config = {"url": served[protocol], "model_name": model}
        file = str(REQUESTS / f"{sample}.json")
        check = ["-t"] if protocol == "grpc" else []
        asked = ["issue_request", file, *check, "--params", json.dumps({"config": config})]
        assert main(asked) == 0, capsys.readouterr().err
        lines[sample] = capsys.readouterr().out
    ids = lines["t5"].partition("output_ids:\n")[2].partition("]")[0].replace("[", "").split()
    blocks = lines["t5_stream"].strip().split("\n\n")
    last = blocks[-1].partition(":\n")[2].strip("[]").split()
    assert len(blocks) == len(last) > 1
    assert last == ids[: len(last)]


@pytest.mark.parametrize("model", ["bloom", "t5"])
def test_the_ensemble_says_what_its_parts_say(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], model: str
) -> None:
    address = served["http"]
    assert main(["end_to_end_test", "-u", address, "-m", model, "--output-len", "5"]) == 0
    printed = capsys.readouterr().out
    decoded = printed.partition("After postprocessing============\n")[2].partition("====")[0]
    assert "['" in decoded
    assert decoded in printed.partition("After ensemble============\n")[2]


@pytest.mark.parametrize("model", ["bloom", "t5"])
def test_words_are_comma_separated_text(server: RemoteServer, model: str) -> None:
    """Words as the model itself would say them first; one in quotes, which holds a comma."""
    models = find_models(server, model)
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")

    def ask(bad: str = "", stop: str = "") -> tuple[str, int]:
        tensors = {
            "INPUT_0": column([TEXT]),
            "INPUT_1": np.array([[6]], np.uint32),
            "INPUT_2": column([bad]),
            "INPUT_3": column([stop]),
        }
        answer = server.infer(models.text_model("ensemble"), tensors)
        length = int(answer["sequence_length"][0, 0])
        return answer["OUTPUT_0"][0, 0, 0].decode(), length

    free, length = ask()
    words = (tokenizer.decode([token]) for token in range(VOCAB_SIZE))
    first = max((word for word in words if free.startswith(word)), key=len)
    assert len(tokenizer.encode(first)) == 1 and "," not in first
    banned, _ = ask(bad=f'zebra,"x,y",{first}')
    assert not banned.startswith(first) and banned != free
    stopped, end = ask(stop=f'"x,y",{first}')
    assert free.startswith(stopped) and stopped.startswith(first)
    assert end < length
    assert ask(bad="zebra", stop='"x,y"') == (free, length)


def test_the_encoders_ensemble_gives_its_states_for_text(server: RemoteServer) -> None:
    models = find_models(server, "encoder")
    assert "postprocessing" not in models.text or models.text["postprocessing"] == "postprocessing"
    encoded = server.infer(models.text_model("preprocessing"), {"QUERY": column([TEXT])})
    whole = server.infer(
        models.text_model("ensemble"),
        {"INPUT_0": column([TEXT]), "is_return_attentions": np.array([[True]])},
    )
    own = server.infer(
        "encoder",
        {
            "input_ids": encoded["INPUT_ID"],
            "sequence_length": encoded["REQUEST_INPUT_LEN"],
            "is_return_attentions": np.array([[True]]),
        },
    )
    for name in ("output_hidden_state", "output_attentions"):
        np.testing.assert_array_equal(whole[name], own[name])
    tokens = int(encoded["REQUEST_INPUT_LEN"][0, 0])
    assert whole["output_hidden_state"].shape[1] == tokens
    np.testing.assert_allclose(whole["output_attentions"].sum(-1), 1, atol=1e-5)
