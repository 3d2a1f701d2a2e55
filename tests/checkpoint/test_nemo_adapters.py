"""Adapters that NeMo wrote: its own logits, and the bytes of the original converters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint import reference_forward_gpt, reference_forward_t5
from tests.checkpoint.exporting import export_folder, open_weights
from tests.checkpoint.golden_cases import differing_keys, digests, found_digests

TOLERANCE = 2e-4
PROMPT, IA3, ADAPTER = "prompt_checkpoints", "ia3_checkpoints", "adapter_checkpoints"
FIXTURES = {
    "gpt_ptuning_mlp_nemo1.18.1": PROMPT,
    "gpt_ptuning_lstm_nemo1.18.1": PROMPT,
    "gpt_ia3_nemo1.18.1": IA3,
    "gpt_adapter_linear_nemo1.18.1": ADAPTER,
    "t5_ptuning_mlp_nemo1.18.1": PROMPT,
    "t5_ia3_nemo1.18.1": IA3,
    "t5_adapter_parallel_nemo1.18.1": ADAPTER,
    "peft_gpt_lora_nemo1.23.0": ADAPTER,
    "peft_t5_lora_nemo1.23.0": ADAPTER,
}
IDS = TokenizerSettings("none", start_id=60, end_id=61, pad_id=62)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", FIXTURES)
def test_nemos_own_logits(name: str, tp_size: int, shared_dir: Path, tmp_path: Path) -> None:
    check_logits(name, shared_dir / "fixtures" / "nemo", tmp_path, tp_size)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", [name for name, key in FIXTURES.items() if key == IA3])
def test_folded_ia3(name: str, tp_size: int, shared_dir: Path, tmp_path: Path) -> None:
    config = check_logits(
        name, shared_dir / "fixtures" / "nemo", tmp_path, tp_size, ia3_in_place=True
    )
    assert config.parts.ia3_adapted
    assert not config.parts.names


def check_logits(name: str, nemo: Path, target: Path, tp_size: int, **more: Any) -> Any:
    base = json.loads((nemo / name / "MANIFEST.json").read_text())["base_model_fixture"]
    parts = {FIXTURES[name]: (str(nemo / name / "model.nemo"),)}
    folder = export_folder(nemo / base / "model.nemo", target, tp_size, **parts, **more)
    weights, config = open_weights(folder)
    with np.load(nemo / name / "reference.npz") as file:
        expected = {key: torch.from_numpy(file[key]) for key in file.files}
    options: dict[str, Any] = {}
    first = "tokens" if "tokens" in expected else "encoder_tokens"
    if FIXTURES[name] == PROMPT:
        options, first = {"prompt": "demo"}, "full_tokens"
        length = config.parts.prompt_tasks[0].length
        # NeMo's ids of virtual tokens follow its tokenizer's, ours the whole vocabulary.
        expected[first][:, :length] = config.parts.prompt_start_id + torch.arange(length)
    if FIXTURES[name] == IA3 and not more:
        options = {"ia3": 0}
    inputs = [expected[key].long() for key in (first, "decoder_tokens") if key in expected]
    forward = reference_forward_t5 if len(inputs) == 2 else reference_forward_gpt
    found = forward.logits(weights, config, *inputs, **options)
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=TOLERANCE)
    return config


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("nemo_t5_prompt_to1", {PROMPT: ("p.nemo",)}),
        ("nemo_t5_ia3_to1", {IA3: ("ia30.nemo",)}),
        ("ia3sq_2tasks", {IA3: ("ia30.nemo", "ia31.nemo")}),
    ],
)
def test_the_originals_bytes(
    case: str, parts: dict[str, tuple[str, ...]], shared_dir: Path, tmp_path: Path
) -> None:
    golden = shared_dir / "golden" / case
    named = {
        key: tuple(str(golden / "input" / name) for name in names) for key, names in parts.items()
    }
    folder = export_folder(golden / "input" / "m.nemo", tmp_path, tokenizer=IDS, **named)
    assert found_digests(folder) == digests(golden)
    assert differing_keys(golden, folder) == {}
    theirs, ours = ((place / "config.ini").read_text() for place in (golden, folder))
    for line in theirs.splitlines():
        if line.startswith(("num_tasks", "prompt_", "task_name", "[task_", "ia3_")):
            assert line in ours.splitlines()


def test_several_ia3_tasks_where_the_original_fails(shared_dir: Path, tmp_path: Path) -> None:
    """Two ranks, and heads that together are wider than the model."""
    golden = shared_dir / "golden" / "nemo_t5_ia3_to1" / "input"
    vectors = (str(golden / "ia30.nemo"),) * 2
    export = export_folder(golden / "m.nemo", tmp_path, 2, tokenizer=IDS, ia3_checkpoints=vectors)
    checkpoint = FTCheckpoint.open(export)
    weights, config = open_weights(export)
    assert config.inner_size != config.hidden_size
    assert checkpoint.config.parts.ia3_num_tasks == 2
    both = weights["decoder.block.1.layer.1.EncDecAttention.k.ia3.weight"]
    assert both.shape == (2, config.inner_size)
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)


def test_unused_lora_is_told(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_logits("peft_t5_lora_nemo1.23.0", shared_dir / "fixtures" / "nemo", tmp_path, 1)
    assert "cross-attention" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["peft_gpt_lora_nemo1.23.0", "peft_t5_lora_nemo1.23.0"])
def test_an_adapter_is_no_model(name: str, shared_dir: Path, tmp_path: Path) -> None:
    path = shared_dir / "fixtures" / "nemo" / name / "model.nemo"
    with pytest.raises(CheckpointError, match="is a prompt or an adapter, not a model: name it in"):
        export_folder(path, tmp_path)
