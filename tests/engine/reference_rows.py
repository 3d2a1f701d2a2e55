"""What a row becomes, written plainly from FasterTransformer's rules: no cache, no batch.

Numbers are float64 and every token costs a whole forward pass. Where two choices are nearly equal
float32 may take the other one, so a row says how narrow its narrowest choice was.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.kernels.reference_sampling import uniforms

Text = tuple[int, ...]
LogitsAfter = Callable[[Text], torch.Tensor]
EPSILON = 1e-6  # added to the temperature


@dataclass(frozen=True)
class Expected:
    """Generated ids, their cumulative log-probability and those of each token among candidates."""

    ids: Text
    total: float
    per_token: tuple[float, ...]


def completes(text: Text, words: Sequence[Text], token: int) -> bool:
    """Whether `token` after `text` ends a word."""
    whole = (*text, token)
    return any(whole[-len(word) :] == word for word in words)


class Row:
    """A request whose prompt, start token included, is `prompt`."""

    def __init__(self, logits_after: LogitsAfter, prompt: Text, request: GenerateRequest) -> None:
        self._logits_after = logits_after
        self._prompt = prompt
        self._request = request
        self._narrowest = math.inf

    def expected(self) -> tuple[list[Expected], float]:
        """The hypotheses, best first, and the width of the narrowest choice."""
        searches = self._request.sampling.beam_width > 1
        found = self._search() if searches else [self._sample()]
        return found, self._narrowest

    def _ends(self, text: Text, token: int) -> bool:
        return token == self._request.end_id or completes(text, self._request.stop_words, token)

    def _scores(self, text: Text) -> torch.Tensor:
        """Logits after bias, penalties on every token there was and on those generated, and
        temperature; FasterTransformer's presence penalty comes last.
        """
        sampling = self._request.sampling
        scores = self._logits_after(text).double()
        for token, value in self._request.logit_bias:
            scores[token] += value
        for token in set(text):
            value, penalty = scores[token], sampling.repetition_penalty
            scores[token] = value * penalty if value < 0 else value / penalty
        for token, count in Counter(text[len(self._prompt) :]).items():
            scores[token] -= count * sampling.frequency_penalty + sampling.output_presence_penalty
        if sampling.temperature != 1:
            scores = scores / (sampling.temperature + EPSILON)
        for token in set(text):
            scores[token] -= sampling.presence_penalty
        return scores

    def _allowed(self, text: Text, scores: torch.Tensor) -> torch.Tensor:
        """-inf at bad words, at an early end and at n-grams that were there before."""
        sampling, generated = self._request.sampling, len(text) - len(self._prompt)
        n = sampling.no_repeat_ngram_size
        grams = {text[place : place + n] for place in range(len(text) - n + 1)} if n else set()
        for token in range(len(scores)):
            early = token == self._request.end_id and generated < sampling.min_length
            again = n > 0 and (*text, token)[-n:] in grams
            if early or again or completes(text, self._request.bad_words, token):
                scores[token] = -math.inf
        return scores

    def _sample(self) -> Expected:
        text, total, per_token = self._prompt, 0.0, []
        top_p = self._request.sampling.top_p
        for step in range(self._request.output_len):
            log_p = self._allowed(text, self._scores(text)).log_softmax(-1)
            token, candidates = self._choose(log_p, top_p, step)
            top_p = self._decayed(top_p, token)
            total += float(log_p[token])
            per_token.append(candidates)
            ends = self._ends(text, token)
            text = (*text, token)
            if ends:
                break
        return Expected(text[len(self._prompt) :], total, tuple(per_token))

    def _choose(self, log_p: torch.Tensor, top_p: float, step: int) -> tuple[int, float]:
        """A token by top-k (with top-p inside), top-p or neither, and its log p among those."""
        sampling = self._request.sampling
        ordered, ids = log_p.sort(descending=True, stable=True)
        if sampling.top_k == 1 or sampling.top_k == sampling.top_p == 0:
            self._note(float(ordered[0] - ordered[1]))
            return int(ids[0]), 0.0
        seed = sampling.random_seed
        seeds = torch.tensor([seed - (1 << 64) if seed >> 63 else seed])
        uniform = float(uniforms(seeds, torch.tensor([step])))
        kept = ordered[: sampling.top_k or len(ordered)].exp()
        if sampling.min_p and len(kept) > 1:
            self._note(float((kept[1:] / kept[0] - sampling.min_p).abs().min()))
        kept = kept[kept >= sampling.min_p * kept[0]]
        candidates = kept / kept.sum() if sampling.top_k else ordered.exp()
        kept = kept / kept.sum()
        running = kept.cumsum(0)
        mass = uniform * ((sampling.top_p or 1.0) if sampling.top_k else top_p)
        place = min(int((running < mass).sum()), len(kept) - 1)
        if not sampling.top_k and float(kept[0]) >= top_p:
            place = 0
        self._note(float((running - mass).abs().min()))
        return int(ids[place]), math.log(candidates[place])

    def _decayed(self, top_p: float, token: int) -> float:
        sampling = self._request.sampling
        if token == sampling.top_p_reset_id:
            return sampling.top_p
        return max(top_p * sampling.top_p_decay, sampling.top_p_min)

    def _search(self) -> list[Expected]:
        """Beam search as in transformers with early_stopping=True."""
        sampling, count = self._request.sampling, self._request.output_len
        width = sampling.beam_width
        running = [(0.0, False, Expected((), 0.0, ()))]
        ended: list[tuple[float, Expected]] = []
        for length in range(1, count + 1):
            norm = length**sampling.len_penalty
            candidates = [each for _, _, hypothesis in running for each in self._grown(hypothesis)]
            candidates.sort(key=lambda each: -each[0])
            for better, worse in itertools.pairwise(candidates[: 3 * width + 1]):
                self._note(better[0] - worse[0])
            for score, ends, hypothesis in candidates[:width]:
                if ends or length == count:
                    ended.append((score if ends else hypothesis.total / norm, hypothesis))
            ended = sorted(ended, key=lambda each: -each[0])[:width]
            if len(ended) == width:
                break
            running = [each for each in candidates if not each[1]][:width]
        return [hypothesis for _, hypothesis in ended]

    def _grown(self, hypothesis: Expected) -> list[tuple[float, bool, Expected]]:
        """Ranking, whether it ends, and the hypothesis with one more token.

        The 2 W likeliest tokens, and one more for every stop word's last; FasterTransformer's
        diversity is a bonus on the normalized score by the rank among these.
        """
        sampling, text = self._request.sampling, (*self._prompt, *hypothesis.ids)
        width = sampling.beam_width
        siblings = 2 * width + len({word[-1] for word in self._request.stop_words})
        norm = (len(hypothesis.ids) + 1) ** sampling.len_penalty
        log_p = self._allowed(text, self._scores(text).log_softmax(-1))
        values, ids = log_p.sort(descending=True, stable=True)
        grown = []
        for rank, (value, token) in enumerate(
            zip(values.tolist()[:siblings], ids.tolist(), strict=False)
        ):
            total = hypothesis.total + value
            score = total / norm + sampling.beam_search_diversity_rate * (rank % width)
            longer = Expected((*hypothesis.ids, token), total, (*hypothesis.per_token, value))
            if math.isfinite(value):
                grown.append((score, self._ends(text, token), longer))
        return grown

    def _note(self, width: float) -> None:
        self._narrowest = min(self._narrowest, width)
