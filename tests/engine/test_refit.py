"""Weights of a transformers folder in a running engine, and an engine that sleeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher_scripts.common.errors import BusyError, CheckpointError, ConfigError
from launcher_scripts.contract.requests import HANDLES, GenerateRequest
from launcher_scripts.engine.core.interruptible import InterruptibleScheduler
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.ranks.operations import OperationError
from launcher_scripts.engine.runner import operations, refit_source
from launcher_scripts.engine.swap import WeightSwaps
from tests.checkpoint.exporting import change_json, export_folder
from tests.checkpoint.tiny_models import DECODERS, LATER_DECODERS
from tests.engine.small_models import context_logits, load_engine

IDS = (5, 60, 11, 11, 2, 33, 47, 0, 9, 28)
WEIGHTS = "model.safetensors"


def folders(folder: Path, name: str = "llama") -> tuple[Path, Path]:
    """Two transformers folders of one model, as a training writes them before and after steps."""
    model = {**DECODERS, **LATER_DECODERS}[name].make()
    model.save_pretrained(folder / "before")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9).add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(folder / "after")
    return folder / "before", folder / "after"


def engine_of(checkpoint: Path, folder: Path, tp: int = 1, pp: int = 1, **more) -> Engine:
    return load_engine(export_folder(checkpoint, folder, tp).parent, None, {}, tp, pp, **more)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "more"),
    [
        ("llama", 2, 1, {}),
        ("gemma3", 1, 2, {"data_type": "bf16"}),
        ("deepseek_v3", 1, 1, {}),
        pytest.param("mixtral", 2, 1, {}, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, 1, {"quantization": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_an_export(tmp_path: Path, name, tp, pp, more):
    before, after = folders(tmp_path, name)
    fresh = engine_of(after, tmp_path / "fresh", tp, pp, **more)
    expected = context_logits(fresh, IDS)
    fresh.close()
    engine = engine_of(before, tmp_path / "served", tp, pp, **more)
    first = context_logits(engine, IDS)
    assert not torch.equal(first, expected)
    swaps = WeightSwaps(engine)
    result = swaps.refit(after, "step-20", probe=True)
    assert torch.equal(context_logits(engine, IDS), expected)
    assert result.difference <= result.max_difference
    assert result.digests["weights_version"] == "step-20"
    swaps.refit(before)
    assert torch.equal(context_logits(engine, IDS), first)
    assert swaps.digests.values()["weights_version"] == "2"
    engine.close()


@pytest.fixture(name="served")
def served_engine(tmp_path: Path) -> Iterator[tuple[Engine, WeightSwaps, Path]]:
    before, after = folders(tmp_path)
    engine = engine_of(before, tmp_path / "served", max_batch_size=2, enable_prefix_caching=True)
    yield engine, WeightSwaps(engine), after
    engine.close()


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def with_a_nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def cut_short(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def of_another_model(folder: Path) -> None:
    change_json(folder / "config.json", rms_norm_eps=0.5)


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (without_a_tensor, CheckpointError, "up_proj"),
        (of_another_shape, CheckpointError, "up_proj"),
        (with_a_nan, OperationError, "final_layernorm"),
        (cut_short, CheckpointError, WEIGHTS),
        (of_another_model, ConfigError, "norm_eps"),
    ],
)
def test_what_is_damaged_leaves_the_old_weights(served, damage, error, text):
    engine, swaps, after = served
    before = context_logits(engine, IDS)
    damage(after)
    with pytest.raises(error, match=text):
        swaps.refit(after)
    assert torch.equal(context_logits(engine, IDS), before)
    assert swaps.version == 0


class Trainer:
    """Stands for a process whose tensors lie in the memory of GPUs: here they are on the CPU."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        tensors = load_file(folder / WEIGHTS)
        self.tensors = {name: item.clone() for name, item in tensors.items()}
        raw = {name: item.reshape(-1).view(torch.uint8) for name, item in self.tensors.items()}
        monkeypatch.setattr(refit_source, "opened_memory", lambda _: raw)
        hollow = {name: torch.zeros_like(item) for name, item in tensors.items()}
        save_file(hollow, folder / WEIGHTS, {HANDLES: "{}"})


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_tensors_in_the_memory_of_another_process_are_read_there(tmp_path, monkeypatch, name):
    before, after = folders(tmp_path, name)
    engine = engine_of(before, tmp_path / "served")
    swaps = WeightSwaps(engine)
    swaps.refit(after)
    expected = context_logits(engine, IDS)
    swaps.refit(before)
    trainer = Trainer(after, monkeypatch)
    values = {key: item.clone() for key, item in trainer.tensors.items()}
    swaps.refit(after)
    assert torch.equal(context_logits(engine, IDS), expected)
    swaps.refit(before)
    assert all(torch.equal(trainer.tensors[key], values[key]) for key in values)
    engine.close()


def test_memory_that_does_not_fit_the_names_is_refused(served, monkeypatch):
    engine, swaps, after = served
    before = context_logits(engine, IDS)
    Trainer(after, monkeypatch)
    memory = refit_source.opened_memory("")
    memory["model.norm.weight"] = memory["model.norm.weight"][:-1]
    memory["other"] = memory.pop("lm_head.weight")
    with pytest.raises(CheckpointError) as raised:
        swaps.refit(after)
    for text in ("model.norm.weight has another size", "other is", "lm_head.weight is"):
        assert text in str(raised.value)
    assert torch.equal(context_logits(engine, IDS), before)


