"""Settings of a training that nothing reads: refused, noted, or known to change nothing."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.layout.source_checkpoint import Hints
from launcher_scripts.checkpoint.sources import nemo
from launcher_scripts.checkpoint.sources.core_options import (
    of_arguments,
    of_bridge,
    of_nemo2,
    read_core_gpt,
)
from launcher_scripts.checkpoint.sources.training_options import IRRELEVANT, TrainingOptions
from launcher_scripts.common.errors import CheckpointError, Problems
from tests.checkpoint.test_megatron_core import ARGUMENTS
from tests.checkpoint_maker import Variant, make_nemo, small_config

CORE = Path(__file__).parent.parent / "data" / "core"
GOLDEN = Path(__file__).parent.parent / "data" / "golden"
# The fields of core 0.16.1's TransformerConfig and their defaults.
FIELDS = json.loads((CORE / "transformer_config.json").read_text())
# What NeMo 1.23's launcher had in a model_config.yaml.
NEMO = json.loads((CORE.parent / "nemo_mcore_gpt_layout.json").read_text())["config"]
SIZES = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "activation_func": "gelu",
    "max_position_embeddings": 16,
}
STORED = [
    *sorted(folder / "checkpoint" for folder in CORE.iterdir() if folder.is_dir()),
    *sorted(GOLDEN.glob("nemo_*/m.nemo")),
    GOLDEN / "megatron_v3_tp1_to2" / "ck",
]


def notes(options: Any) -> tuple[str, ...]:
    read_core_gpt(options)
    return options.check_keys()


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}")
def test_what_the_tools_write_leaves_nothing_to_say(path: Path, tmp_path: Path) -> None:
    found = open_source(Archive(path, scratch=tmp_path), hints=Hints())
    assert not any("nothing reads" in note for note in found.notes)


@pytest.mark.parametrize("of", [of_arguments, of_bridge, of_nemo2])
def test_the_defaults_of_cores_configuration_leave_nothing_to_say(of: Any) -> None:
    assert notes(of(FIELDS | SIZES, "the training")) == ()


def test_the_configuration_of_a_nemo_training_leaves_nothing_to_say() -> None:
    options = TrainingOptions(NEMO, Problems("model_config.yaml"))
    nemo.read_nemo_gpt(options, core=True, local_norms=False)
    assert options.check_keys() == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("foo_multiplier", 2.0),
        ("sliding_window_size", 4096),
        ("query_pre_attn_scalar", 224),
        ("attention_sink_tokens", 4),
        ("use_mup", True),
        ("spec", ["mamba", "stack"]),
    ],
)
@pytest.mark.parametrize("of", [of_arguments, of_bridge, of_nemo2])
def test_what_changes_the_network_is_refused(of: Any, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is not (known here|supported); got"):
        notes(of({**FIELDS, **SIZES, key: value}, "the training"))


def test_all_of_them_are_one_error() -> None:
    said = {**ARGUMENTS, "foo_multiplier": 2, "bar_softcap": 3}
    with pytest.raises(CheckpointError, match="2 problems in the training"):
        notes(of_arguments(said, "the training"))


def test_what_may_change_the_network_is_noted() -> None:
    said = {"rotary_foo": 3, "attention_bar": "x", "norm_off": False, "embed_none": None}
    (note,) = notes(of_arguments(ARGUMENTS | said | {"lr_foo": 1.0}, "the training"))
    assert note == "the training: nothing reads rotary_foo=3, attention_bar='x'"


@pytest.mark.parametrize("key", ["attn_softcap", "logits_multiplier"])
def test_nemo_1_is_looked_at_too(tmp_path: Path, key: str) -> None:
    make_nemo(tmp_path / "s.nemo", small_config(), Variant(raw={key: 30.0}))
    with pytest.raises(CheckpointError, match=f"{key} is not known here; got 30.0"):
        open_source(Archive(tmp_path / "s.nemo", scratch=tmp_path), hints=Hints())


def test_the_table_has_no_stale_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {*FIELDS, *NEMO, "mhc_sinkhorn_iterations"}  # the last one of core 0.20

    check_keys = TrainingOptions.check_keys

    def recording(options: TrainingOptions) -> tuple[str, ...]:
        known.update(options.raw)
        return check_keys(options)

    monkeypatch.setattr(TrainingOptions, "check_keys", recording)
    for path in STORED:
        open_source(Archive(path, scratch=tmp_path), hints=Hints())
    patterns = [pattern for keys in IRRELEVANT.values() for pattern in keys]
    assert len(patterns) == len(set(patterns))
    stale = [each for each in patterns if not any(fnmatchcase(key, each) for key in known)]
    assert not stale, stale
