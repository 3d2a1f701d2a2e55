"""Megatron-LM's files of runs with virtual pipeline stages, and with uneven ones."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.exporting import export_folder, refused_export, weight_bytes
from tests.checkpoint.megatron_maker import Maker

FIXTURE = "core/mcore012_torchfmt_llama_tp2_a/checkpoint/iter_0000003"
FILE = "model_optim_rng.pt"
# What Megatron-LM core's get_num_layers_to_build and get_transformer_layer_offset say:
# (arguments of the training, layers of every chunk of every stage).
CUTS = {
    "two_chunks": ({}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    "four_chunks": ({}, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
    "first_stage": ({"decoder_first_pipeline_num_layers": 2}, [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]),
    "both_ends": (
        {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2},
        [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]],
    ),
    "accounted_ends": (
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": 1},
        [[[0], [3, 4]], [[1, 2], [5]]],
    ),
    "embedding_alone": ({"account_for_embedding_in_pipeline_split": True}, [[[], [1]], [[0], [2]]]),
    "plain_uneven": ({"decoder_first_pipeline_num_layers": 3}, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
}


class _Inert:
    """Stands for an object of Megatron-LM."""

    def __init__(self, *_: Any) -> None:
        pass


class _WithoutMegatron:
    """torch.load's pickle module for files that name classes of Megatron-LM."""

    load = pickle.load

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return _Inert if module.startswith("megatron") else super().find_class(module, name)


def whole_ranks(data_dir: Path, layers: int) -> list[dict[str, Any]]:
    """The fixture's two tensor-parallel ranks, with more layers of its first one's shapes."""
    torch.manual_seed(5)
    ranks = []
    for rank in range(2):
        path = data_dir / FIXTURE / f"mp_rank_{rank:02d}" / FILE
        loaded = torch.load(path, weights_only=False, pickle_module=_WithoutMegatron)
        said = {name: value for name, value in vars(loaded["args"]).items() if _is_plain(value)}
        state, stem = loaded["model"], "decoder.layers.0."
        model = {name: value for name, value in state.items() if ".layers." not in name}
        for number in range(layers):
            for name, value in _named(state, stem).items():
                if value is not None:
                    value = torch.full_like(value, 10 * number + (0 if "norm" in name else rank))
                model[name.replace(stem, f"decoder.layers.{number}.")] = value
        args = argparse.Namespace(**(said | {"num_layers": layers}))
        ranks.append({"args": args, "checkpoint_version": 3.0, "model": model})
    return ranks


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, list, type(None)))


def save(folder: Path, rank: str, content: dict[str, Any]) -> None:
    (folder / rank).mkdir(parents=True)
    torch.save(content, folder / rank / FILE)


def cut(folder: Path, ranks: list[dict[str, Any]], said: dict, stages: list) -> Path:
    """Write the ranks in stages and chunks, as --ckpt-format torch does."""
    for tp, loaded in enumerate(ranks):
        for key, value in said.items():
            setattr(loaded["args"], key, value)
        chunked = len(stages[0]) > 1
        virtual = len(stages[0]) if chunked else None
        loaded["args"].virtual_pipeline_model_parallel_size = virtual
        for pp, chunks in enumerate(stages):
            content = {name: value for name, value in loaded.items() if name != "model"}
            for number, layers in enumerate(chunks):
                model = _chunk(loaded["model"], layers)
                if (pp, number) == (0, 0):
                    model |= _named(loaded["model"], "embedding.")
                if (pp, number) == (len(stages) - 1, len(chunks) - 1):
                    model |= _named(loaded["model"], "decoder.final", "output_layer")
                content[f"model{number}" if chunked else "model"] = model
            save(folder, f"mp_rank_{tp:02d}_{pp:03d}", content)
    return folder


def _named(model: dict[str, Any], *stems: str) -> dict[str, Any]:
    return {name: values for name, values in model.items() if name.startswith(stems)}


def _chunk(model: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    found = {}
    for local, number in enumerate(layers):
        stem = f"decoder.layers.{number}."
        for name, values in _named(model, stem).items():
            found[f"decoder.layers.{local}.{name.removeprefix(stem)}"] = values
    return found


@pytest.mark.parametrize("name", CUTS)
def test_chunks_of_a_core_model_come_in_the_order_of_its_layers(data_dir, tmp_path, name) -> None:
    said, stages = CUTS[name]
    ranks = whole_ranks(data_dir, sum(len(chunk) for stage in stages for chunk in stage))
    for tp, loaded in enumerate(ranks):
        save(tmp_path / "whole", f"mp_rank_{tp:02d}", loaded)
    source = cut(tmp_path / "cut", ranks, said, stages)
    whole = export_folder(tmp_path / "whole", tmp_path / "a", 2)
    assert weight_bytes(export_folder(source, tmp_path / "b", 2)) == weight_bytes(whole)


@pytest.mark.parametrize("version", [0, 3])
def test_chunks_of_a_classic_model(tmp_path: Path, version: int) -> None:
    """Stage 0 holds layers [0] and [2], stage 1 [1] and [3]."""
    whole = export_folder(Maker().write(tmp_path / "whole"), tmp_path / "a")
    source = Maker(version, 2, 4).write(tmp_path / "source")
    args = {"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    for tp in range(2):
        loaded = [torch.load(_file(source, tp, pp), weights_only=False) for pp in range(4)]
        for pp in range(2):
            content = loaded[pp]
            if version:
                vars(content["args"]).update(args)
            models = [loaded[pp].pop("model"), loaded[pp + 2]["model"]]
            content |= {f"model{number}": model for number, model in enumerate(models)}
            torch.save(content, _file(source, tp, pp))
            _file(source, tp, pp + 2).unlink()
    found = export_folder(source, tmp_path / "b", num_attention_heads=4)
    assert weight_bytes(found) == weight_bytes(whole)


def _file(folder: Path, tp: int, pp: int) -> Path:
    return folder / f"mp_rank_{tp:02d}_{pp:03d}" / FILE


def test_lost_chunks_are_named(data_dir: Path, tmp_path: Path) -> None:
    said, stages = CUTS["two_chunks"]
    source = cut(tmp_path / "cut", whole_ranks(data_dir, 8), said, stages)
    content = torch.load(_file(source, 0, 1), weights_only=False)
    del content["model1"]
    torch.save(content, _file(source, 0, 1))
    refused_export(source, tmp_path / "out", r"virtual pipeline stages; got \[1, 2\]; choices: 2")


def test_experts_in_files_of_ranks_are_refused(data_dir: Path, tmp_path: Path) -> None:
    source = cut(tmp_path / "source", whole_ranks(data_dir, 2), {"num_experts": 4}, [[[0, 1]]])
    refused_export(source, tmp_path, "num_experts is not supported; got 4")
