"""A gateway before a real server on the CPU, asked by OpenAI's own client and by curl."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.contract.requests import open_id
from launcher_scripts.gateway.backend import RowRequest
from launcher_scripts.gateway.triton_backend import TritonBackend, TritonServer
from tests.gateway.fakes import CHATML
from tests.gateway.processes import RunningGateway, gateway
from tests.lazy_modules import LazyModule
from tests.processes import wait_for
from tests.server.processes import CHECKOUT, RunningStep
from tests.server.repositories import TOKENIZERS
from tests.server.requests import Client, Stream, generated, ids_request, t5_request
from tests.server.shared import cache_tokens_used

openai = LazyModule("openai")
pytestmark = pytest.mark.usefixtures("tritonserver")
TOKENIZER = load_tokenizer(TOKENIZERS / "gpt2bpe")
PROMPT = "Hello the people"
KEY = "sk-of-the-tests"


@pytest.fixture(scope="module")
def served(
    shared_server: RunningStep, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """The gateway before it, which knows a chat template for both GPTs and wants a key."""
    folder = tmp_path_factory.mktemp("door")
    (folder / "chatml.jinja").write_text(CHATML)
    (folder / "keys").write_text(f"# who may ask\ntests={KEY}\n")
    (folder / "keys").chmod(0o600)
    arguments = ["--ready", str(shared_server.settings.ready_file), "--max-waiting", "64"]
    arguments += ["--chat-template", str(folder / "chatml.jinja")]
    arguments += ["--api-keys", str(folder / "keys")]
    with gateway(folder / "run", *arguments) as started:
        yield started


@pytest.fixture
def client(served: RunningGateway) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.facts["openai"], api_key=KEY, max_retries=0) as client:
        yield client


def greedy(shared_server: RunningStep, model: str, count: int, **more: Any) -> list[int]:
    """What the token model itself answers."""
    with Client(shared_server.ready, "grpc") as direct:
        answer = direct.infer(model, **ids_request([TOKENIZER.encode(PROMPT)], count, **more))
    return generated(answer)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_the_ready_line_and_its_command(served: RunningGateway) -> None:
    assert served.facts["models"] == ["gpt", "plain", "t5"]
    command = re.search("^try: (.*)$", served.out, re.MULTILINE)[1]
    ran = subprocess.run(
        ["bash", "-c", f"{command} -s"],
        env={"OPENAI_API_KEY": KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("model", ["gpt", "plain"])
def test_completions_are_the_token_models(
    client: Any, shared_server: RunningStep, model: str
) -> None:
    ids = greedy(shared_server, "plain", 12)
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == TOKENIZER.decode(ids)
    assert answer.usage.completion_tokens == 12
    pieces = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == TOKENIZER.decode(ids)
    sampled = {"runtime_top_k": 7, "runtime_top_p": 0.9, "temperature": 1.5, "random_seed": 5}
    ids = greedy(shared_server, "plain", 12, **sampled)
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=12,
        temperature=1.5,
        top_p=0.9,
        seed=5,
        extra_body={"top_k": 7},
    )
    assert answer.choices[0].text == TOKENIZER.decode(ids)


def test_tokens_stream_as_they_come(client: Any) -> None:
    pieces = client.completions.create(
        model="gpt",
        prompt=PROMPT,
        max_tokens=40,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *found, last = pieces
    assert sum(len(piece.choices[0].logprobs.tokens) for piece in found) == 40
    assert len(found) > 10
    assert last.usage.completion_tokens == 40


@pytest.mark.parametrize("model", ["gpt", "plain"])
def test_log_probabilities_are_those_of_the_logits(
    client: Any, shared_server: RunningStep, model: str
) -> None:
    ready = shared_server.ready
    prompt = TOKENIZER.encode(PROMPT)
    ids = [*prompt, *greedy(shared_server, "plain", 5)]
    with Client(ready, "grpc") as direct:
        asked = ids_request([ids], 0, is_return_context_logits=True)
        logits = direct.infer("plain", **asked)["context_logits"][0]
    expected = log_softmax(logits)[:-1]
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3, echo=True
    )
    (choice,) = answer.choices
    found = choice.logprobs
    assert choice.text == TOKENIZER.decode(ids)
    assert found.token_logprobs[0] is None
    chosen = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(found.token_logprobs[1:], chosen, atol=1e-3)
    likeliest = np.sort(expected, -1)[:, ::-1][:, :3]
    for values, alternatives in zip(likeliest, found.top_logprobs[1:], strict=True):
        np.testing.assert_allclose(list(alternatives.values())[:3], values, atol=1e-3)
    for token, offset in zip(found.tokens[: len(prompt)], found.text_offset, strict=False):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("model", ["gpt", "plain"])
def test_an_empty_prompt_is_echoed(client: Any, model: str) -> None:
    for tokens in (0, 2):
        answer = client.completions.create(
            model=model,
            prompt="",
            max_tokens=tokens,
            echo=True,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
        assert len(answer.choices[0].logprobs.tokens) == tokens
        assert answer.usage.prompt_tokens == 0


def test_a_chat_whole_and_streamed(client: Any) -> None:
    asked = {
        "model": "gpt",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.message.role == "assistant"
    raw = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert choice.message.content == raw.decode(errors="replace")
    assert {len(each.top_logprobs) for each in choice.logprobs.content} == {2}
    text, tokens = "", []
    for event in client.chat.completions.create(**asked, stream=True):
        (piece,) = event.choices
        text += piece.delta.content or ""
        tokens += piece.logprobs.content if piece.logprobs else []
    assert text == choice.message.content
    assert [each.token for each in tokens] == [each.token for each in choice.logprobs.content]


def test_responses_are_what_chats_are(client: Any) -> None:
    message = {"role": "user", "content": "Hello!"}
    (chat,) = client.chat.completions.create(
        model="gpt", messages=[message], max_tokens=9, temperature=0
    ).choices
    asked = {"model": "gpt", "input": [message], "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.message.content
    assert whole.status == ("incomplete" if chat.finish_reason == "length" else "completed")
    with client.responses.stream(**asked) as stream:
        *others, last = stream
    deltas = [event.delta for event in others if event.type == "response.output_text.delta"]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == "".join(deltas) == whole.output_text


def test_many_at_once_get_their_own_answers(served: RunningGateway) -> None:
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=served.facts["openai"], api_key=KEY, max_retries=0
        ) as client:

            async def one(number: int) -> str:
                answer = await client.completions.create(
                    model="gpt", prompt=[5 + number, 7], max_tokens=10, temperature=0, stream=True
                )
                return "".join([piece.choices[0].text async for piece in answer])

            return await asyncio.gather(*(one(number) for number in range(24)))

    together = asyncio.run(all_of_them())
    with openai.OpenAI(base_url=served.facts["openai"], api_key=KEY) as client:
        for number in (0, 11, 23):
            alone = client.completions.create(
                model="plain", prompt=[5 + number, 7], max_tokens=10, temperature=0
            )
            assert alone.choices[0].text == together[number]


def test_a_t5_answers_its_prompt(client: Any, shared_server: RunningStep) -> None:
    ready = shared_server.ready
    prompt = TOKENIZER.encode(PROMPT)
    with Stream(ready) as stream:
        last = stream.ask("t5", **t5_request([prompt], max_output_len=8))[-1]
    count = int(last["sequence_length"][0, 0])
    expected = TOKENIZER.decode(last["output_ids"][0, 0, :count].tolist())
    answer = client.completions.create(model="t5", prompt=prompt, max_tokens=8, temperature=0)
    assert answer.choices[0].text == expected


def test_beams_are_shown_in_order(client: Any, shared_server: RunningStep) -> None:
    with Client(shared_server.ready, "grpc") as direct:
        asked = ids_request([TOKENIZER.encode(PROMPT)], 6, beam_width=3, len_penalty=1.0)
        found = direct.infer("plain", **asked)
    start = int(found["response_input_lengths"][0, 0])
    texts = [
        TOKENIZER.decode(ids[start:end].tolist())
        for ids, end in zip(found["output_ids"][0], found["sequence_length"][0], strict=True)
    ]
    for model in ("gpt", "plain"):
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=6, n=3, extra_body={"use_beam_search": True}
        )
        assert [choice.text for choice in answer.choices] == texts


def test_penalties_and_biases_reach_the_model(client: Any) -> None:
    asked = {"model": "gpt", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 0}
    forced = TOKENIZER.encode(" the")[0]
    more = {"return_tokens_as_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(**asked, logit_bias={str(forced): 100}, extra_body=more)
    assert set(answer.choices[0].logprobs.tokens) == {f"token_id:{forced}"}
    answer = client.completions.create(
        **asked,
        logit_bias={str(forced): 3},
        presence_penalty=2,
        frequency_penalty=2,
        extra_body=more,
    )
    assert len(set(answer.choices[0].logprobs.tokens)) > 1
    answer = client.completions.create(
        **{**asked, "temperature": 2.0}, extra_body={**more, "min_p": 1.0}
    )
    greedy = client.completions.create(**asked, extra_body=more)
    assert answer.choices[0].logprobs.tokens == greedy.choices[0].logprobs.tokens


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed"
)
def test_text_follows_what_it_has_to_be(client: Any) -> None:
    asked = {"model": "gpt", "max_tokens": 60, "temperature": 1.0, "seed": 3}
    answer = client.completions.create(
        **asked, prompt="a", extra_body={"guided_choice": ["people", "the word"]}
    )
    assert answer.choices[0].text in ("people", "the word")
    assert answer.choices[0].finish_reason == "stop"
    grammar = 'root ::= "the " noun ("s" | "")\nnoun ::= "word" | "song"'
    structured = {"structured_outputs": {"grammar": grammar}}
    answer = client.completions.create(**asked, prompt="a", extra_body=structured)
    assert answer.choices[0].text in ("the word", "the words", "the song", "the songs")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": schema}}
    text = ""
    for event in client.chat.completions.create(
        **asked,
        messages=[{"role": "user", "content": "Hello"}],
        response_format=form,
        stream=True,
    ):
        text += event.choices[0].delta.content or ""
    assert type(json.loads(text)["a"]) is bool
    with pytest.raises(openai.BadRequestError, match="guided_regex cannot be followed") as wrong:
        client.completions.create(**asked, prompt="a", extra_body={"guided_regex": "("})
    assert wrong.value.param == "guided_regex"


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed"
)
def test_a_function_that_must_be_called(client: Any) -> None:
    """Whatever the model is, its text is a call; so is a stream's."""
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    blanks = [token for blank in "\n\r\t " for token in TOKENIZER.encode(blank)]
    function = {"name": "light", "parameters": {**schema, "additionalProperties": False}}
    asked = {
        "model": "gpt",
        "messages": [{"role": "user", "content": "Light, please!"}],
        "max_tokens": 150,
        "seed": 3,
        "logit_bias": {str(blank): -100 for blank in blanks},
        "tools": [{"type": "function", "function": function}],
    }
    named = {"type": "function", "function": {"name": "light"}}
    for choice in (named, "required"):
        more = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
        (answer,) = client.chat.completions.create(**more).choices
        (call,) = answer.message.tool_calls
        assert (call.type, call.function.name) == ("function", "light")
        assert type(json.loads(call.function.arguments)["on"]) is bool
        assert answer.finish_reason == "tool_calls"
        with client.chat.completions.stream(**more) as stream:
            (streamed,) = stream.get_final_completion().choices
        (found,) = streamed.message.tool_calls
        assert found.function.name == "light"
        assert json.loads(found.function.arguments) == json.loads(call.function.arguments)


