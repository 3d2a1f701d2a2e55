"""/v1/completions over an engine that answers as the tests say."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.testclient import TestClient

from launcher_scripts.common.files import DigestChain
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.contract.tensors import MAX_GRAMMAR_BYTES
from launcher_scripts.gateway.api_errors import bad_request
from tests.gateway.fakes import END_ID, GPT2, SETTINGS, FakeBackend, client_of, saying, served

WORDS = " some words to say"
IDS = GPT2.encode(WORDS)


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    """The answer to a completion request."""
    answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 40, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: TestClient, **body: Any) -> dict[str, Any]:
    """The error of a completion request that is wrong."""
    answer = client.post("/v1/completions", json={"prompt": "Hello", **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def events(client: TestClient, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, which ends with [DONE]."""
    answer = client.post(path, json={"stream": True, "max_tokens": 40, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_responses_and_version_have_the_digests_of_the_weights() -> None:
    chain = DigestChain("ab" * 32, {"model.nemo": "blake3:" + "cd" * 32})
    client = client_of(served(FakeBackend(), digests=chain), served(FakeBackend(), "other"))
    assert re.fullmatch("fp_abababababab_[0-9a-f]{12}", chain.fingerprint)
    assert ask(client, model="tiny")["system_fingerprint"] == chain.fingerprint
    for event in events(client, prompt="Hello", model="tiny"):
        assert event["system_fingerprint"] == chain.fingerprint
    assert ask(client, model="other")["system_fingerprint"] is None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    chat = client.post("/v1/chat/completions", json=body).json()
    assert chat["system_fingerprint"] == chain.fingerprint
    assert client.get("/version").json()["models"] == {
        "tiny": {
            "system_fingerprint": chain.fingerprint,
            "manifest": "ab" * 32,
            "source": {"model.nemo": "blake3:" + "cd" * 32},
        },
        "other": None,
    }


def test_an_answer_is_openais() -> None:
    backend = FakeBackend()
    answer = ask(client_of(served(backend)))
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": WORDS, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    count = len(IDS) + 1
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": count,
        "total_tokens": count + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (request,) = backend.requests
    assert request.prompt_ids == tuple(GPT2.encode("Hello"))
    assert request.end_id == END_ID
    assert answer["id"] == f"cmpl-{request.request_id}"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hello", [GPT2.encode("Hello")]),
        (["Hello", " the"], [GPT2.encode("Hello"), GPT2.encode(" the")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_have_four_forms(prompt: Any, ids: list[list[int]]) -> None:
    backend = FakeBackend(ids=lambda request: request.prompt_ids)
    answer = ask(client_of(served(backend)), prompt=prompt)
    assert [list(request.prompt_ids) for request in backend.requests] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert [choice["text"] for choice in answer["choices"]] == [GPT2.decode(row) for row in ids]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_special_tokens_stand_around_texts_alone() -> None:
    backend = FakeBackend()
    client = client_of(served(backend, special=SpecialIds((1, 2), (3,))))
    ask(client, prompt="Hello")
    ask(client, prompt="Hello", add_special_tokens=False)
    ask(client, prompt=[7])
    hello = GPT2.encode("Hello")
    assert [request.prompt_ids for request in backend.requests] == [
        (1, 2, *hello, 3),
        tuple(hello),
        (7,),
    ]


def test_sampling_reaches_the_engine() -> None:
    backend = FakeBackend()
    client = client_of(served(backend, defaults={"temperature": 0.6, "top_k": 50}))
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias={"5": 2, "6": -100},
        seed=-3,
        min_tokens=4,
        stop_token_ids=[9],
        max_tokens=12,
    )
    ask(client, ignore_eos=True, top_k=-1)
    first, second = backend.requests
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.9, 7, 0.1)
    assert (first.repetition_penalty, first.presence_penalty) == (1.2, 0.3)
    assert (first.frequency_penalty, first.logit_bias) == (-0.4, {5: 2, 6: -100})
    assert (first.seed, first.min_tokens, first.stop_ids) == (-3, 4, (9,))
    assert (first.max_tokens, first.end_id) == (12, END_ID)
    assert (second.temperature, second.top_k, second.end_id) == (0.6, 0, None)


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}},
                }
            },
            {"json_schema": {"type": "object"}},
        ),
        ({"guided_json": {"type": "array"}}, {"json_schema": {"type": "array"}}),
        ({"guided_regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"guided_choice": ["yes", "né"]}, {"choice": ["yes", "né"]}),
        ({"guided_grammar": "root ::= a"}, {"grammar": "root ::= a"}),
        ({"structured_outputs": {"json": {"type": "array"}}}, {"json_schema": {"type": "array"}}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ],
)
def test_grammars_reach_the_engine(body: dict[str, Any], grammar: Any) -> None:
    backend = FakeBackend()
    ask(client_of(served(backend)), **body)
    (request,) = backend.requests
    assert (json.loads(request.grammar) if request.grammar else None) == grammar


def test_rows_of_a_seed_differ_and_come_again() -> None:
    backend = FakeBackend()
    client = client_of(served(backend))
    ask(client, n=3, seed=5)
    ask(client, n=3)
    seeds = [request.seed for request in backend.requests]
    assert seeds[:3] == [5, 6, 7]
    assert len(set(seeds)) == 6
    names = [request.request_id for request in backend.requests]
    assert len(set(names)) == 6


def test_log_probabilities_of_prompt_and_answer() -> None:
    client = client_of(served(FakeBackend()))
    prompt = GPT2.encode("Hello the")
    answer = ask(client, prompt="Hello the", echo=True, logprobs=2, max_tokens=3)
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello the" + GPT2.decode(IDS[:3])
    found = choice["logprobs"]
    ids = [*prompt, *IDS[:3]]
    assert found["tokens"] == [GPT2.decode([each]) for each in ids]
    assert found["token_logprobs"] == [None, *(-0.5 - each / 1000 for each in ids[1:])]
    assert found["top_logprobs"][0] is None
    for token_id, alternatives in zip(ids[1:], found["top_logprobs"][1:], strict=True):
        assert list(alternatives.values()) == [-0.5, -1.5]
        assert next(iter(alternatives)) == GPT2.decode([token_id])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_no_alternatives_but_the_token_itself() -> None:
    (choice,) = ask(client_of(served(FakeBackend())), logprobs=0, max_tokens=2)["choices"]
    found = choice["logprobs"]
    assert [list(each) for each in found["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_parts_of_characters_have_names() -> None:
    ids = GPT2.encode("é")
    client = client_of(served(FakeBackend(ids=lambda _: ids)))
    (choice,) = ask(client, logprobs=0, max_tokens=2)["choices"]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    (choice,) = ask(client, logprobs=0, max_tokens=2, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in ids]


def test_an_empty_prompt_has_no_log_probabilities() -> None:
    client = client_of(served(FakeBackend()))
    for max_tokens in (0, 2):
        asked = {"prompt": "", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        (choice,) = ask(client, **asked)["choices"]
        assert choice["text"] == GPT2.decode(IDS[:max_tokens])
        assert len(choice["logprobs"]["tokens"]) == max_tokens


def test_nothing_to_generate_is_echoed_without_an_engine() -> None:
    backend = FakeBackend()
    client = client_of(served(backend))
    (choice,) = ask(client, max_tokens=0, echo=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert backend.requests == []
    (choice,) = ask(client, prompt="Hello the", max_tokens=0, echo=True, logprobs=1)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(GPT2.encode("Hello the"))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "met"),
    [
        ("ords to", " some w", "ords to"),
        (["zzz", "e w"], " som", "e w"),
        (["say", " t"], " some words", " t"),
        ("sayings", WORDS, None),
    ],
)
def test_stop_texts_are_found_across_tokens(
    streams: bool, stop: Any, shown: str, met: str | None
) -> None:
    backend = FakeBackend()
    client = client_of(served(backend))
    if streams:
        found = [event["choices"][0] for event in events(client, prompt="Hello", stop=stop)]
        text, last = "".join(choice["text"] for choice in found), found[-1]
    else:
        (last,) = ask(client, stop=stop)["choices"]
        text = last["text"]
    assert (text, last["finish_reason"], last["stop_reason"]) == (shown, "stop", met)
    assert backend.running == 0


def test_a_stop_text_may_stay() -> None:
    (choice,) = ask(
        client_of(served(FakeBackend())), stop="words", include_stop_str_in_output=True
    )["choices"]
    assert choice["text"] == " some words"


def test_stop_texts_wait_for_min_tokens() -> None:
    client = client_of(served(saying("a b a b a b")))
    (choice,) = ask(client, stop="a", min_tokens=3)["choices"]
    assert choice["text"] == "a b "


def test_further_end_tokens_say_which_came() -> None:
    backend = FakeBackend(ids=lambda request: (*IDS[:2], *request.stop_ids))
    client = client_of(served(backend, end_ids=(END_ID, 8)))
    (choice,) = ask(client, max_tokens=3)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 8)
    assert backend.requests[0].stop_ids == (8,)


def test_the_best_of_several_rows() -> None:
    """The fake's log-probabilities fall with the ids."""
    rows = iter([(400, 400), (5, 5), (90, 90), (7, 7)])
    backend = FakeBackend(ids=lambda _: next(rows))
    answer = ask(client_of(served(backend)), n=2, best_of=4, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == [
        GPT2.decode((5, 5)),
        GPT2.decode((7, 7)),
    ]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 8


def test_an_echoed_prompt_makes_no_row_better() -> None:
    """The shorter row is the better one, though the prompt weighs more in it."""
    rows = iter([(300,), (160,) * 6])
    answer = ask(
        client_of(served(FakeBackend(ids=lambda _: next(rows)))),
        prompt=[5, 480, 480, 480],
        best_of=2,
        echo=True,
        logprobs=0,
        max_tokens=6,
        return_tokens_as_token_ids=True,
    )
    assert answer["choices"][0]["logprobs"]["tokens"][4] == "token_id:300"


def test_a_beam_search_shows_its_hypotheses() -> None:
    backend = FakeBackend()
    answer = ask(
        client_of(served(backend)), prompt=["Hello", "a"], use_beam_search=True, n=3, max_tokens=4
    )
    texts = [GPT2.decode(IDS[: 4 - beam]) for beam in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == texts * 2
    assert [request.beam_width for request in backend.requests] == [3, 3]


def test_a_stream_joins_to_the_whole_answer() -> None:
    client = client_of(served(FakeBackend()))
    found = events(
        client, prompt=["Hello", "a"], n=2, echo=True, stream_options={"include_usage": True}
    )
    *pieces, last = found
    texts = dict.fromkeys(range(4), "")
    for event in pieces:
        assert event["usage"] is None
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hello" + WORDS, 1: "Hello" + WORDS, 2: "a" + WORDS, 3: "a" + WORDS}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4 * (len(IDS) + 1)


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_that_come_together_have_an_event_each(echo: bool) -> None:
    def choices(at_once: int) -> list[dict[str, Any]]:
        client = client_of(served(FakeBackend(at_once=at_once)))
        return [event["choices"][0] for event in events(client, prompt="Hello", echo=echo)]

    one_by_one = [choice for choice in choices(1) if choice["text"]]
    *most, last = choices(3)
    assert [choice["text"] for choice in (*most, last)] == [each["text"] for each in one_by_one]
    assert {choice["finish_reason"] for choice in most} == {None}
    assert last["finish_reason"] == "stop"


def test_usage_counts_what_all_rows_of_a_prompt_found_in_the_cache() -> None:
    found = {"-0": 16, "-1": 32, "-2": 48, "-3": 0}
    backend = FakeBackend(cached=lambda request: found[request.request_id[-2:]])
    client = client_of(served(backend))
    answer = ask(client, prompt=["Hello", "a"], n=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    found["-3"] = 32
    options = {"stream_options": {"include_usage": True}}
    *_, last = events(client, prompt=["Hello", "a"], n=2, **options)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_usage_may_come_with_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(client_of(served(FakeBackend())), prompt="Hello", stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == [*range(1, len(IDS) + 2), len(IDS) + 1]


def test_an_encoder_decoder_reads_its_prompt() -> None:
    backend = FakeBackend()
    client = client_of(
        served(backend, encodes=True, special=SpecialIds(decoder=(4,)), max_len=None)
    )
    assert ask(client)["choices"][0]["text"] == WORDS
    assert backend.requests[0].decoder_ids == (4,)
    assert refused(client, echo=True)["param"] == "echo"
    assert "empty" in refused(client, prompt="")["message"]


def test_a_model_that_knows_no_languages_is_asked_in_none() -> None:
    for name in ("source_language", "target_language"):
        error = refused(client_of(served(FakeBackend(), encodes=True)), **{name: "de_DE"})
        assert error["param"] == name
        assert "knows no languages" in error["message"]


def test_what_tokens_stand_for_is_remembered_across_requests() -> None:
    """Whether they ask the model, an adapter of it, or it in other languages."""
    model = served(FakeBackend(), lora_names=("sql",), special=SpecialIds((5,), language=5))
    (adapter,) = model.adapters()
    assert model.between(None, None) is model
    translator = model.between(None, "<|endoftext|>")
    assert translator.special.decoder == (model.special.start, END_ID)
    assert translator.tokenizer is adapter.tokenizer is model.tokenizer


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "words"),
    [
        (65, 1, "However, your prompt resulted in 65 tokens. Please reduce the length of the"),
        (64, 1, "However, you requested 65 tokens (64 in the prompt, 1 in the completion)."),
        (5, 60, "However, you requested 65 tokens (5 in the prompt, 60 in the completion)."),
    ],
)
def test_clients_recognize_an_overflow(prompt_len: int, max_tokens: int, words: str) -> None:
    """By OpenAI's code, or by its words as litellm and LangChain do."""
    client = client_of(served(FakeBackend()))
    error = refused(client, prompt=[5] * prompt_len, max_tokens=max_tokens)
    assert error["message"].startswith(f"This model's maximum context length is 64 tokens. {words}")
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


def test_prompt_and_answer_of_an_encoder_decoder_have_the_length_each() -> None:
    client = client_of(served(FakeBackend(), encodes=True, max_len=8))
    assert ask(client, prompt=[5] * 8, max_tokens=8)["choices"]
    for param, body in (
        ("prompt", {"prompt": [5] * 9, "max_tokens": 1}),
        ("max_tokens", {"prompt": [5] * 8, "max_tokens": 9}),
    ):
        error = refused(client, **body)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
            "response_format",
            "invalid_value",
        ),
        ({"priority": 1}, "priority", "unsupported_parameter"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "response_format", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        (
            {"guided_regex": "a", "use_beam_search": True},
            "use_beam_search",
            "unsupported_parameter",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 3, "best_of": 2}, "best_of", "invalid_value"),
        ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "stream", "unsupported_parameter"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs", "unsupported_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream_options": {"all": True}, "stream": True},
            "stream_options",
            "unsupported_parameter",
        ),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", [1]]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
        ({"max_tokens": 64}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [5] * 64, "max_tokens": 1}, "prompt", "context_length_exceeded"),
        ({"timeout": 0}, "timeout", "invalid_value"),
    ],
)
def test_wrong_parameters_are_named(body: dict[str, Any], param: str, code: str) -> None:
    backend = FakeBackend()
    client = client_of(served(backend))
    error = refused(client, **body)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert backend.requests == []
    assert client.app.state.gateway.admission.waiting == 0


