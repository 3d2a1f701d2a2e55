"""vLLM's own OpenAI server, asked what `benchmarks.gateway` asks of ours, by the same clients.

    python3 -m benchmarks.vllm_server --folder EMPTY_FOLDER --out vllm_server.json [--shapes 1.3b] \
        [--clients 1 32 128 512] [--packages FOLDER]

Run it on the machine of `benchmarks.gateway`, right after it. The server runs without its prefix
cache, with random bfloat16 weights. --packages: where vLLM is installed, if this Python has none.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gateway import write_tokenizer
from benchmarks.load_clients import load_target, measured
from benchmarks.peers import say
from benchmarks.repositories import RandomModel
from benchmarks.shapes import CONFIGS
from launcher_scripts.common.http_client import query
from launcher_scripts.models.gpt import GPTConfig

GPTS = {name: each for name, each in CONFIGS.items() if isinstance(each, GPTConfig)}
POSITIONS = 1024
ROWS = 512
START_SECONDS = 200
OPTIONS = (
    *("--load-format", "dummy", "--dtype", "bfloat16", "--generation-config", "vllm"),
    *("--max-model-len", str(POSITIONS), "--max-num-seqs", str(ROWS), "--no-enable-prefix-caching"),
    *("--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.85"),
    *("--attention-backend", "FLASH_ATTN", "--disable-log-stats", "--disable-uvicorn-access-log"),
)
VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=GPTS, default=["1.3b"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128, 512])
    parser.add_argument("--packages", type=Path)
    arguments = parser.parse_args(argv)
    found = []
    for shape in arguments.shapes:
        config = GPTS[shape]
        folder = arguments.folder / f"{shape}-vllm"
        write_tokenizer(folder, config.vocab_size)
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind))
        (folder / "config.json").write_text(json.dumps(transformers_config(config)))
        with server(folder, shape, arguments.packages) as url:
            model = RandomModel(shape, config, ROWS)
            target = load_target("gateway", url, model, stream=True)
            measured(target, config.vocab_size, 8)  # compiles what a first request needs
            for clients in arguments.clients:
                found.append({"model": shape, **measured(target, config.vocab_size, clients)})
                say(**found[-1])
                arguments.out.write_text(json.dumps({"rows": found}, indent=2), encoding="utf-8")
    return 0


@contextmanager
def server(folder: Path, name: str, packages: Path | None) -> Iterator[str]:
    """The URL of vLLM's OpenAI server of a folder. Raises RuntimeError with its last words."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    variables = {**os.environ, **VARIABLES}
    if packages is not None:
        variables["PYTHONPATH"] = str(packages)
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=folder) as process,
    ):
        try:
            wait(process, f"127.0.0.1:{port}", folder / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.time() + START_SECONDS
    while process.poll() is None and time.time() < until:
        with suppress(OSError):
            if query(address, "/health", 5)[0] < 400:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not become ready:\n{log.read_text()[-3000:]}")


def transformers_config(config: GPTConfig) -> dict[str, Any]:
    """config.json of GPT-2 or of Llama with the sizes of one of our shapes."""
    common = {
        "vocab_size": config.vocab_size,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": config.vocab_size - 1,
    }
    if config.position_embedding == "learned":
        return {
            **common,
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.ffn_size,
            "n_positions": POSITIONS,
            "n_ctx": POSITIONS,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": config.tied_embeddings,
        }
    return {
        **common,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": config.tied_embeddings,
    }


if __name__ == "__main__":
    sys.exit(main())
