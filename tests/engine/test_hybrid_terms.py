"""Each term of the formulas of today's families shows: without it the logits are others. Texts of
2,000 tokens do not drift, and weights in bytes stay near."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from launcher_scripts.checkpoint.fastertransformer.manifest import FILE_NAME
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.model.recurrent import ShortConv
from launcher_scripts.kernels import reference_recurrence
from launcher_scripts.kernels.reference_recurrence import DeltaOperands, Gating, gated
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import LATER_DECODERS
from tests.engine.test_hybrids import COMMON, FAMILIES, NO_END, check, made, text

Term = Callable[[Path, pytest.MonkeyPatch], None]
LENGTH = 60


def config(**fields: Any) -> Term:
    """Other hyperparameters; None: the key is left out."""

    def change(folder: Path, _patch: pytest.MonkeyPatch) -> None:
        file = folder / "config.ini"
        ini = file.read_text()
        for key, value in fields.items():
            line = "" if value is None else f"{key} = {value}\n"
            ini, count = re.subn(rf"(?m)^{key} = .*\n", line, ini)
            assert count == 1, key
        file.write_text(ini)

    return change


def tensor(name: str, value: float = 0.0) -> Term:
    """The same number everywhere in the tensors of this name."""

    def change(folder: Path, _patch: pytest.MonkeyPatch) -> None:
        files = [*folder.glob(f"model.layers.*.{name}.bin"), *folder.glob(f"*.{name}.0.bin")]
        assert files, name
        for file in files:
            values = np.fromfile(file, np.float32)
            np.full_like(values, value).tofile(file)

    return change


def code(owner: Any, name: str, value: Any) -> Term:
    """Another function in the place of one of the engine's."""
    return lambda _folder, patch: patch.setattr(owner, name, value)


def norm_first(y: Tensor, gate: Tensor, gating: Gating) -> Tensor:
    return gated(y, gate, replace(gating, gate_first=not gating.gate_first))


def without_decay(raw: Tensor, layer: DeltaOperands) -> Tensor:
    return torch.zeros(len(raw), *layer.step_bias.shape)


MAMBA: dict[str, Term] = {
    "skip": tensor("mamba.D"),
    "step bias": tensor("mamba.dt_bias"),
    "rates": tensor("mamba.A_log"),
    "softplus": code(reference_recurrence, "time_steps", lambda raw, _: raw.float().abs()),
    "gate": code(reference_recurrence, "gated", lambda y, *_: y),
    "chunks": code(reference_recurrence, "_decays", lambda full: _everything(full)),
}
DELTA: dict[str, Term] = {
    "lengths": code(reference_recurrence, "unit_vectors", lambda x: x),
    "gate": code(reference_recurrence, "gated", lambda y, *_: y),
    "decay": code(reference_recurrence, "logarithms", without_decay),
}
EXPERTS: dict[str, Term] = {
    "scores": config(router_score_function="softmax"),
    "bias": tensor("mlp.router.expert_bias"),
    "factor": config(router_scaling_factor=None),
    "shared": tensor("mlp.shared_expert.dense_4h_to_h.weight"),
}
LATENT: dict[str, Term] = {
    "latent norm": tensor("attention.kv_latent_norm.weight", 1.0),
    "scale": config(softmax_scale=None),
    "factors": config(rotary_scaling=None),
}
GATED: dict[str, Term] = {
    "output gate": tensor("attention.gate.weight"),
    "norm of queries": tensor("attention.query_norm.weight"),
    "zero-centered": config(zero_centered_norm=None),
    "part that turns": config(rotary_percentage=1.0),
    "delta norm": tensor("delta.norm.weight", 1.0),
    "step bias": tensor("delta.dt_bias"),
    "rates": tensor("delta.A_log"),
    **DELTA,
}
FALCON = {
    **{
        name: config(**{name: value})
        for name, value in (
            ("embedding_scale", None),
            ("logits_scale", None),
            ("query_key_value_scales", "1.1,1.1,1.1"),
            ("attention_output_scale", None),
            ("mamba_output_scale", None),
            ("mlp_gate_scale", None),
            ("mlp_output_scale", None),
            ("mamba_norm", "gated"),
        )
    },
    **{
        f"scale {part}": config(
            mamba_input_scales=",".join(
                str(1.25 * (1.0 if n == part else scale))
                for n, scale in enumerate((0.7, 0.5, 0.35, 0.9, 1.2))
            )
        )
        for part in range(5)
    },
}
TERMS: dict[str, dict[str, Term]] = {
    "nemotron_h": {
        **MAMBA,
        "conv bias": tensor("mamba.conv.bias"),
        "norm": tensor("mamba.norm.weight", 1.0),
        "norm behind the gate": code(reference_recurrence, "gated", norm_first),
        "squares": config(activation="relu"),
    },
    "nemotron_h latent": {
        **EXPERTS,
        "sum": config(normalized_experts=False),
        "biases": tensor("mamba.in_proj.bias"),
        "output biases": tensor("mamba.out_proj.bias"),
    },
    "bamba": {
        "shortest step": config(mamba_min_step=None),
        "longest step": config(mamba_max_step=None),
        "half that turns": config(rotary_percentage=1.0),
    },
    "falcon_h1": FALCON,
    "granitemoehybrid": {
        "embeddings": config(embedding_scale=None),
        "scores": config(softmax_scale=None),
        "logits": config(logits_scale=None),
        "mixers' norms": config(mixer_norm_eps=None),
        "rotation": config(position_embedding="none"),
    },
    "qwen3_next": {
        **GATED,
        "shared gate": tensor("mlp.shared_expert_gate.weight"),
        "sum": config(normalized_experts=False),
    },
    "kimi_linear": {
        **DELTA,
        "step bias": tensor("kimi_delta.dt_bias"),
        "rates": tensor("kimi_delta.A_log"),
        "norm": tensor("kimi_delta.norm.weight", 1.0),
        "gates": tensor("kimi_delta.gate_up.weight"),
        "groups": config(num_expert_groups=None, groups_per_token=None, group_score_experts=None),
        **{name: EXPERTS[name] for name in ("bias", "factor", "shared")},
    },
    "lfm2": {
        "conv bias": tensor("short_conv.conv.bias"),
        "biases": tensor("short_conv.in_proj.bias"),
        "norm of keys": tensor("attention.key_norm.weight", 1.0),
        "gates": code(
            ShortConv,
            "scan",
            lambda _self, projected, states, _count=None: (projected.chunk(3, 1)[2], states),
        ),
    },
    "deepseek_v3": {
        **LATENT,
        **EXPERTS,
        "query norm": tensor("attention.query_latent_norm.weight", 1.0),
        "attention factor": config(rotary_attention_factor=None),
        "groups": config(num_expert_groups=None, groups_per_token=None, group_score_experts=None),
        "biases": tensor("attention.kv_down.bias"),
    },
    "minicpm3": {
        "embeddings": config(embedding_scale=None),
        "logits": config(logits_scale=None),
    },
}


