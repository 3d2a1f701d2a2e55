"""Fixtures of the login half: composed configurations, a stand-in launcher, the real entry."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import main as entry
from stages.choices import fill_in
from stages.plan import DeploymentPlan
from tests.forked_launchers import ForkedLaunchers

STEPS = Path(__file__).parent / "stand_in_steps"
PROGRAMS = Path(__file__).parent / "stand_in_programs"

Compose = Callable[..., dict[str, Any]]
Planner = Callable[..., DeploymentPlan]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
LOCAL = "cluster_type=interactive"


@pytest.fixture(scope="session")
def composed(checkout: Path) -> Iterator[Callable[..., DictConfig]]:
    """Compose the configuration as the command line does, every choice of files once.

    Hydra, too, sets single keys when all files have been read.
    """
    entry.register()
    parser = OverridesParser.create()
    chosen = cache(lambda *groups: compose("config", list(groups)))

    def composed(*overrides: str) -> DictConfig:
        groups, keys = [], []
        for override in parser.parse_overrides(list(overrides)):
            of_files = (checkout / "conf" / override.key_or_group).is_dir()
            (groups if of_files else keys).append(override)
        config: DictConfig = deepcopy(chosen(*(group.input_line for group in groups)))
        ConfigLoaderImpl._apply_overrides_to_config(keys, config)
        return config

    with initialize_config_dir(str(checkout / "conf"), version_base="1.3"):
        yield composed


@pytest.fixture(scope="session")
def hydra_config(composed: Callable[..., DictConfig]) -> Compose:
    """The composed configuration with its values filled in."""

    def filled(*overrides: str) -> dict[str, Any]:
        config = composed(*overrides)
        fill_in(config)
        values = OmegaConf.to_container(config, resolve=True)
        assert isinstance(values, dict)
        return values

    return filled


@pytest.fixture
def plan(composed: Callable[..., DictConfig]) -> Planner:
    """The plan of some overrides, as main.py makes it."""
    return lambda *overrides: entry.read(composed(*overrides), overrides)


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """A launcher_scripts folder whose steps are small stand-ins for the real ones."""
    folder = tmp_path / "a launcher" / "launcher_scripts"
    (folder / "steps").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "steps" / "__init__.py").touch()
    for step in STEPS.glob("*.py"):
        (folder / "steps" / step.name).write_text(step.read_text(encoding="utf-8"), "utf-8")
    return folder


@pytest.fixture
def nemo_file(tmp_path: Path) -> Path:
    """A .nemo file as far as the login side looks into it: 4 heads, 2 layers, MLP of 64."""
    return write_nemo(tmp_path / "model.nemo", num_layers=2, num_attention_heads=4)


def write_nemo(path: Path, mode: str = "w", **config: Any) -> Path:
    """A .nemo file with its hyperparameters, and some bytes for its weights and its tokenizer."""
    folder = path.parent / f"{path.stem}_content"
    folder.mkdir()
    config = {"ffn_hidden_size": 64, "tokenizer": {"model": "nemo:a1_spm.model"}, **config}
    (folder / "a1_spm.model").write_bytes(b"tokenizer")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    (folder / "model_weights.ckpt").write_bytes(b"weights")
    with tarfile.open(path, mode) as archive:
        archive.add(folder, ".")
    return path


@pytest.fixture
def arguments(launcher: Path, tmp_path: Path, nemo_file: Path) -> list[str]:
    """Arguments of a small run of the stand-ins."""
    return [
        f"launcher_scripts_path='{launcher}'",
        f"base_results_dir='{tmp_path / 'the results'}'",
        "export.run.model_train_name=tiny",
        f"export.model.checkpoint_path='{nemo_file}'",
        "export.model.tensor_model_parallel_size=2",
        # The machine's own servers do not matter.
        *(f"deploy.server.{kind}_port=0" for kind in ("http", "grpc", "metrics")),
        "evaluate.tasks.lambada.data_file=" + str(nemo_file),
    ]


@pytest.fixture
def run(launchers: ForkedLaunchers, checkout: Path, tmp_path: Path) -> Run:
    """Run the launcher as a user does and return what it printed."""

    def run_main(
        *arguments: str, script: Path = checkout / "main.py", cwd: Path = tmp_path, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return launchers.run(*arguments, script=script, cwd=cwd, env={**os.environ, **env})

    return run_main


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the clusters' programs on PATH, and the file that they note their calls in."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for source in PROGRAMS.iterdir():
        program = folder / source.stem
        text = source.read_text(encoding="utf-8")
        head = f"#!{sys.executable}\n" if source.suffix == ".py" else ""
        program.write_text(head + text, encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with bash and nothing of a cluster."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("bash", "env"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    return folder
