"""Every TP x PP gives what one rank gives; a lost rank is named soon and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from launcher_scripts.common.errors import CheckpointError, ConfigError, ServerError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner.loading import open_checkpoints
from tests.engine.small_models import (
    LATENT,
    LLAMA,
    check_same_answers,
    context_logits,
    engine_for,
    load_engine,
    random_tensors,
    small_config,
    write_checkpoint,
)

IDS = (5, 60, 11, 11, 2, 33, 47, 0, 9, 28)
GPT2 = small_config(num_layers=3, vocab_size=65, end_id=65, start_id=0)
MODERN = small_config(num_layers=3, end_id=67, **LLAMA)
MLA = small_config(num_layers=3, end_id=67, **LATENT)
ALIBI = small_config(num_layers=2, position_embedding="alibi", norm_placement="post", end_id=67)


@pytest.mark.parametrize(
    ("config", "tp", "pp"),
    [
        (GPT2, 2, 1),
        pytest.param(GPT2, 1, 2, marks=pytest.mark.slow),
        pytest.param(MODERN, 4, 1, marks=pytest.mark.slow),
        (MODERN, 2, 2),
        (GPT2, 1, 3),
        (ALIBI, 2, 1),
        (MLA, 2, 2),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_ranks_agree_with_one(tmp_path: Path, config, tp, pp):
    tensors = random_tensors(config)
    alone = engine_for(config, tensors)
    together = load_engine(tmp_path, config, tensors, tp, pp)
    assert [info.rank for info in together.ranks] == list(range(tp * pp))
    want, got = (context_logits(engine, IDS) for engine in (alone, together))
    assert (want - got).abs().max() <= 2e-5
    check_same_answers(alone, together, IDS)
    alone.close()
    together.close()


def pids(engine: Engine) -> list[int]:
    return [info.pid for info in engine.ranks[1:]]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def wait_until_gone(processes: list[int], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline, "a rank outlived its engine"
        time.sleep(0.05)


def long_request() -> GenerateRequest:
    return GenerateRequest(IDS, output_len=80)


@pytest.mark.started_ranks
@pytest.mark.parametrize("kind", ["killed", "stopped"])
def test_a_lost_rank_fails_what_is_pending_and_what_comes(tmp_path: Path, kind):
    engine = load_engine(
        tmp_path, GPT2, random_tensors(GPT2), 2, 1, stall_timeout=3.0, max_batch_size=1
    )
    workers = pids(engine)
    told: list[str] = []
    noticed = threading.Event()
    engine.on_failure(lambda error: (told.append(str(error)), noticed.set()))
    futures = [engine.submit(long_request()) for _ in range(40)]
    futures[0].result(60)
    os.kill(workers[0], signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    with pytest.raises(ServerError) as raised:
        futures[-1].result(120)
    assert f"rank 1 (pid {workers[0]})" in str(raised.value)
    assert ("SIGKILL" if kind == "killed" else "is stopped (SIGSTOP)") in str(raised.value)
    assert noticed.wait(60)
    assert told == [str(raised.value)]
    with pytest.raises(ServerError, match="rank 1"):
        engine.submit(long_request()).result(60)
    engine.close()
    wait_until_gone(workers)


SUSPENDED = """
import sys
from pathlib import Path
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
settings = EngineSettings(
    Path(sys.argv[1]), parallelism=Parallelism(2), device="cpu", stall_timeout=2.0
)
engine = Engine.load(settings)
requests = [GenerateRequest((1, 2, 3), 80) for _ in range(20)]
futures = [engine.submit(request) for request in requests]
futures[0].result(120)
print("generating", flush=True)
sys.stdin.readline()
answers = [future.result(120) for future in futures]
again = engine.submit(requests[0]).result(120)
print(all(answer == again for answer in answers), flush=True)
engine.close()
"""


@pytest.mark.started_ranks
def test_ranks_that_were_all_suspended_are_not_lost(tmp_path: Path):
    """As when a node is: nobody could give a sign of life."""
    write_checkpoint(tmp_path / "2-gpu", GPT2, random_tensors(GPT2), 2)
    with subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, str(tmp_path / "2-gpu")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        try:
            assert server.stdout.readline() == "generating\n"
            os.killpg(server.pid, signal.SIGSTOP)
            time.sleep(3.5)  # no shorter than what counts as lost
            os.killpg(server.pid, signal.SIGCONT)
            assert server.communicate("\n", 240)[0] == "True\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def test_ranks_end_with_their_parent(tmp_path: Path):
    write_checkpoint(tmp_path / "2-gpu", GPT2, random_tensors(GPT2), 2)
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from launcher_scripts.engine.engine import Engine, EngineSettings\n"
        "from launcher_scripts.common.parallelism import Parallelism\n"
        "engine = Engine.load(EngineSettings(Path(sys.argv[1]), parallelism=Parallelism(2),\n"
        "                                    device='cpu'))\n"
        "print(engine.ranks[1].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "2-gpu")], stdout=subprocess.PIPE, text=True
    )
    worker = int(parent.stdout.readline())
    assert is_alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone([worker])


def test_a_checkpoint_for_other_ranks_is_refused(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "2-gpu", GPT2, random_tensors(GPT2), 2)
    with pytest.raises(ConfigError, match="tensor_para_size 2; got 4"):
        Engine.load(EngineSettings(folder, parallelism=Parallelism(4), device="cpu"))
    with pytest.raises(ConfigError, match="pipeline_para_size 4 exceeds the model's 3 layers"):
        Engine.load(EngineSettings(folder, parallelism=Parallelism(2, 4), device="cpu"))


def test_an_altered_file_is_refused(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "2-gpu", GPT2, random_tensors(GPT2), 2)
    target = folder / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin"
    content = bytearray(target.read_bytes())
    content[100] ^= 1
    target.write_bytes(content)
    with pytest.raises(CheckpointError, match=target.name):
        Engine.load(EngineSettings(folder, parallelism=Parallelism(2), device="cpu"))


def test_a_rank_that_cannot_load_fails_the_load(tmp_path: Path, monkeypatch):
    """A file of the second rank vanishes after rank 0 has looked."""
    folder = write_checkpoint(tmp_path / "2-gpu", GPT2, random_tensors(GPT2), 2)
    target = folder / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin"

    def open_then_remove(settings, *, verify):
        checkpoints = open_checkpoints(settings, verify=verify)
        target.unlink()
        return checkpoints

    monkeypatch.setattr("launcher_scripts.engine.engine.open_checkpoints", open_then_remove)
    with pytest.raises(ServerError, match=rf"(?s)rank 1 .*{target.name}"):
        settings = EngineSettings(folder, parallelism=Parallelism(2), device="cpu", verify=False)
        Engine.load(settings)


def test_close_answers_what_is_pending(tmp_path: Path):
    engine = load_engine(tmp_path, GPT2, random_tensors(GPT2), 2, 1, max_batch_size=1)
    workers = pids(engine)
    futures = [engine.submit(long_request()) for _ in range(30)]
    engine.close()
    with pytest.raises(ServerError, match="closed"):
        futures[-1].result(60)
    with pytest.raises(ServerError, match="closed"):
        engine.submit(long_request()).result(60)
    wait_until_gone(workers)


def test_cuda_on_a_machine_without_is_refused(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    folder = write_checkpoint(tmp_path / "1-gpu", GPT2, random_tensors(GPT2), 1)
    with pytest.raises(ServerError, match="no CUDA device"):
        Engine.load(EngineSettings(folder, device="cuda"))
