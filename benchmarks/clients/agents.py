"""Agents of others against a gateway without a model: each calls a tool and sends its result back.

    python3 -m benchmarks.clients.agents FOLDER [--only codex ...]    # in the project's environment

Installs each client into FOLDER by pip or npm (400 MB in all), starts the gateway of scripted.py
on this machine, and prints a table. Exit code 1 when a client fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clients.scripted import ANSWER, MODEL, scripted_app, serving

HERE = Path(__file__).parent
CODEX_CONFIG = """\
model = "{model}"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{address}/v1"
wire_api = "responses"
"""
SECONDS = 300
WEATHER = "20 C in Rome"


@dataclass(frozen=True)
class Agent:
    """One client.

    packages: with versions, the first one in the table
    command:  from its folder and the gateway's address
    answer:   a part of what it prints
    """

    packages: tuple[str, ...]
    command: Callable[[Path, str], Sequence[str]]
    answer: str = ANSWER
    environment: Callable[[Path, str], Mapping[str, str]] = field(default=lambda _, __: {})

    @property
    def is_python(self) -> bool:
        return "==" in self.packages[0]

    def install(self, folder: Path) -> None:
        """Raises CalledProcessError."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self.is_python:
            _run(["npm", "install", "--no-audit", "--no-fund", *self.packages], folder)
            for script in folder.glob("node_modules/@anthropic-ai/claude-code/install.cjs"):
                _run(["node", str(script)], script.parent)
            return
        _run([sys.executable, "-m", "venv", "."], folder)
        _run([str(folder / "bin" / "pip"), "install", "-q", *self.packages], folder)


def _python(name: str) -> Callable[[Path, str], Sequence[str]]:
    script = str(HERE / "agents_python.py")
    # -I: without this folder on the path, which has a module called as one of theirs.
    return lambda folder, address: [str(folder / "bin" / "python"), "-I", script, name, address]


def _ai_sdk(folder: Path, address: str) -> Sequence[str]:
    script = folder / "agents.mjs"  # node looks for packages beside it
    script.write_bytes((HERE / "agents_ai_sdk.mjs").read_bytes())
    return ["node", str(script), address]


def _codex(folder: Path, address: str) -> Sequence[str]:
    (folder / "config.toml").write_text(CODEX_CONFIG.format(model=MODEL, address=address))
    command = [str(folder / "node_modules" / ".bin" / "codex"), "exec", "--skip-git-repo-check"]
    return [*command, "--sandbox", "read-only", "How warm is it?"]


def _claude(folder: Path, _: str) -> Sequence[str]:
    file = folder / "weather.txt"
    file.write_text(f"{WEATHER}\n")
    question = f"Call Read with {json.dumps({'file_path': str(file)})}"
    return [str(folder / "node_modules" / ".bin" / "claude"), "-p", question, "--tools", "Read"]


def _claude_environment(folder: Path, address: str) -> Mapping[str, str]:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    return {
        "HOME": str(folder),
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(names, MODEL),
    }


AGENTS = {
    "openai_agents": Agent(("openai-agents==0.24.0",), _python("openai_agents")),
    "pydantic_ai": Agent(("pydantic-ai-slim[openai,anthropic]==2.68.0",), _python("pydantic_ai")),
    "instructor": Agent(("instructor==1.17.0",), _python("instructor"), "20 C in Rome"),
    "ai_sdk": Agent(
        (
            "ai@7.0.173",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/anthropic@4.0.105",
            "@ai-sdk/openai-compatible@3.0.92",
            "zod@4.6.7",
        ),
        _ai_sdk,
    ),
    "codex": Agent(
        ("@openai/codex@0.171.0",),
        _codex,
        environment=lambda folder, _: {"CODEX_HOME": str(folder)},
    ),
    "claude_code": Agent(
        ("@anthropic-ai/claude-code@2.1.332",), _claude, WEATHER, _claude_environment
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted(AGENTS), default=list(AGENTS))
    arguments = parser.parse_args(argv)
    failed = 0
    app, backend = scripted_app()
    print("| client | result |\n|---|---|")
    with serving(app) as address:
        for name in arguments.only:
            agent, folder = AGENTS[name], arguments.folder.absolute() / name
            backend.prompts.clear()
            try:
                agent.install(folder)
                output = _run(
                    agent.command(folder, address), folder, agent.environment(folder, address)
                )
                fine = agent.answer in output and len(backend.prompts) > 1
            except subprocess.SubprocessError as error:
                fine, output = False, f"{error} {getattr(error, 'output', '')}"
            failed += not fine
            shown = " ".join(output.split()).replace("|", "\\|")[-300:]
            result = shown if fine else f"FAILED: {shown}"
            print(
                f"| {agent.packages[0]} | {len(backend.prompts)} requests: {result} |", flush=True
            )
    return 1 if failed else 0


def _run(command: Sequence[str], folder: Path, more: Mapping[str, str] | None = None) -> str:
    """Return what a command prints. Raises SubprocessError."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(more or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=SECONDS,
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