def test_null_is_not_given() -> None:
    assert ask(client_of(served(FakeBackend())), suffix=None, stop=None, n=None)["choices"]


def test_the_engines_refusal_has_its_status_also_in_a_stream() -> None:
    client = client_of(served(FakeBackend(error=bad_request("ids outside of the vocabulary"))))
    for streams in (False, True):
        answer = client.post("/v1/completions", json={"prompt": [999], "stream": streams})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "ids outside of the vocabulary"


def test_models_are_found_by_name() -> None:
    first, second = FakeBackend(), FakeBackend()
    client = client_of(served(first, "first"), served(second, "second"))
    ask(client, model="second")
    assert (len(first.requests), len(second.requests)) == (0, 1)
    assert refused(client)["param"] == "model"
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "third"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "first, second" in answer.json()["error"]["message"]


def test_a_gateways_own_fault_is_no_traceback() -> None:
    client = client_of(served(FakeBackend(error=ZeroDivisionError("secret"))))
    answer = client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"


@dataclass
class CountingTokenizer:
    """Knows in which threads it was asked."""

    threads: list[threading.Thread] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return GPT2.encode(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(GPT2, name)


def test_too_many_prompts_are_refused_before_they_are_tokenized() -> None:
    tokenizer = CountingTokenizer()
    client = client_of(served(FakeBackend(), tokenizer=tokenizer))
    most = (SETTINGS.max_running + SETTINGS.max_waiting) * 3 // 4
    error = refused(client, prompt=["a"] * (most + 1))
    assert (error["param"], error["code"]) == ("prompt", "invalid_value")
    assert f"at most {most} answers; got {most + 1} prompts" in error["message"]
    assert refused(client, prompt=["a"] * 13, n=128)["param"] == "prompt"
    small = client_of(served(FakeBackend(), tokenizer=tokenizer), max_running=2, max_waiting=2)
    assert refused(small, n=4)["param"] == "n"
    assert tokenizer.threads == []


@pytest.mark.parametrize(
    ("prompt", "aside"),
    [
        ("Hello", False),
        (["Hello"] * 2, False),
        ("a" * 5_000, True),
        (["Hello Hello"] * 1000, True),
    ],
)
def test_much_text_is_tokenized_aside(prompt: Any, aside: bool) -> None:
    """In a thread of its own, so that other answers go on."""
    tokenizer = CountingTokenizer()
    with client_of(served(FakeBackend(), tokenizer=tokenizer, max_len=None)) as client:
        loop = client.portal.call(threading.current_thread)
        ask(client, prompt=prompt, max_tokens=0)
    assert {thread is not loop for thread in tokenizer.threads} == {aside}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(path: str) -> None:
    tokenizer = CountingTokenizer()
    client = client_of(served(FakeBackend(), tokenizer=tokenizer, max_len=64, max_chars=2048))
    answer = client.post(path, json={"prompt": "1" * 2049})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "maximum context length is 64 tokens" in error["message"]
    assert tokenizer.threads == []
    assert client.post("/tokenize", json={"prompt": "1" * 2048}).status_code == 200


def test_a_long_text_is_a_prompt_like_others() -> None:
    text = "some words " * 3000
    backend = FakeBackend()
    ask(client_of(served(backend, max_len=None), max_body=1 << 20), prompt=text)
    assert backend.requests[0].prompt_ids == tuple(GPT2.encode(text))


def test_a_grammar_that_is_too_long_is_refused_by_its_parameter() -> None:
    backend = FakeBackend()
    schema = {"name": "a", "schema": {"const": "x" * MAX_GRAMMAR_BYTES}}
    body = {"response_format": {"type": "json_schema", "json_schema": schema}, "n": 64}
    error = refused(client_of(served(backend)), **body)
    assert (error["param"], error["code"]) == ("response_format", "invalid_value")
    assert f"at most {MAX_GRAMMAR_BYTES}" in error["message"]
    assert not backend.requests


def test_requests_are_rendered_and_not_generated() -> None:
    backend = FakeBackend()
    client = client_of(served(backend, max_len=1000))
    body = {"prompt": ["Hello", "One two"], "max_tokens": 3, "temperature": 0.5, "n": 2, "seed": 7}
    first, second = client.post("/v1/completions/render", json=body).json()
    assert (first["prompt"], second["prompt"]) == ("Hello", "One two")
    assert (first["token_ids"], first["model"]) == (GPT2.encode("Hello"), "tiny")
    assert first["sampling_params"]["temperature"] == 0.5
    assert [each["sampling_params"]["seed"] for each in (first, second)] == [7, 9]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    one = client.post("/v1/chat/completions/render", json=chat).json()
    assert one["prompt"] == GPT2.decode(one["token_ids"]) and "<|im_start|>user" in one["prompt"]
    assert one["sampling_params"]["max_tokens"] == 4
    assert client.post("/v1/completions/render", json={**body, "n": 0}).status_code == 400
    assert backend.requests == []
    load = client.get("/load").json()
    assert load == {"server_load": 0, "running": 0, "waiting": 0}
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200


@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "a"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
    ],
)
def test_drafts_follow_no_grammar(form: dict[str, Any]) -> None:
    backend = FakeBackend()
    error = refused(client_of(served(backend)), num_speculative_tokens=4, **form)
    assert (error["param"], error["code"]) == ("num_speculative_tokens", "unsupported_parameter")
    assert not backend.requests


def test_what_a_schema_cannot_ask_for_is_named() -> None:
    backend = FakeBackend()
    client = client_of(served(backend))

    def body(schema: dict[str, Any]) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": schema}}}}
        return {"prompt": "a", "response_format": form}

    answer = client.post("/v1/completions", json=body({"type": "string", "format": "phone"}))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-warning"] == "response_format: the format phone is ignored"
    error = refused(client, **body({"type": "array", "uniqueItems": True}))
    assert error["param"] == "response_format"
    assert "uniqueItems at #/properties/a is not supported there" in error["message"]
    assert len(backend.requests) == 1
