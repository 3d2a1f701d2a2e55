"""What is compiled while weights are read is all that a rank on a GPU asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.models.family import ModelConfig
from tests.engine.small_models import random_tensors, small_config, write_checkpoint
from tests.engine.small_t5 import t5_config, t5_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

RANK = """
import json, sys, threading, time
from pathlib import Path
from triton import knobs
from launcher_scripts.engine.engine import Engine, EngineSettings

compiled = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append(
    (src.name, cache_hit, threading.current_thread().name)
)
folder, quantization, kv_cache_dtype = Path(sys.argv[1]), sys.argv[2] or None, sys.argv[3]
engine = Engine.load(
    EngineSettings(
        folder,
        data_type="bf16",
        device="cuda",
        max_batch_size=20,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
)
engine.warm_up()
time.sleep(5)  # idle: the rest is recorded
engine.close()
steps = [what for what, _ in engine.timeline.events]
print(json.dumps({"steps": steps, "kernels": compiled}))
"""
SIZES = {"hidden_size": 256, "num_heads": 4, "head_size": 64, "ffn_size": 512}
GPT = small_config(**SIZES, num_kv_heads=4, vocab_size=512, max_positions=1100)
T5 = t5_config(**SIZES, vocab_size=512)


@pytest.mark.parametrize(
    ("quantization", "kept"), [("", "auto"), ("int8", "auto"), ("fp8", "auto"), ("", "fp8")]
)
@pytest.mark.parametrize("config", [GPT, T5], ids=["gpt", "t5"])
def test_a_rank_compiles_nothing_itself(
    tmp_path: Path, checkout: Path, config: ModelConfig, quantization: str, kept: str
) -> None:
    tensors = random_tensors(config) if config is GPT else t5_tensors(config)
    folder = write_checkpoint(tmp_path / "1-gpu", config, tensors, 1)
    variables = {"PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    for start in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", RANK, str(folder), quantization, kept],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert "the first kernels are compiled" in found["steps"]
        assert len(found["kernels"]) > 20
        missed = {thread.partition("_")[0] for _, hit, thread in found["kernels"] if not hit}
        assert missed == ({"compiler"} if start == "first" else set()), done.stdout
