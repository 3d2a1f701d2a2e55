"""The clients as commands against a real server of tiny GPTs with their text models."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts import clients
from launcher_scripts.clients import CLIENTS
from launcher_scripts.clients.__main__ import main
from launcher_scripts.clients.arguments import PROMPTS, identity_prompts
from launcher_scripts.clients.end_to_end_test import SENTENCES
from launcher_scripts.common.tokenizer import Tokenizer, load_tokenizer
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import engine_for, random_tensors
from tests.server.processes import running
from tests.server.repositories import NO_TEXT, TOKENIZERS, VOCAB_SIZE, export, text_config

pytestmark = pytest.mark.usefixtures("tritonserver")
REQUESTS = Path(clients.__file__).parent / "requests"
ROOT = Path(__file__).parents[2]
LONG = text_config(max_positions=16384)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A model with the tools' usual name, one that streams and one with sessions."""
    folder = tmp_path_factory.mktemp("served")
    settings = export(folder, LONG, name="fastertransformer")
    export(folder, LONG, name="live", decoupled=True)
    export(folder, LONG, name="talk", interactive=True, max_batch_size=1)
    # Triton counts cancelled streams of ensembles as running, and waits for them.
    with running(folder / "job", settings.model_repository, stop_timeout=2.0) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = engine_for(LONG, random_tensors(LONG))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """identity_test writes into the working directory."""
    monkeypatch.chdir(tmp_path)


def run(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], name: str, *arguments: str
) -> str:
    """What the client prints; the server's address is put in for it."""
    protocol = "grpc" if "grpc" in arguments else "http"
    assert main([name, "-u", served[protocol], *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_sample_request(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], protocol: str, engine: Engine
) -> None:
    config = {"url": served[protocol], "protocol": protocol}
    arguments = [str(REQUESTS / "gpt.json"), "--params", json.dumps({"config": config})]
    assert main(["issue_request", *arguments]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    first = engine.submit(GenerateRequest(PROMPTS[0], 24)).result(60)
    ids = printed.partition("output_ids:\n")[2].partition("]")[0].replace("[", "")
    assert [int(word) for word in ids.split()] == [*PROMPTS[0], *first.output_ids]
    for name in ("sequence_length", "response_input_lengths", "cum_log_probs"):
        assert f"{name}:\n[" in printed


def test_a_request_as_the_original_ships_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], served: dict[str, Any], engine: Engine
) -> None:
    """Its sample_request_single.json: a seed of another type, an end offset of 0 for no words."""
    fields = {
        "input_ids": ([list(PROMPTS[0])], "uint32"),
        "input_lengths": ([[8]], "uint32"),
        "request_output_len": ([[16]], "uint32"),
        "random_seed": ([[0]], "int32"),
        "beam_search_diversity_rate": ([[0]], "float32"),
        "bad_words_list": ([[[0], [-1]]], "int32"),
        "stop_words_list": ([[[409], [0]]], "int32"),
    }
    request = [{"name": n, "data": data, "dtype": kind} for n, (data, kind) in fields.items()]
    file = tmp_path / "sample_request_single.json"
    file.write_text(json.dumps({"request": request}))
    printed = run(capsys, served, "issue_request", str(file))
    ids = printed.partition("output_ids:\n")[2].partition("]")[0].replace("[", "").split()
    wanted = engine.submit(GenerateRequest(PROMPTS[0], 16)).result(60).output_ids
    assert list(map(int, ids)) == [*PROMPTS[0], *wanted]