def test_errors_are_those_of_openais_client(
    served: RunningGateway, shared_server: RunningStep, client: Any
) -> None:
    before = len(shared_server.out)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")
    for model in ("gpt", "plain"):
        for streams in (False, True):
            with pytest.raises(openai.BadRequestError, match="outside of the vocabulary"):
                client.completions.create(model=model, prompt=[490, 491], stream=streams)
    # Triton notes what has made it die after some hundred refused streams.
    assert "HandleCancellation" not in shared_server.out[before:]
    with pytest.raises(openai.APIStatusError, match=r"within 0\.2 s") as late:
        client.completions.create(
            model="gpt",
            prompt="a",
            max_tokens=4000,
            extra_body={"timeout": 0.2, "ignore_eos": True},
        )
    assert late.value.status_code == 504
    with (
        openai.OpenAI(base_url=served.facts["openai"], api_key="sk-wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.parametrize(("model", "streams"), [("gpt", True), ("gpt", False), ("plain", False)])
def test_a_client_that_leaves_frees_the_cache(
    served: RunningGateway, shared_server: RunningStep, model: str, streams: bool
) -> None:
    body = {"model": model, "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "n": 4}
    command = ["curl", "-sN", f"{served.address}/v1/completions", "-d"]
    command += [json.dumps({**body, "stream": streams}), "-H", f"Authorization: Bearer {KEY}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as asking:
        wait_for(lambda: cache_tokens_used(shared_server.ready, model) > 0)
        asking.kill()
    wait_for(lambda: cache_tokens_used(shared_server.ready, model) == 0)


def closes_its_stream(client: Any, asked: dict[str, Any]) -> None:
    with client.completions.create(**asked, stream=True) as events:
        next(iter(events))


def waits_too_shortly(client: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**asked)


def is_cancelled(client: Any, asked: dict[str, Any]) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY) as other:
            await asyncio.wait_for(other.completions.create(**asked), 0.5)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(ask())


@pytest.mark.parametrize("leaves", [closes_its_stream, waits_too_shortly, is_cancelled])
def test_openais_client_frees_the_cache(
    client: Any, shared_server: RunningStep, leaves: Any
) -> None:
    more = {"ignore_eos": True}
    leaves(client, {"model": "gpt", "prompt": "a", "max_tokens": 4000, "extra_body": more})
    wait_for(lambda: cache_tokens_used(shared_server.ready, "gpt") == 0)


def test_there_are_no_embeddings(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="none of the models gives embeddings"):
        client.embeddings.create(model="gpt", input="a")


def doc_programs() -> list[str]:
    """The Python of the documentation that imports a client."""
    text = (CHECKOUT / "docs" / "gateway.md").read_text(encoding="utf-8")
    lines = r"^(    (?:from|import) .*\n(?:    (?:client|message|print).*\n)+)"
    return re.findall(lines, text, re.MULTILINE)


@pytest.mark.parametrize("program", doc_programs(), ids=["openai", "anthropic"])
def test_the_documents_programs(served: RunningGateway, program: str) -> None:
    program = textwrap.dedent(program).replace("http://127.0.0.1:8080", served.address)
    program = program.replace('model="tiny"', 'model="gpt"')
    program = program.replace('api_key="none"', f'api_key="{KEY}"')
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip()


def doc_commands() -> list[str]:
    """The curl lines of the documentation that a model that generates answers."""
    text = (CHECKOUT / "docs" / "gateway.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (curl .*HOST:PORT.*)$", text, re.MULTILINE)
    others = ("/v1/embeddings", "_lora_adapter")  # answered by other servers
    return [command for command in commands if not any(path in command for path in others)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("number", range(len(doc_commands())))
def test_the_documents_commands(served: RunningGateway, number: int) -> None:
    command = doc_commands()[number].replace("http://HOST:PORT", served.address)
    command = command.replace("-d '{", """-d '{"model": "gpt", """)
    ran = subprocess.run(
        ["bash", "-c", f"{command} -sf -H 'Authorization: Bearer {KEY}'"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran
    assert ran.stdout.startswith(("{", "data: {", "event: response.created\ndata: {"))


def test_it_drains_and_ends(shared_server: RunningStep, tmp_path: Path) -> None:
    """What runs when SIGTERM comes is answered; the exit status is 0."""
    with gateway(tmp_path, "--ready", str(shared_server.settings.ready_file.parent)) as started:
        client = openai.OpenAI(base_url=started.facts["openai"], api_key="none", max_retries=0)
        with client:
            pieces = client.completions.create(
                model="gpt",
                prompt="a",
                max_tokens=600,
                stream=True,
                extra_body={"ignore_eos": True},
                stream_options={"include_usage": True},
            )
            next(iter(pieces))
            started.process.terminate()
            wait_for(lambda: "draining: 1" in started.out)
            with pytest.raises(openai.APIStatusError) as refused:
                client.completions.create(model="gpt", prompt="a")
            assert refused.value.status_code == 503
            *_, last = pieces
            assert last.usage.completion_tokens == 600
        assert started.process.wait(60) == 0, started.err


def test_it_ends_though_nobody_reads_its_lines(shared_server: RunningStep, tmp_path: Path) -> None:
    """Who started it may have died; SIGTERM ends it all the same."""
    command = [sys.executable, "-m", "launcher_scripts.steps.start_gateway"]
    command += ["--ready", str(shared_server.settings.ready_file.parent)]
    with (tmp_path / "gateway.err").open("w+") as said:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            assert started.stdout is not None
            assert started.stdout.readline().startswith("ready: ")
            started.stdout.close()
            started.terminate()
            assert started.wait(60) == 0
        finally:
            started.kill()
            started.wait()
        said.seek(0)
        assert "Traceback" not in said.read()


def test_a_server_that_is_gone_is_said(shared_server: RunningStep, tmp_path: Path) -> None:
    """Of two servers that ready files name, one of which has never been."""
    ready = shared_server.ready
    (tmp_path / "ready.json").write_text(json.dumps({**ready, "grpc": "127.0.0.1:9"}))
    started = RunningGateway(tmp_path / "run", "--ready", str(tmp_path), "--ready-timeout", "1")
    try:
        assert started.process.wait(60) == 1
        assert "127.0.0.1:9 does not answer" in started.err
        assert "Traceback" not in started.err
    finally:
        started.close()


class CountingServer(TritonServer):
    """Counts the responses of a shared stream that bring tokens, once it is open."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.opened = asyncio.Event()
        self.responses = 0

    async def stream(
        self, model: str, tensors: Mapping[str, Any], outputs: Sequence[str], **more: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(super().stream(model, tensors, outputs, **more)) as responses:
            async for response in responses:
                if more["request_id"].startswith(open_id("")):
                    self.responses += bool(response)
                    self.opened.set()
                yield response


def test_rows_that_run_together_share_responses(shared_server: RunningStep) -> None:
    async def ask() -> tuple[list[list[int]], int]:
        server = CountingServer(str(shared_server.ready["grpc"]))
        backend = TritonBackend(server, await server.model_config("gpt"))

        async def one(number: int, tokens: int) -> list[int]:
            row = RowRequest("mine", (5 + number, 7), tokens, temperature=0)
            return [id async for each in backend.generate(row) for id in each.token_ids]

        await asyncio.gather(*(one(number, 400) for number in range(2)), server.opened.wait())
        before = server.responses
        answers = await asyncio.gather(*(one(number, 50) for number in range(24)))
        counted = server.responses - before
        await server.close()
        return answers, counted

    answers, counted = asyncio.run(ask())
    with Client(shared_server.ready, "grpc") as direct:
        for number, ids in enumerate(answers):
            alone = direct.infer("plain", **ids_request([[5 + number, 7]], 50))
            assert ids == generated(alone)
    assert 0 < counted < sum(map(len, answers)) / 2