def _everything(full: Tensor) -> Tensor:
    """Decays of the tokens before and at one, none of them less for its distance."""
    return torch.ones(full.shape[1], len(full), len(full)).tril()


def model_of(name: str) -> PreTrainedModel:
    return made(name) if name in FAMILIES else LATER_DECODERS[name].make()


def context_logits(folder: Path, prompt: tuple[int, ...], **more: Any) -> Tensor:
    engine = Engine.load(EngineSettings(folder, device="cpu", max_batch_size=2, **more))
    try:
        request = GenerateRequest(prompt, 1, return_context_logits=True)
        return torch.as_tensor(engine.submit(request).result(120).context_logits)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMS)
def test_logits_are_others_without_a_term(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "hf")
    size = model.config.vocab_size
    prompt = tuple(token % (size - 3) for token in text(min(LENGTH, 25 if size < NO_END else 60)))
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    folder = export_folder(tmp_path / "hf", tmp_path, processes=1)
    (folder / FILE_NAME).unlink()  # its digests
    files = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    largest = float(expected.abs().max())
    assert float((context_logits(folder, prompt) - expected).abs().max()) <= 2e-4 * largest
    unseen = []
    for term, change in TERMS[name].items():
        with monkeypatch.context() as patch:
            change(folder, patch)
            difference = float((context_logits(folder, prompt) - expected).abs().max())
        unseen += [term] if difference <= 1e-3 * largest else []
        for file, content in files.items():
            file.write_bytes(content)
    assert not unseen


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_thousand_tokens_do_not_drift(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMON, "max_position_embeddings", 2100)
    model = made(name)
    model.save_pretrained(tmp_path / "hf")
    engine = Engine.load(
        EngineSettings(export_folder(tmp_path / "hf", tmp_path), device="cpu", max_batch_size=1)
    )
    try:
        prompt = text(9)
        answer = engine.submit(GenerateRequest(prompt, 2000, end_id=NO_END)).result(500)
    finally:
        engine.close()
    assert len(answer.output_ids) == 2000
    check(model, prompt, answer.output_ids)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_in_bytes_stay_near(name: str, quantization: Any, tmp_path: Path) -> None:
    """A router's choice may flip, so most of the positions count."""
    model = made(name)
    model.save_pretrained(tmp_path / "hf")
    prompt = text(40)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    folder = export_folder(tmp_path / "hf", tmp_path, processes=1)
    found = context_logits(folder, prompt, quantization=quantization)
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()
    assert 1e-5 < float(error) < (0.15 if quantization == "int8" else 0.35)
