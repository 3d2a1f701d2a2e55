"""A tiny GPT through the whole way: repository, real tritonserver, ranks, clients."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import engine_for, random_tensors
from tests.processes import wait_for
from tests.server.processes import running
from tests.server.repositories import (
    END_ID,
    NO_TEXT,
    SHAPES,
    TOKENIZERS,
    beside,
    export,
    text_config,
)
from tests.server.requests import Client, generated, ids_request, text_rows

pytestmark = pytest.mark.usefixtures("tritonserver")

SAMPLED = {"runtime_top_k": 40, "temperature": 1.7, "random_seed": 11}
PROMPTS = [(5, 6, 7), (400,), (12, 13, 14, 15, 16, 17, 18, 19, 20), (490, 2), (33, 33, 33, 33)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The ready file of a server whose repository was copied away from where it was exported."""
    folder = tmp_path_factory.mktemp("served")
    for name, (tp, pp) in SHAPES.items():
        settings = export(folder / "exported", name=name, tp=tp, pp=pp)
    shutil.copytree(settings.model_repository, folder / "copied")
    shutil.rmtree(folder / "exported")
    with running(folder / "job", folder / "copied") as step:
        ready = step.wait_until_ready()
        ranks = Counter(rank["model"] for rank in ready["ranks"])
        assert ranks == {name: tp * pp for name, (tp, pp) in SHAPES.items()}
        yield ready
        assert step.stop() == 0, step.err
        assert step.survivors() == []


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["http", "grpc"])
def client(served: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(served, request.param) as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The same model on one rank in this process: what every served answer must be."""
    config = text_config()
    engine = engine_for(config, random_tensors(config), max_batch_size=64)
    yield engine
    engine.close()


def expected(engine: Engine, prompt: tuple[int, ...], output_len: int, **more: Any) -> Any:
    return engine.submit(GenerateRequest(prompt, output_len, **more)).result(60)


def test_sampled_tokens_and_log_probs(client: Client, engine: Engine, model: str) -> None:
    answer = client.infer(
        model, **ids_request([PROMPTS[0]], 8, is_return_log_probs=True, **SAMPLED)
    )
    sampling = SamplingParameters(top_k=40, temperature=1.7, random_seed=11)
    wanted = expected(engine, PROMPTS[0], 8, sampling=sampling, return_log_probs=True)
    assert generated(answer) == list(wanted.output_ids)
    assert len(set(wanted.output_ids)) > 2
    assert answer["cum_log_probs"][0, 0] == pytest.approx(wanted.cum_log_probs, abs=1e-4)
    np.testing.assert_allclose(answer["output_log_probs"][0, 0], wanted.output_log_probs, atol=1e-4)


def test_rows_of_different_lengths_in_one_request(
    client: Client, engine: Engine, model: str
) -> None:
    answer = client.infer(model, **ids_request(PROMPTS, 6))
    for row, prompt in enumerate(PROMPTS):
        assert generated(answer, row) == list(expected(engine, prompt, 6).output_ids)
        assert answer["output_ids"][row, 0, : len(prompt)].tolist() == list(prompt)


def test_context_logits(client: Client, engine: Engine, model: str) -> None:
    answer = client.infer(model, **ids_request([PROMPTS[2]], 1, is_return_context_logits=True))
    wanted = expected(engine, PROMPTS[2], 1, return_context_logits=True).context_logits
    assert answer["context_logits"].shape == (1, len(PROMPTS[2]), 491)
    np.testing.assert_allclose(answer["context_logits"][0], np.asarray(wanted), atol=2e-4)


def test_what_a_gateway_asks_for(client: Client, engine: Engine, model: str) -> None:
    """Penalties of generated tokens, min-p, biases, no end token, and log-probabilities."""
    asked = ids_request(
        [PROMPTS[2]],
        6,
        runtime_top_p=1.0,
        random_seed=3,
        min_p=0.01,
        frequency_penalty=0.5,
        output_presence_penalty=0.25,
        logit_bias_ids=[7, 490],
        logit_bias_values=[1.5, -2.0],
        num_log_probs=3,
        num_prompt_log_probs=0,
        end_id=491,
    )
    answer = client.infer(model, **asked)
    sampling = SamplingParameters(
        top_p=1.0, random_seed=3, min_p=0.01, frequency_penalty=0.5, output_presence_penalty=0.25
    )
    wanted = expected(
        engine,
        PROMPTS[2],
        6,
        sampling=sampling,
        logit_bias=((7, 1.5), (490, -2.0)),
        num_log_probs=3,
        num_prompt_log_probs=0,
        end_id=491,
    )
    assert generated(answer) == list(wanted.output_ids)
    for name, values in {
        "token_log_probs": wanted.token_log_probs.log_probs[None],
        "token_ranks": wanted.token_log_probs.ranks[None],
        "top_log_prob_ids": wanted.token_log_probs.top_ids[None],
        "top_log_probs": wanted.token_log_probs.top_log_probs[None],
        "prompt_log_probs": wanted.prompt_log_probs.log_probs,
        "prompt_ranks": wanted.prompt_log_probs.ranks,
    }.items():
        np.testing.assert_allclose(answer[name][0], np.asarray(values), atol=2e-4)
    assert "prompt_top_ids" not in answer


def test_log_probabilities_of_a_prompt_that_is_only_scored(
    client: Client, engine: Engine, model: str
) -> None:
    answer = client.infer(model, **ids_request(PROMPTS[:3], 0, num_prompt_log_probs=2))
    for row, prompt in enumerate(PROMPTS[:3]):
        wanted = expected(engine, prompt, 0, num_prompt_log_probs=2).prompt_log_probs
        assert answer["prompt_top_ids"][row, : len(prompt)].tolist() == wanted.top_ids.tolist()
        assert not answer["prompt_top_ids"][row, len(prompt) :].any()


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not there"
)
def test_texts_follow_their_grammars(client: Client, engine: Engine, model: str) -> None:
    """Two rows with grammars of different lengths, and one without beside them."""
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    texts = (b'{"choice": ["yes", "not now"]}', b'{"regex": "(ab|c){3} [0-9]"}', b"")
    asked = ids_request(PROMPTS[:3], 16, end_id=END_ID)
    asked["guided_grammar"] = np.array([list(text.ljust(40, b"\0")) for text in texts], np.uint8)
    answer = client.infer(model, **asked)
    chosen, matching = (tokenizer.decode(generated(answer, row)) for row in range(2))
    assert chosen in ("yes", "not now")
    assert re.fullmatch("(ab|c){3} [0-9]", matching)
    wanted = expected(engine, PROMPTS[2], 16, end_id=END_ID)
    assert generated(answer, 2) == list(wanted.output_ids)


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not there"
)
def test_a_wrong_grammar_has_its_own_error(client: Client, model: str) -> None:
    grammar = {"guided_grammar": list(b'{"regex": "["}')}
    with pytest.raises(InferenceServerException, match="guided_grammar cannot be followed"):
        client.infer(model, **ids_request([(1,)], 2, **grammar))


def test_context_embeddings_are_for_the_rows_that_ask(
    client: Client, engine: Engine, model: str
) -> None:
    tensors = ids_request(PROMPTS[2:4], 2, is_return_context_embeddings=True)
    tensors["is_return_context_embeddings"] = np.array([[True], [False]])
    answer = client.infer(model, **tensors)
    wanted = expected(engine, PROMPTS[2], 2, return_context_embeddings=True).context_embeddings
    assert answer["context_embeddings"].shape == (2, 1, wanted.shape[0])
    np.testing.assert_allclose(answer["context_embeddings"][0, 0], np.asarray(wanted), atol=2e-4)
    assert not answer["context_embeddings"][1].any()


def test_requests_at_once_are_answered_as_if_alone(
    served: dict[str, Any], engine: Engine, model: str
) -> None:
    """Ragged prompts and different parameters; every fourth request is wrong."""

    def ask(number: int) -> Any:
        prompt = PROMPTS[number % len(PROMPTS)]
        wrong = number % 4 == 3
        tensors = ids_request(
            [(9999,) if wrong else prompt], 5 + number, runtime_top_k=20, random_seed=number
        )
        with Client(served, "grpc") as client:
            try:
                return generated(client.infer(model, **tensors))
            except InferenceServerException as error:
                return error

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    for number, answer in enumerate(answers):
        if number % 4 == 3:
            assert isinstance(answer, InferenceServerException)
            assert "outside of the vocabulary" in str(answer)
        else:
            sampling = SamplingParameters(top_k=20, random_seed=number)
            prompt = PROMPTS[number % len(PROMPTS)]
            wanted = expected(engine, prompt, 5 + number, sampling=sampling)
            assert answer == list(wanted.output_ids)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids": np.array([[491]], np.uint32)}, "outside of the vocabulary"),
        ({"request_output_len": np.array([[500]], np.uint32)}, "positions"),
        ({"input_lengths": np.array([[7]], np.uint32)}, "input_lengths"),
        ({"temperature": np.array([[np.nan]], np.float32)}, "temperature"),
        ({"beam_width": np.array([[65]], np.uint32)}, "beam_width is out of range; got 65"),
        ({"num_log_probs": np.array([[21]], np.int32)}, "num_log_probs is out of range; got 21"),
        ({"logit_bias_ids": np.array([[3]], np.int32)}, "must come together"),
    ],
)
def test_a_wrong_request_has_its_own_error(
    client: Client, changes: dict[str, np.ndarray], reason: str, model: str
) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        client.infer(model, **{**ids_request([(1,)], 2), **changes})
    assert len(generated(client.infer(model, **ids_request([(1,)], 2)))) == 2


def test_text_through_the_ensemble(client: Client, engine: Engine, model: str) -> None:
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
    assert answer["OUTPUT_0"].shape == (2, 1, 1)
    for row, (text, output_len) in enumerate(zip(texts, (6, 4), strict=True)):
        prompt = tuple(tokenizer.encode(text))
        ids = expected(engine, prompt, output_len).output_ids
        assert text + answer["OUTPUT_0"][row, 0, 0].decode() == tokenizer.decode([*prompt, *ids])
        assert answer["OUTPUT_DELTA"][row, 0, 0] == answer["OUTPUT_0"][row, 0, 0]
        assert answer["sequence_length"][row, 0] == len(prompt) + len(ids)


def test_text_models_pass_penalties_and_biases_on(
    client: Client, engine: Engine, model: str
) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    text = "The quick brown fox"
    prompt = tuple(tokenizer.encode(text))
    penalty = np.array([[4.0]], np.float32)
    sampling = SamplingParameters(frequency_penalty=4.0)
    wanted = expected(engine, prompt, 8, sampling=sampling, logit_bias=((60, 6.0),)).output_ids
    assert wanted != expected(engine, prompt, 8).output_ids
    answer = client.infer(
        beside(model, "ensemble"),
        INPUT_0=text_rows(text),
        INPUT_1=np.array([[8]], np.uint32),
        frequency_penalty=penalty,
        logit_bias_ids=np.array([[60]], np.int32),
        logit_bias_values=np.array([[6.0]], np.float32),
    )
    assert text + answer["OUTPUT_0"][0, 0, 0].decode() == tokenizer.decode([*prompt, *wanted])
    wanted = expected(engine, prompt, 8, sampling=sampling).output_ids
    told = client.infer(
        beside(model, "text"),
        text_input=text_rows(text),
        max_tokens=np.array([[8]], np.int32),
        frequency_penalty=penalty,
    )
    assert text + told["text_output"][0].decode() == tokenizer.decode([*prompt, *wanted])


def test_beams_of_several_widths_in_one_request(client: Client, engine: Engine, model: str) -> None:
    sent = ids_request(PROMPTS[:3], 7, len_penalty=1.0, is_return_log_probs=True)
    widths = (4, 1, 2)
    sent["beam_width"] = np.array(widths, np.uint32)[:, None]
    answer = client.infer(model, **sent)
    assert answer["output_ids"].shape == (3, 4, 9 + 7)
    for row, (prompt, width) in enumerate(zip(PROMPTS[:3], widths, strict=True)):
        sampling = SamplingParameters(beam_width=width, len_penalty=1.0)
        wanted = expected(engine, prompt, 7, sampling=sampling, return_log_probs=True).hypotheses
        lengths = [len(prompt) + len(beam.output_ids) for beam in wanted] + [0] * (4 - width)
        assert answer["sequence_length"][row].tolist() == lengths
        for beam, hypothesis in enumerate(wanted):
            ids = answer["output_ids"][row, beam, : lengths[beam]].tolist()
            assert ids == [*prompt, *hypothesis.output_ids]
            total = answer["cum_log_probs"][row, beam]
            assert total == pytest.approx(hypothesis.cum_log_probs, abs=1e-4)
            per_token = answer["output_log_probs"][row, beam, : len(hypothesis.output_ids)]
            np.testing.assert_allclose(per_token, hypothesis.output_log_probs, atol=1e-4)


def test_the_widest_search(client: Client, engine: Engine, model: str) -> None:
    answer = client.infer(model, **ids_request([PROMPTS[0]], 4, beam_width=64))
    sampling = SamplingParameters(beam_width=64)
    wanted = expected(engine, PROMPTS[0], 4, sampling=sampling).beams
    ends = answer["sequence_length"][0]
    got = [ids[3:end].tolist() for ids, end in zip(answer["output_ids"][0], ends, strict=True)]
    assert got == [list(beam.output_ids) for beam in wanted]


def test_texts_of_every_beam_through_the_ensemble(
    client: Client, engine: Engine, model: str
) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    answer = client.infer(
        beside(model, "ensemble"),
        ["OUTPUT_0", "sequence_length"],
        INPUT_0=text_rows("Hello"),
        INPUT_1=np.array([[6]], np.uint32),
        beam_width=np.array([[3]], np.uint32),
    )
    prompt = tuple(tokenizer.encode("Hello"))
    beams = expected(engine, prompt, 6, sampling=SamplingParameters(beam_width=3)).beams
    assert answer["OUTPUT_0"].shape == (1, 3, 1)
    texts = [text.decode() for text in answer["OUTPUT_0"][0, :, 0]]
    whole = [tokenizer.decode([*prompt, *beam.output_ids]) for beam in beams]
    assert ["Hello" + text for text in texts] == whole
    assert len(set(texts)) == 3


def test_words_lists_are_each_rows_own(client: Client, engine: Engine, model: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    ids = tuple(tokenizer.encode("Hello"))
    first = expected(engine, ids, 6).output_ids[0]
    word = tokenizer.decode([first])
    assert tokenizer.encode(word) == [first]
    answer = client.infer(
        beside(model, "ensemble"),
        ["OUTPUT_0", "sequence_length"],
        INPUT_0=text_rows("Hello", "Hello", "Hello"),
        INPUT_1=np.full((3, 1), 6, np.uint32),
        INPUT_2=text_rows("", f"Rose,{word}", ""),
        INPUT_3=text_rows("", "", f"{word}"),
        is_return_prompt=np.array([[True], [True], [False]]),
    )
    texts = [text.decode() for text in answer["OUTPUT_0"][:, 0, 0]]
    banned = expected(engine, ids, 6, bad_words=(tuple(tokenizer.encode("Rose")), (first,)))
    assert texts[0] == "Hello" + tokenizer.decode(expected(engine, ids, 6).output_ids)
    assert texts[1] == "Hello" + tokenizer.decode(banned.output_ids)
    assert not texts[1].startswith("Hello" + word)
    assert answer["sequence_length"][2, 0] == len(ids) + 1


def test_an_empty_prompt_starts_with_the_start_token(
    client: Client, engine: Engine, model: str
) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    answer = client.infer(
        beside(model, "ensemble"),
        ["OUTPUT_0"],
        INPUT_0=text_rows(""),
        INPUT_1=np.array([[4]], np.uint32),
    )
    wanted = expected(engine, (END_ID,), 4).output_ids
    assert answer["OUTPUT_0"][0, 0, 0].decode() == tokenizer.decode(wanted)


def test_text_that_is_no_text(client: Client, model: str) -> None:
    query = np.array([[b"\xff\xfe"]], dtype=object)
    with pytest.raises(InferenceServerException, match="INPUT_0 is not UTF-8"):
        client.infer(beside(model, "ensemble"), INPUT_0=query, INPUT_1=np.array([[4]], np.uint32))
    two = text_rows("one", "two").reshape(1, 2)
    with pytest.raises(InferenceServerException, match="one text per row"):
        client.infer(beside(model, "ensemble"), INPUT_0=two, INPUT_1=np.array([[4]], np.uint32))


@pytest.mark.parametrize(
    "killed", [(1, 0), *(pytest.param((rank,), marks=pytest.mark.slow) for rank in (0, 1))]
)
def test_a_killed_rank_ends_everything_with_the_reason(
    tmp_path: Path, killed: tuple[int, ...]
) -> None:
    """The request on its way is answered with an error, and the job says who died first.

    Rank 1 dies of rank 0's death, so it may be the first that is seen. Rank 0 may have said that
    rank 1 is dead when it dies itself.
    """
    settings = export(tmp_path, text_config(max_positions=16384), tp=2, tokenizer=NO_TEXT)
    outcome: list[Any] = []

    def ask(ready: dict[str, Any]) -> None:
        try:
            with Client(ready, "http") as client:
                outcome.append(client.infer("tiny", **ids_request([(1, 2)], 16000)))
        except Exception as error:
            outcome.append(error)

    with running(tmp_path / "job", settings.model_repository) as step:
        ready = step.wait_until_ready()
        asking = threading.Thread(target=ask, args=(ready,))
        asking.start()
        wait_for(lambda: not outcome)
        pids = {facts["rank"]: facts["pid"] for facts in ready["ranks"]}
        for rank in killed:
            os.kill(pids[rank], signal.SIGKILL)
        assert step.wait() == 1, step.out
        asking.join(120)
        assert step.survivors() == []
        assert not step.settings.ready_file.exists()
        first = killed[0]
        assert str(pids[first]) in step.err or f"rank {first}" in step.err
        assert "Traceback" not in step.err
    assert isinstance(outcome[0], Exception), outcome


def test_an_altered_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    settings = export(tmp_path, tokenizer=NO_TEXT)
    weight = settings.checkpoint_dir / "model.wte.bin"
    content = bytearray(weight.read_bytes())
    content[100] ^= 1
    weight.write_bytes(content)
    with running(tmp_path / "job", settings.model_repository) as step:
        assert step.wait() == 1
        assert "model.wte.bin" in step.err
        assert step.survivors() == []
