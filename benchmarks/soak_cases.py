"""The requests of the soak: of every kind some, each with a way to ask and to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.contract_tensors import request_tensors, row_outputs
from launcher_scripts.clients.remote import RemoteServer, ServerModels
from launcher_scripts.common.errors import ServerError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters

WORDS = ("The house", "In the new", "Grüße, Rose", "a b c d e", "It was", "")


@dataclass(frozen=True)
class Case:
    """One request. `name` tells it from the others; `ask` gives what must be the same every time.

    kind:   a key of KINDS
    stops:  how many responses are awaited before the request is cancelled; None: all
    """

    name: str
    kind: str
    models: ServerModels
    rows: tuple[GenerateRequest, ...] = ()
    tensors: Tensors | None = None
    stops: int | None = None

    def ask(self, server: RemoteServer) -> Any:
        """The answer, as plain values: ids of every row, text, or the server's refusal."""
        return KINDS[self.kind].ask(self, server)

    def agrees(self, answer: Any, full: Any) -> bool:
        """Whether an answer is the right one. whole: that of the request which nobody cancels."""
        if self.stops is None or not isinstance(answer, list):
            return bool(answer == full)
        pairs = zip(answer, full, strict=True)
        return all(ids == wanted[: len(ids)] for ids, wanted in pairs)

    def request(self) -> Tensors:
        if self.tensors is not None:
            return self.tensors
        return request_tensors(self.rows, self.models.model_type)


@dataclass(frozen=True)
class Kind:
    """make: cases of a model from a random stream; streams: whether it needs a decoupled model."""

    make: Callable[[ServerModels, np.random.Generator, int], Iterator[Case]]
    ask: Callable[[Case, RemoteServer], Any]
    streams: bool | None = None


def make_cases(models: Sequence[ServerModels], vocab_size: int, each: int) -> list[Case]:
    """`each` cases of every kind that a model can answer, for every model; always the same."""
    cases = []
    for model in models:
        for name, kind in KINDS.items():
            if kind.streams not in (None, model.decoupled):
                continue
            random = np.random.default_rng([len(cases), vocab_size])
            made = kind.make(model, random, vocab_size)
            for number in range(each):
                case = next(made)
                label = f"{model.name} {name} {number}"
                cases.append(replace(case, name=label, kind=name))
    return cases


def _row(random: np.random.Generator, vocab: int, **sampling: Any) -> GenerateRequest:
    ids = random.integers(0, vocab, random.integers(1, 20))
    count = int(random.integers(1, 24))
    return GenerateRequest(tuple(map(int, ids)), count, SamplingParameters(**sampling))