def test_a_words_list_for_a_request(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    flags = ["--name", "stop_words_list", "month, month", "", '"x,y"']
    for model in ("fastertransformer", "talk"):
        line = json.loads(run(capsys, served, "word_list", "-m", model, *flags))
        assert (line["name"], line["dtype"]) == ("stop_words_list", "int32")
        words = [["month", " month"], [], ["x,y"]]
        for (ids, ends), row in zip(line["data"], words, strict=True):
            encoded = [tokenizer.encode(word) for word in row]
            flat = [token for each in encoded for token in each]
            assert ids == flat + [0] * (len(ids) - len(flat))
            offsets = np.cumsum([len(each) for each in encoded]).tolist()
            assert ends == offsets + [-1] * (len(ends) - len(offsets))


def test_text_of_the_sample_for_the_ensemble(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    params = json.dumps({"config": {"url": served["http"]}})
    assert main(["issue_request", str(REQUESTS / "ensemble.json"), "--params", params]) == 0
    printed = capsys.readouterr().out
    assert "OUTPUT_0:\n[[['" in printed and "The harbour" not in printed


def test_identity(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], engine: Engine
) -> None:
    printed = run(capsys, served, "identity_test", "-w", "-n", "2", "-o", "5")
    lines = printed.splitlines()
    assert lines[0] == "[INFO] sending requests to warm up"
    assert lines.count("set request") == lines.count("get request") == 2 + 2 * 10
    for line in (
        "wait result return 0000",
        "wait result return 1111",
        "get results",
        "get results as output_ids",
        "output_ids is received",
        "(8, 1, 13)",
    ):
        assert lines.count(line) == 2 * 10
    assert lines[-1].startswith("[INFO] execution time: ") and lines[-1].endswith(" ms")
    assert lines[-2].startswith("[") and lines[-2].count(",") == 1
    rows = np.loadtxt("triton_out", dtype=np.int64)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        wanted = engine.submit(GenerateRequest(prompt, 5)).result(60).output_ids
        assert row.tolist() == [*prompt, *wanted]


def test_identity_with_random_prompts_over_grpc(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    flags = ["-i", "grpc", "-r", "-b", "3", "-s", "6", "-o", "4", "-topk", "5", "-topp", "0.9"]
    flags += ["--vocab_size", str(VOCAB_SIZE)]
    printed = run(capsys, served, "identity_test", *flags)
    assert "(3, 1, 10)" in printed
    rows = np.loadtxt("triton_out", dtype=np.int64)
    assert rows.shape == (3, 10) and len(np.unique(rows[:, :6])) > 6
    assert run(capsys, served, "identity_test", *flags).count("set request") == 10
    np.testing.assert_array_equal(np.loadtxt("triton_out", dtype=np.int64), rows)


def test_sizes_count_with_random_prompts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert identity_prompts(False, 8, 8, 100).shape == (8, 8)
    assert identity_prompts(True, 3, 5, 100).shape == (3, 5)
    assert not capsys.readouterr().err
    for batch_size, length in ((3, 8), (8, 3)):
        assert identity_prompts(False, batch_size, length, 100).shape == (8, 8)
        message = capsys.readouterr().err
        assert "8 rows of 8 ids" in message and "--random_start_ids" in message


def test_end_to_end(capsys: pytest.CaptureFixture[str], served: dict[str, Any]) -> None:
    flags = ["--return_log_probs", "--output-len", "6", "--model-variant", "gpt"]
    printed = run(capsys, served, "end_to_end_test", *flags)
    heads = [line.strip("=") for line in printed.splitlines() if line.startswith("=====")]
    assert [head for head in heads if head] == [
        "After preprocessing",
        "After fastertransformer",
        "After postprocessing",
        "After ensemble",
    ]
    decoded = printed.partition("After postprocessing============\n")[2].partition("====")[0]
    assert decoded.count("['") == len(SENTENCES)
    assert decoded in printed.partition("After ensemble============\n")[2]


def test_a_model_that_is_not_there_is_answered_with_those_that_are(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    assert main(["identity_test", "-u", served["http"], "-m", "big"]) == 1
    message = "no such model; got 'big'; choices: ensemble, fastertransformer, live, live_ensemble"
    assert message in capsys.readouterr().err


def test_a_sample_stream(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], engine: Engine
) -> None:
    params = json.dumps({"config": {"url": served["grpc"], "model_name": "live"}})
    arguments = [str(REQUESTS / "stream.json"), "-t", "--params", params]
    assert main(["issue_request", *arguments]) == 0, capsys.readouterr().err
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == 24
    for block in blocks:
        assert re.match(
            r"\[After \d+\.\d\ds\] Partial result \(probability \d\.\d\de-\d+\):\n", block
        )
    wanted = engine.submit(GenerateRequest(PROMPTS[0], 24)).result(60).output_ids
    last = blocks[-1].partition(":\n")[2].strip("[]").split()
    assert list(map(int, last)) == [*PROMPTS[0], *wanted]


def test_any_client_takes_the_last_answer_of_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    whole, streamed = (
        run(capsys, served, "issue_request", "-i", "grpc", "-m", model, str(REQUESTS / "gpt.json"))
        for model in ("fastertransformer", "live")
    )
    # A stream tells it with its first answer.
    whole = whole.replace("\n\nnum_cached_tokens:\n[[0]]", "")
    assert "output_ids:\n" in streamed and streamed == whole
    rows = []
    for model in ("fastertransformer", "live"):
        run(capsys, served, "identity_test", "-i", "grpc", "-m", model, "-o", "5")
        rows.append((tmp_path / "triton_out").read_text())
    assert rows[0] == rows[1]
    assert main(["identity_test", "-u", served["http"], "-m", "live"]) == 1
    error = capsys.readouterr().err
    assert "live streams, which only gRPC can carry; got 'http'; choices: grpc; change" in error


def test_identity_of_a_stream(capsys: pytest.CaptureFixture[str], served: dict[str, Any]) -> None:
    address = served["grpc"]
    assert main(["identity_test", "-u", address, "-d", "-m", "live", "-o", "5"]) == 0
    assert "(8, 1, 13)" in capsys.readouterr().out
    streamed = Path("triton_out").read_text()
    run(capsys, served, "identity_test", "-i", "grpc", "-o", "5")
    assert Path("triton_out").read_text() == streamed
    assert main(["identity_test", "-u", address, "-d", "-o", "5"]) == 1
    error = capsys.readouterr().err
    assert "Number of responses received doesnt match request_output_len; got 1" in error


def test_text_of_a_stream(capsys: pytest.CaptureFixture[str], served: dict[str, Any]) -> None:
    flags = ["-i", "grpc", "--output-len", "4"]
    streamed = run(capsys, served, "end_to_end_test", "-m", "live", *flags)
    assert streamed == run(capsys, served, "end_to_end_test", *flags)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_session_of_ids(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], engine: Engine, protocol: str
) -> None:
    flags = ["-m", "talk", "-i", protocol, "-n_s", "3", "-session_id", "7", "-o", "4"]
    printed = run(capsys, served, "interactive_identity_test", *flags, "-session_len", "64")
    assert printed.count("set request") == printed.count("get request") == 3
    shapes = [line for line in printed.splitlines() if line.startswith("(1, 8, 1, ")]
    assert len(shapes) == 3
    rows = np.loadtxt("triton_out", dtype=np.int64, delimiter=",")
    for prompt, row in zip(PROMPTS, rows, strict=True):
        text: list[int] = []
        for _ in range(3):
            text += prompt
            text += engine.submit(GenerateRequest(tuple(text), 4)).result(60).output_ids
        assert row.tolist()[: len(text)] == text


def test_the_sample_of_a_session(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], engine: Engine
) -> None:
    params = json.dumps({"config": {"url": served["http"], "model_name": "talk"}})
    assert main(["issue_request", str(REQUESTS / "interactive.json"), "--params", params]) == 0
    ids = capsys.readouterr().out.partition("output_ids:\n")[2].partition("]")[0]
    wanted = engine.submit(GenerateRequest(PROMPTS[0], 16)).result(60).output_ids
    assert [int(word) for word in ids.replace("[", "").split()] == [*PROMPTS[0], *wanted]


