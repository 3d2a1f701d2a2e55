"""Draft heads propose what plain arithmetic makes of hidden states, and change no token.

The formulas are those of DeepSeek-V3's report (arXiv:2412.19437) and of EAGLE-3 (arXiv:2503.01840).
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import STEPS_AHEAD, EngineSettings
from launcher_scripts.engine.messages.plan import Plan, Proposal
from launcher_scripts.engine.runner.drafts import DraftModel
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS, open_checkpoints
from launcher_scripts.models.draft_heads import IDS, check_draft_model, hidden_state_layers
from launcher_scripts.models.gpt import GPTConfig
from tests.engine.small_models import (
    LATENT,
    LLAMA,
    EagerGraphs,
    engine_for,
    load_engine,
    random_tensors,
    small_config,
    write_checkpoint,
)
from tests.engine.test_draft_model import no_lookup
from tests.engine.test_drafts import accepted, check_same, tried
from tests.engine.test_growing_rows import preemptions
from tests.engine.test_prefix_cache import text

__all__ = ["no_lookup"]
Tensors = dict[str, np.ndarray]
Ids = tuple[int, ...]
SIZES = {"end_id": 67, "max_positions": 400}
CONFIG = small_config(**SIZES, **LLAMA, num_layers=6)
TENSORS = random_tensors(CONFIG)
MTP = small_config(**SIZES, **LLAMA, num_layers=1, draft_head="mtp")
EAGLE3 = replace(MTP, draft_head="eagle3", draft_vocab_size=40)


def head_tensors(config: GPTConfig) -> Tensors:
    """Random ones; an EAGLE-3's vocabulary is some of the model's."""
    tensors = random_tensors(config, 3)
    if IDS in tensors:
        ids = np.sort(np.random.default_rng(1).permutation(67)[:40])
        tensors[IDS] = np.stack([ids >> 16, ids >> 8 & 255, ids & 255]).astype(np.float32)
    return tensors


HEADS = {"mtp": (MTP, head_tensors(MTP)), "eagle3": (EAGLE3, head_tensors(EAGLE3))}


class Reference:
    """A Llama and a head in plain torch, whole sequences at a time."""

    def __init__(self, head: GPTConfig, tensors: Tensors) -> None:
        self.head = head
        self.model = {name: torch.from_numpy(values) for name, values in TENSORS.items()}
        self.tensors = {name: torch.from_numpy(values) for name, values in tensors.items()}

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.norm_eps) * weight

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        speeds = CONFIG.rotary_base ** -(torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None, None] * speeds
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def layer(self, of: dict[str, Tensor], n: int, x: Tensor, read: Tensor | None) -> Tensor:
        """x [T, hidden] after layer n.  read: input of its attention, if it is not x normalized"""
        weights = {
            name.removeprefix(f"layers.{n}."): values
            for name, values in of.items()
            if name.startswith(f"layers.{n}.")
        }
        if read is None:
            read = self.norm(x, weights["input_layernorm.weight"])
        qkv = (read @ weights["attention.query_key_value.weight"]).view(len(x), -1, 8)
        query, key, value = qkv.split([4, 2, 2], 1)
        query, key = self.rotated(query), self.rotated(key)
        key, value = (heads.repeat_interleave(2, 1) for heads in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * 8**-0.5
        scores += torch.full((len(x), len(x)), -torch.inf).triu(1)
        inner = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = x + inner @ weights["attention.dense.weight"]
        read = self.norm(x, weights["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(read @ weights["mlp.dense_h_to_4h.weight"])
        return (
            x
            + (gate * (read @ weights["mlp.dense_h_to_4h_2.weight"]))
            @ (weights["mlp.dense_4h_to_h.weight"])
        )

    def features(self, ids: Ids) -> Tensor:
        """Hidden states of the model that the head reads."""
        x, inputs = self.model["wte"][[*ids]], []
        for n in range(CONFIG.num_layers):
            inputs.append(x)
            x = self.layer(self.model, n, x, None)
        if self.head.draft_head == "mtp":
            return self.norm(x, self.model["final_layernorm.weight"])
        joined = torch.cat([inputs[n] for n in hidden_state_layers(CONFIG.num_layers)], -1)
        return joined @ self.tensors["draft.input.weight"]

    def output(self, ids: Ids, features: Tensor) -> Tensor:
        """Hidden states of the head after the tokens of which it reads these features."""
        own, embedded = self.tensors, self.model["wte"][[*ids]]
        hidden = self.norm(features, own["draft.hidden_norm.weight"])
        if self.head.draft_head == "mtp":
            embedded = self.norm(embedded, own["draft.embedding_norm.weight"])
            x = torch.cat([embedded, hidden], -1) @ own["draft.input.weight"]
            return self.layer(own, 0, x, None)
        embedded = self.norm(embedded, own["layers.0.input_layernorm.weight"])
        return self.layer(own, 0, features, torch.cat([embedded, hidden], -1))

    def proposals(self, ids: Ids, count: int) -> list[int]:
        """Tokens after `ids`, of which the model has seen all but the last."""
        features, result = self.features(ids[:-1]), []
        for _ in range(count):
            outputs = self.output((*ids[1:], *result), features)
            final = self.norm(outputs[-1], self.tensors["final_layernorm.weight"])
            if self.head.draft_head == "mtp":
                token = int((self.model["lm_head.weight"] @ final).argmax())
            else:
                digits = self.tensors[IDS].long()
                index = int((self.tensors["lm_head.weight"] @ final).argmax())
                token = int(digits[1, index] * 256 + digits[2, index])
            result.append(token)
            features = torch.cat([features, outputs[-1:]])
        return result


Noted = list[tuple[tuple[Proposal, ...], dict[int, int], Tensor | None]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What the head has proposed, and the seeds of the rows by their slots."""
    result: Noted = []
    propose = DraftModel.propose

    def noting(self: DraftModel, plan: Plan, rows: dict) -> Tensor | None:
        tokens = propose(self, plan, rows)
        pending = tuple(proposal for proposal in plan.proposals if proposal.count)
        if pending:
            seeds = {slot: rows[slot].request.sampling.random_seed for slot in rows}
            result.append((pending, seeds, tokens))
        return tokens

    monkeypatch.setattr(DraftModel, "propose", noting)
    return result


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("tokens", "caching", "budget", "ahead"),
    [(2000, False, 2048, 0), (170, True, 25, 1)],
    ids=["alone", "moved, prefixes, parts"],
)
def test_proposals_are_those_of_the_formulas(
    monkeypatch: pytest.MonkeyPatch,
    noted: Noted,
    kind: str,
    tokens: int,
    caching: bool,
    budget: int,
    ahead: int,
) -> None:
    """Wherever a row begins, moves to, or is computed again; all features are the model's."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", ahead)
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", budget)
    draw, stem = random.Random(tokens), text(33, 5)
    options = {"max_tokens": tokens, "max_batch_size": 8, "enable_prefix_caching": caching}
    engine = engine_for(CONFIG, TENSORS, draft=HEADS[kind], **options)
    requests = [
        GenerateRequest(
            (*draw.choice(((), stem)), *text(draw.randrange(1, 20), draw.random())),
            draw.randrange(8, 30),
            SamplingParameters(random_seed=seed),
            num_speculative_tokens=draw.choice((1, 3, 5)),
        )
        for seed in range(8)
    ]
    futures = [engine.submit(request) for request in requests]
    texts = [
        (*request.input_ids, *future.result(60).output_ids)
        for request, future in zip(requests, futures, strict=True)
    ]
    assert bool(preemptions(engine)) == (tokens == 170)
    engine.close()
    reference, count = Reference(*HEADS[kind]), 0
    for pending, seeds, proposed in noted[:: 1 + len(noted) // 40]:
        assert proposed is not None
        for proposal, row in zip(pending, proposed.tolist(), strict=True):
            ids = texts[seeds[proposal.slot]][: proposal.past + len(proposal.ids)]
            assert row[: proposal.count] == reference.proposals(ids, proposal.count)
            count += 1
    assert count > 20


@pytest.mark.parametrize("kind", HEADS)
def test_answers_are_those_without_a_head(kind: str) -> None:
    plain = engine_for(CONFIG, TENSORS)
    check_same(plain, engine_for(CONFIG, TENSORS, max_batch_size=9, draft=HEADS[kind]), 3, lower=-1)


def test_answers_are_the_same_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    plain = engine_for(CONFIG, TENSORS)
    options = {"graphs": EagerGraphs(), "max_batch_size": 9, "enable_prefix_caching": True}
    check_same(plain, engine_for(CONFIG, TENSORS, draft=HEADS["eagle3"], **options), 4, lower=-1)


def test_a_head_of_latent_attention_and_experts() -> None:
    """As of DeepSeek-V3."""
    experts = {"num_experts": 4, "experts_per_token": 2}
    config = small_config(**SIZES, **LATENT, **experts)
    head = replace(config, num_layers=1, draft_head="mtp")
    tensors = random_tensors(config)
    drafting = engine_for(config, tensors, max_batch_size=9, draft=(head, random_tensors(head, 2)))
    check_same(engine_for(config, tensors), drafting, 6, lower=-1)


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize("kind", [pytest.param("mtp", marks=pytest.mark.slow), "eagle3"])
def test_ranks_propose_the_same(tmp_path: Path, noted: Noted, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "draft", *HEADS[kind], 2)
    single = engine_for(CONFIG, TENSORS, draft=HEADS[kind])
    ranks = load_engine(tmp_path, CONFIG, TENSORS, 2, 1, draft_checkpoint_dir=folder)
    results = []
    for engine in (single, ranks):
        noted.clear()
        request = GenerateRequest(text(9, 4), 30, num_speculative_tokens=4)
        output = engine.submit(request).result(60).output_ids
        results.append((output, [proposed.tolist() for *_, proposed in noted]))
        engine.close()
    assert results[0] == results[1]
    assert len(results[0][1]) > 5


def test_a_head_that_foretells_everything_saves_the_steps() -> None:
    """A head whose layer adds nothing gives the token that the model gives after the same one."""
    model = {name: np.zeros_like(x) if ".dense" in name else x for name, x in TENSORS.items()}
    model["lm_head.weight"] = np.roll(model["wte"], 1, 0) * 9  # token n is followed by n + 1
    head = {
        name: np.zeros_like(x) if ".dense" in name else x for name, x in HEADS["mtp"][1].items()
    }
    head["draft.input.weight"][:] = np.eye(64, 32)
    for name in ("draft.embedding_norm.weight", "final_layernorm.weight"):
        head[name][:] = model["final_layernorm.weight"][:] = 1
    engine = engine_for(CONFIG, model, draft=(MTP, head))
    engine.submit(GenerateRequest((3,), 51, num_speculative_tokens=4)).result(60)
    assert accepted(engine) == tried(engine) == 40
    engine.close()


@pytest.mark.parametrize(
    ("head", "model", "message"),
    [
        ({"hidden_size": 16}, {}, "another width than the model's; got 16; .*32"),
        ({"vocab_size": 66, "end_id": 5}, {}, "another vocabulary than the model"),
        ({}, {"num_layers": 3}, "three layers; got 'a model of 3 layers'; .*at least 4"),
        ({}, {"position_embedding": "learned"}, "rotary positions"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    head: dict[str, object], model: dict[str, object], message: str
) -> None:
    problems = Problems("it")
    both = replace(EAGLE3, **head), replace(CONFIG, **model)
    check_draft_model(problems, both[0], 1, both[1], Parallelism(), "here")
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        problems.raise_if_any(ConfigError)


def test_a_head_generates_nothing_by_itself(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "1-gpu", *HEADS["mtp"], 1)
    with pytest.raises(ConfigError, match="a draft head generates no text by itself"):
        open_checkpoints(EngineSettings(folder, device="cpu"), verify=False)
    problems = Problems("it")
    check_draft_model(problems, MTP, 1, CONFIG, Parallelism(1, 2), "here")
    with pytest.raises(ConfigError, match="pipeline stages divide; got '2 stages'"):
        problems.raise_if_any(ConfigError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_head": "medusa"}, "draft_head.*medusa.*mtp"),
        ({"num_layers": 2}, "a draft head has one layer; got 2"),
        ({"draft_vocab_size": 9}, "draft_vocab_size is of EAGLE-3"),
        ({"draft_head": None, "draft_vocab_size": 9}, "draft_vocab_size needs draft_head"),
    ],
)
def test_sizes_of_heads_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        replace(MTP, **changes)