def _plain(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        yield Case("", "", models, (_row(random, vocab),))


def _sampled(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        rows = [
            _row(
                random,
                vocab,
                top_k=int(random.integers(2, 50)),
                top_p=float(random.choice([0.0, 0.9])),
                temperature=float(random.choice([0.7, 1.5])),
                random_seed=int(random.integers(1, 2**40)),
                repetition_penalty=float(random.choice([1.0, 1.2])),
            )
            for _ in range(int(random.integers(1, 5)))
        ]
        yield Case("", "", models, tuple(rows))


def _beams(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        width = int(random.integers(2, 5))
        yield Case("", "", models, (_row(random, vocab, beam_width=width, len_penalty=0.6),))


def _words(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        bad = tuple((int(word),) for word in random.integers(0, vocab, 4))
        stop = ((int(random.integers(0, vocab)), int(random.integers(0, vocab))),)
        row = replace(_row(random, vocab), bad_words=bad, stop_words=stop)
        yield Case("", "", models, (row,))


def _guided(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        grammar = f'{{"regex": "[a-z ]{{1,{int(random.integers(4, 40))}}}"}}'
        row = replace(_row(random, vocab), guided_grammar=grammar)
        yield Case("", "", models, (row,))


def _scored(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        count = int(random.integers(0, 10))
        row = replace(_row(random, vocab), num_log_probs=count, num_prompt_log_probs=count)
        yield Case("", "", models, (row,))


def _cancelled(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    while True:
        row = replace(_row(random, vocab, min_length=24), output_len=24)
        yield Case("", "", models, (row,), stops=int(random.integers(1, 8)))


def _bad(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:
    """Requests that must be refused, one after another in a circle."""
    while True:
        row = _row(random, vocab)
        good = request_tensors([row], models.model_type)
        output_len = next(name for name in good if name.endswith("output_len"))
        lengths = next(name for name in good if name in ("input_lengths", "sequence_length"))
        for changes in (
            {"input_ids": np.full_like(good["input_ids"], vocab)},
            {lengths: np.array([[4000]], np.uint32)},
            {output_len: np.array([[2**31]], np.uint32)},
            {"temperature": np.array([[np.nan]], np.float32)},
            {"beam_width": np.array([[100]], np.uint32)},
            {"stop_words_list": np.array([[[1, 2], [9, 1]]], np.int32)},
        ):
            yield Case("", "", models, tensors={**good, **changes})


def _text(models: ServerModels, random: np.random.Generator, vocab: int) -> Iterator[Case]:  # noqa: ARG001
    while True:
        text = str(random.choice(WORDS)).encode()
        tensors = {
            "INPUT_0": np.array([[text]], dtype=np.object_),
            "INPUT_1": np.array([[int(random.integers(1, 16))]], np.uint32),
            "INPUT_2": np.array([[b"Rose, house"]], dtype=np.object_),
        }
        yield Case("", "", models, tensors=tensors)


def _ask_ids(case: Case, server: RemoteServer) -> list[list[int]]:
    """Every row's ids."""
    return _ids(case, server.infer(case.models.name, case.request()))


def _ask_refused(case: Case, server: RemoteServer) -> str:
    """What the server says against the request; raises ServerError when it says nothing."""
    try:
        server.infer(case.models.name, case.request())
    except ServerError as error:
        if " refused " in str(error):
            return str(error).partition(": ")[2]
        raise
    raise ServerError(f"{case.name}: the server answers a wrong request")


def _ask_text(case: Case, server: RemoteServer) -> str:
    ensemble = case.models.text_model("ensemble")
    answer = server.infer(ensemble, case.request())
    return str(answer["OUTPUT_0"].ravel()[0].decode("utf-8"))


def _ask_stream(case: Case, server: RemoteServer) -> list[list[int]]:
    """Every row's ids in the last response; of a request that is cancelled in the one before.

    Raises ServerError for a response that does not go on where the one before has ended.
    """
    responses = server.stream(case.models.name, case.request())
    ids: list[list[int]] = [[] for _ in case.rows]
    for count, response in enumerate(responses, 1):
        before, ids = ids, _ids(case, response)
        grown = [len(old) <= len(new) for old, new in zip(before, ids, strict=True)]
        alike = [new[: len(old)] == old for old, new in zip(before, ids, strict=True)]
        if case.kind != "stream of beams" and not (all(grown) and all(alike)):
            raise ServerError(f"{case.name}: {before} is followed by {ids}")
        if count == case.stops:
            responses.close()
            break
    return ids


def _ids(case: Case, answer: Tensors) -> list[list[int]]:
    return [list(output.output_ids) for output in row_outputs(case.rows, answer)]


KINDS = {
    "greedy": Kind(_plain, _ask_ids, streams=False),
    "sampled": Kind(_sampled, _ask_ids, streams=False),
    "beams": Kind(_beams, _ask_ids, streams=False),
    "words": Kind(_words, _ask_ids, streams=False),
    "guided": Kind(_guided, _ask_ids, streams=False),
    "scored": Kind(_scored, _ask_ids, streams=False),
    "stream": Kind(_sampled, _ask_stream, streams=True),
    "stream of beams": Kind(_beams, _ask_stream, streams=True),
    "stream with grammar": Kind(_guided, _ask_stream, streams=True),
    "stream with scores": Kind(_scored, _ask_stream, streams=True),
    "cancelled": Kind(_cancelled, _ask_stream, streams=True),
    "bad": Kind(_bad, _ask_refused),
    "text": Kind(_text, _ask_text),
}
