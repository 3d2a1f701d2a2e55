"""New weights on a GPU: from its memory, the host's and another process's; and sleep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher_scripts.contract.requests import HANDLES, GenerateRequest
from launcher_scripts.engine.ranks.operations import OperationError
from launcher_scripts.engine.runner import weight_exchange
from launcher_scripts.engine.swap import WeightSwaps
from tests.engine.small_models import context_logits, load_engine
from tests.engine.test_refit import WEIGHTS, engine_of, folders
from tests.engine.test_swap import IDS, MODERN, exports

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

TRAINER = """
import json, sys
from safetensors.torch import load_file
from launcher_scripts.clients.refit import _handles

tensors = {name: item.cuda() for name, item in load_file(sys.argv[1]).items()}
print(json.dumps(_handles(tensors)), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["device", "host"])
def test_logits_are_those_of_a_fresh_start(tmp_path: Path, monkeypatch, share: float):
    monkeypatch.setattr(weight_exchange, "DEVICE_SHARE", share)
    monkeypatch.setattr(weight_exchange, "CHUNK_BYTES", 1 << 12)
    first, second = exports(tmp_path, MODERN)
    more = {"device": "cuda", "data_type": "bf16"}
    fresh = load_engine(tmp_path / "second", MODERN, {}, 1, 1, **more)
    expected = context_logits(fresh, IDS)
    fresh.close()
    engine = load_engine(tmp_path / "first", MODERN, {}, 1, 1, **more)
    before = context_logits(engine, IDS)
    futures = [engine.submit(GenerateRequest(IDS[number:], 300)) for number in range(4)]
    swaps = WeightSwaps(engine)
    swaps.swap(second, "mixed")
    # Beside rows that decode other kernels run, with other last bits.
    assert [len(future.result(60).output_ids) for future in futures] == [300] * 4
    assert torch.equal(context_logits(engine, IDS), expected)
    swaps.swap(first)
    assert torch.equal(context_logits(engine, IDS), before)
    engine.close()


def test_tensors_of_another_process_are_read_where_they_are(tmp_path: Path):
    before, after = folders(tmp_path)
    engine = engine_of(before, tmp_path / "served", device="cuda")
    swaps = WeightSwaps(engine)
    swaps.refit(after)
    expected = context_logits(engine, IDS)
    swaps.refit(before)
    command = [sys.executable, "-c", TRAINER, str(after / WEIGHTS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        handles = trainer.stdout.readline()
        hollow = {name: item.zero_() for name, item in load_file(after / WEIGHTS).items()}
        save_file(hollow, after / WEIGHTS, {HANDLES: handles})
        for _ in range(2):
            swaps.refit(after)
            assert torch.equal(context_logits(engine, IDS), expected)
            swaps.refit(before)
        trainer.stdin.close()
    engine.close()


def test_an_engine_wakes_up_when_there_is_memory(tmp_path: Path):
    exports(tmp_path, MODERN)
    engine = load_engine(tmp_path / "first", MODERN, {}, 1, 1, device="cuda", max_tokens=1 << 21)
    expected = context_logits(engine, IDS)
    ids = engine.submit(GenerateRequest(IDS, 40)).result(60).output_ids  # by recorded steps
    swaps = WeightSwaps(engine)
    swaps.sleep()
    free, _ = torch.cuda.mem_get_info()
    training = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(OperationError, match="too little free memory to wake up"):
        swaps.wake()
    assert swaps.sleeping
    del training
    torch.cuda.empty_cache()
    for _ in range(2):
        swaps.wake()
        assert torch.equal(context_logits(engine, IDS), expected)
        assert engine.submit(GenerateRequest(IDS, 40)).result(60).output_ids == ids
        swaps.sleep()
    engine.close()