def test_handles_that_cannot_be_opened_are_refused():
    for text in ("[]", '{"x": 3}', '{"x": ["GPU-1", "00", 1, 0, "00", 0, "00", true, 0, 1]}'):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            refit_source.opened_memory(text)


def test_a_sleeping_engine_refuses_requests_and_has_no_cache(served):
    engine, swaps, after = served
    prompt = IDS * 4
    expected = engine.submit(GenerateRequest(prompt, 5)).result(60).output_ids
    assert engine.submit(GenerateRequest(prompt, 2)).result(60).num_cached_tokens > 0
    pool = engine._loaded.decoder.cache.pools[0]
    swaps.sleep()
    assert swaps.sleeping
    assert pool.untyped_storage().nbytes() == 0
    with pytest.raises(BusyError, match="POST /wake_up"):
        engine.submit(GenerateRequest(prompt, 5)).result(60)
    with pytest.raises(BusyError, match="POST /wake_up"):
        swaps.refit(after)
    swaps.sleep()
    swaps.wake()
    swaps.wake()
    output = engine.submit(GenerateRequest(prompt, 5)).result(60)
    assert output.output_ids == expected
    assert output.num_cached_tokens == 0
    swaps.refit(after)
    assert swaps.version == 1


def test_rows_end_before_the_sleep_and_those_that_wait_go_on_after_it(served):
    engine, swaps, _ = served
    requests = [GenerateRequest(IDS[number:], 15) for number in range(4)]
    expected = [engine.submit(request).result(60).output_ids for request in requests]
    started = threading.Event()
    futures = [engine.submit(request, lambda _: started.set()) for request in requests]
    assert started.wait(60)
    swaps.sleep()
    assert sum(future.done() for future in futures) > 0
    swaps.wake()
    assert [future.result(60).output_ids for future in futures] == expected


def test_a_sleep_that_requests_hold_up_is_given_up(served, monkeypatch):
    engine, swaps, _ = served
    monkeypatch.setattr(InterruptibleScheduler, "has_begun", True)
    with pytest.raises(BusyError, match="rows were still running"):
        swaps.sleep(0.0)
    assert not swaps.sleeping
    assert engine.submit(GenerateRequest(IDS, 5)).result(60).output_ids


def test_ranks_sleep_together(tmp_path: Path):
    before, _ = folders(tmp_path)
    engine = engine_of(before, tmp_path / "served", 2)
    expected = context_logits(engine, IDS)
    swaps = WeightSwaps(engine)
    swaps.sleep()
    swaps.wake()
    assert torch.equal(context_logits(engine, IDS), expected)
    engine.close()


def test_parked_storages_come_back_with_all_that_shares_them():
    full = torch.arange(24.0).view(4, 6)
    part, other = full[1:3], torch.arange(5, dtype=torch.int8)
    expected = full.clone()
    memory = operations.storages([part, full, other])
    assert [item.numel() for item in memory] == [96, 5]
    host = [torch.empty_like(item) for item in memory]
    operations.park(memory, host)
    assert full.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    operations.unpark(memory, host)
    assert torch.equal(full, expected)
    assert torch.equal(part, expected[1:3])
    assert other.tolist() == [0, 1, 2, 3, 4]


def lacking_memory(monkeypatch, ranks: set[int], times: int) -> None:
    """Have the devices of these ranks lack memory when they wake up, so many times."""
    revert, failures = operations.WeightSleep.revert, dict.fromkeys(ranks, times)

    def lack(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 16 GB")

    def short_revert(sleep: operations.WeightSleep) -> None:
        rank = sleep._runner.communicator.rank
        with pytest.MonkeyPatch.context() as patch:
            if failures.get(rank, 0):
                failures[rank] -= 1
                patch.setattr(operations, "unpark", lack)
            revert(sleep)

    monkeypatch.setattr(operations.WeightSleep, "revert", short_revert)


def test_a_wake_up_without_memory_sleeps_on_and_may_be_tried_again(served, monkeypatch):
    engine, swaps, after = served
    expected = engine.submit(GenerateRequest(IDS, 5)).result(60).output_ids
    swaps.sleep()
    lacking_memory(monkeypatch, {0}, 2)
    for _ in range(2):
        with pytest.raises(OperationError, match="too little free memory to wake up"):
            swaps.wake()
        assert swaps.sleeping
        with pytest.raises(BusyError, match="POST /wake_up"):
            engine.submit(GenerateRequest(IDS, 5)).result(60)
    swaps.wake()
    assert engine.submit(GenerateRequest(IDS, 5)).result(60).output_ids == expected
    swaps.refit(after)
    assert swaps.version == 1


def test_ranks_of_which_one_cannot_wake_up_sleep_on_together(tmp_path: Path, monkeypatch):
    before, _ = folders(tmp_path)
    engine = engine_of(before, tmp_path / "served", 2)
    expected = context_logits(engine, IDS)
    swaps = WeightSwaps(engine)
    swaps.sleep()
    lacking_memory(monkeypatch, {0}, 1)  # rank 1 wakes up, and sleeps again
    with pytest.raises(OperationError, match=r"rank 0.* too little free memory"):
        swaps.wake()
    assert swaps.sleeping
    swaps.wake()
    assert torch.equal(context_logits(engine, IDS), expected)
    engine.close()