def test_a_session_of_text(capsys: pytest.CaptureFixture[str], served: dict[str, Any]) -> None:
    flags = ["-m", "talk", "-session_id", "8", "-session_len", "256", "--output-len", "4"]
    printed = run(capsys, served, "interactive_end_to_end_test", *flags, "--return_log_probs")
    heads = [line.strip("=") for line in printed.splitlines() if line.startswith("=====")]
    assert [head for head in heads if head] == [
        "After preprocessing",
        "After fastertransformer",
        "After fastertransformer",
        "After postprocessing",
        "After ensemble",
        "After ensemble",
    ]
    decoded = printed.partition("After postprocessing============\n")[2].partition("====")[0]
    assert decoded in printed.rpartition("After ensemble============\n")[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("interactive_identity_test", "-session_id", "1"), "fastertransformer has no sessions"),
        (
            ("interactive_identity_test", "-m", "talk", "-session_id", "0", "-n_s", "0"),
            "2 problems in the session's flags",
        ),
        (("chat", "-m", "talk"), "talk keeps the conversation in sessions"),
        (("chat", "-m", "live"), "streams, which only gRPC can carry; got 'http'"),
        (("chat", "--turn", "x"), "--turn has no {text}; got 'x'"),
    ],
)
def test_what_a_model_cannot_do_is_said(
    capsys: pytest.CaptureFixture[str],
    served: dict[str, Any],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    name, *more = arguments
    assert main([name, "-u", served["http"], "-i", "http", *more]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("model", "protocol"), [("live", "grpc"), ("fastertransformer", "http")])
def test_chat(served: dict[str, Any], engine: Engine, model: str, protocol: str) -> None:
    """Two turns, the second one with the first in its prompt."""
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    command = ["-u", served[protocol], "-i", protocol, "-m", model, "-o", "6"]
    typed = "Hello\n/help\n The house\n/quit\nunread\n"
    ended = subprocess.run(
        [sys.executable, "-m", "launcher_scripts.clients", "chat", *command],
        input=typed,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    first = answer_to(engine, tokenizer, "Hello")
    second = answer_to(engine, tokenizer, f"Hello{first}The house")
    assert ended.stdout == f"> {first}\n> > {second}\n> "
    assert ended.stderr.count("/quit ends") == 2


def answer_to(engine: Engine, tokenizer: Tokenizer, prompt: str) -> str:
    ids = tuple(tokenizer.encode(prompt))
    text = tokenizer.decode([*ids, *engine.submit(GenerateRequest(ids, 6)).result(60).output_ids])
    return text[len(prompt) :]


def test_ctrl_c_stops_an_answer_and_not_the_chat(served: dict[str, Any]) -> None:
    command = ["-u", served["grpc"], "-m", "live", "-o", "16000"]
    with subprocess.Popen(
        [sys.executable, "-m", "launcher_scripts.clients", "chat", *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as chat:
        try:
            assert chat.stdin is not None and chat.stdout is not None
            chat.stdin.write("Hello\n")
            chat.stdin.flush()
            assert chat.stdout.read(12).startswith("> ")  # some of the answer is there
            chat.send_signal(signal.SIGINT)
            chat.stdin.write("/quit\n")
            chat.stdin.close()
            rest = chat.stdout.read()
            assert chat.wait(120) == 0
            assert rest.endswith("> ")
            assert "[stopped]" in chat.stderr.read() and len(rest) < 16000
        finally:
            chat.kill()


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity_test", "-u", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the server at 127.0.0.1:1 is gone") and "Traceback" not in error


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_of_the_table_says_its_flags(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: {name}" in capsys.readouterr().out


def test_an_unknown_client_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["nobody"])
    assert "issue_request" in capsys.readouterr().err


def test_a_server_that_refused_a_stream_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = export(tmp_path, name="live", decoupled=True, tokenizer=NO_TEXT)
    rows = ("-d", "-r", "-b", "9999", "--vocab_size", str(VOCAB_SIZE))
    with running(tmp_path / "job", settings.model_repository) as step:
        ready = step.wait_until_ready()
        assert main(["identity_test", "-u", ready["grpc"], "-m", "live", *rows]) == 1
        assert "batch-size must be <=" in capsys.readouterr().err
        assert step.stop() == 0, step.err
        assert "Exit timeout expired" not in step.out + step.err
