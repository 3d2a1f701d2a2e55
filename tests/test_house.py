"""The rules of the house: who may import whom, complete tables, readable sizes.

A message names the file and what to do about it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from launcher_scripts.cluster import CLUSTERS
from launcher_scripts.config.evaluation import TASK_NAMES
from stages import STAGES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path.relative_to(ROOT)
    for pattern in ("main.py", "stages/**/*.py", "launcher_scripts/**/*.py")
    for path in ROOT.glob(pattern)
)
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))
TEXTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("conf/**/*.yaml", "templates/**/*", "docs/**/*.md", "*.md", "Makefile", ".ci/*")
    for path in ROOT.glob(pattern)
    if path.is_file()
)

FILE_LINES = 500
FUNCTION_LINES = 60

FLOOR = frozenset({"common", "config", "contract", "models"})
# room -> the rooms that it may import besides itself
MAY_IMPORT = {
    "main": {"stages", "common"},
    # A stage reads the headers of a checkpoint: those readers need neither numpy nor torch, as
    # tests/login/test_entry.py sees.
    "stages": {"cluster", "checkpoint"} | FLOOR,
    "cluster": {"common", "config"},
    "jobs": {"cluster"} | FLOOR,
    "common": set(),
    "config": {"common"},
    "contract": {"common"},
    "models": {"common"},
    "checkpoint": FLOOR,
    "checkpoint.formats": {"common"},
    "kernels": {"common"},
    "engine": {"kernels", "checkpoint"} | FLOOR,
    "backends": {"engine", "checkpoint"} | FLOOR,
    "server": FLOOR,
    "clients": FLOOR,
    "evaluation": {"clients"} | FLOOR,
    "gateway": {"checkpoint", "clients"} | FLOOR,
    "watch": {"evaluation", "checkpoint"} | FLOOR,
    "steps": {"server", "gateway", "engine", "evaluation", "clients", "checkpoint", "watch"}
    | FLOOR,
    "launcher_scripts.main": set(),
    "launcher": {"checkpoint"} | FLOOR,
}
# Modules that are copied beside the text models of a repository, so they import nothing of ours.
COPIED = (
    *("backends.text_channel", "backends.text_requests", "backends.text_tensors"),
    *("backends.text_model", "backends.triton_requests"),
    *("common.text_deltas", "contract.text_names"),
)
COPIED_PACKAGE = "launcher_scripts.common.tokenizer"
# dependency -> the only places that may import it
DOORS = {
    "submitit": ("launcher_scripts/cluster/slurm.py",),
    "jinja2": ("launcher_scripts/common/rendering.py",),
    "hydra": ("main.py", "stages/"),
    "omegaconf": ("main.py", "stages/"),
    "triton_python_backend_utils": ("launcher_scripts/backends/",),
    "tritonclient": (
        "launcher_scripts/clients/connection.py",
        "launcher_scripts/clients/async_connection.py",
    ),
    "httpx": ("launcher_scripts/common/http_client.py",),
    "aiohttp": ("launcher_scripts/evaluation/load/paths.py",),
    "starlette": ("launcher_scripts/gateway/",),
    "uvicorn": ("launcher_scripts/gateway/service.py",),
    "prometheus_client": ("launcher_scripts/gateway/metrics.py",),
    "uvloop": ("launcher_scripts/gateway/service.py",),
    "pydantic": (
        "launcher_scripts/gateway/parameters.py",
        "launcher_scripts/gateway/schemas.py",
        "launcher_scripts/gateway/responses_schemas.py",
        "launcher_scripts/gateway/messages.py",
    ),
    "triton": ("launcher_scripts/kernels/",),
    "msgspec": ("launcher_scripts/engine/",),
    "model_signing": ("launcher_scripts/checkpoint/verification.py",),
    "llguidance": ("launcher_scripts/backends/fastertransformer/guidance.py",),
    "torch": (
        "launcher_scripts/kernels/",
        "launcher_scripts/engine/",
        "launcher_scripts/backends/fastertransformer/",
        "launcher_scripts/evaluation/tasks/transformers_model.py",
        "launcher_scripts/evaluation/tasks/megatron_models.py",
        "launcher_scripts/evaluation/tasks/megatron_models.py",
        "launcher_scripts/checkpoint/layout/layouts.py",
    ),
    "transformers": ("launcher_scripts/evaluation/tasks/transformers_model.py",),
    "lm_eval": ("launcher_scripts/evaluation/lm_eval_program.py",),
    "megatron": ("launcher_scripts/evaluation/tasks/megatron_models.py",),
    "nemo": ("launcher_scripts/evaluation/tasks/megatron_models.py",),
    "pytorch_lightning": ("launcher_scripts/evaluation/tasks/megatron_models.py",),
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imported(path: Path, *, at_start: bool = False) -> Iterator[str]:
    """Names of imported modules; `at_start` leaves out imports inside of functions."""
    nodes = tree(path).body if at_start else ast.walk(tree(path))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            if not all(map(ours, names)):
                yield node.module


def room(module: str) -> str:
    """The room that one of our modules belongs to."""
    if module == "launcher_scripts.main":
        return module
    parts = module.removeprefix("launcher_scripts.").split(".")
    inner = ".".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0]


def ours(module: str) -> bool:
    return module in MODULES


def check(rule: Callable[[Path], Iterator[str]], paths: Iterable[Path] = SOURCES) -> None:
    """Fail with everything that a rule says of the files."""
    faults = [f"{path}{fault}" for path in paths for fault in rule(path)]
    assert not faults, "\n".join(faults)


def test_rooms_import_only_their_neighbours() -> None:
    def rule(path: Path) -> Iterator[str]:
        own = room(module_name(path))
        if own == "launcher_scripts":
            return
        if own not in MAY_IMPORT:
            yield f": give the room {own} a line in MAY_IMPORT"
            return
        allowed = MAY_IMPORT[own] | {own, "launcher_scripts"}
        if "checkpoint" in allowed:
            allowed = allowed | {"checkpoint.formats"}
        for module in filter(ours, imported(path)):
            if room(module) not in allowed:
                yield f" may not import {module}"

    check(rule)


@pytest.mark.parametrize("name", COPIED)
def test_what_is_copied_stands_alone(name: str) -> None:
    assert not any(map(ours, imported(MODULES[f"launcher_scripts.{name}"])))


def test_a_copied_package_imports_itself_alone_by_relative_names() -> None:
    files = [path for name, path in MODULES.items() if name.startswith(COPIED_PACKAGE)]
    assert len(files) > 1
    for path in files:
        assert not any(map(ours, imported(path))), path
        levels = {node.level for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)}
        assert levels <= {0, 1}, path


def test_every_dependency_has_one_door() -> None:
    def rule(path: Path) -> Iterator[str]:
        for module in imported(path):
            doors = DOORS.get(module.partition(".")[0])
            if doors is not None and not str(path).startswith(doors):
                yield f" may not import {module}: see {doors}"

    check(rule)


def test_imports_have_no_cycle() -> None:
    graph = {
        name: {other for other in imported(path, at_start=True) if ours(other) and other != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_sizes() -> None:
    def rule(path: Path) -> Iterator[str]:
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            yield f" has {lines} lines: split it by noun"
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = body_lines(node)
                if length > FUNCTION_LINES:
                    yield f": {node.name} has {length} lines"

    check(rule)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring: a kernel has many parameters."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_modules_say_what_they_are() -> None:
    def rule(path: Path) -> Iterator[str]:
        if path.name in ("utils.py", "triton.py"):
            yield ": name it by its noun"
        if path.name == "__init__.py" and any(
            isinstance(node, ast.ClassDef) for node in ast.walk(tree(path))
        ):
            yield ": only a table"
        if (ROOT / path).read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(path)):
            yield " has no docstring"

    check(rule)


def test_habits() -> None:
    def rule(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assert):
                yield f":{node.lineno}: raise an error instead"
            if isinstance(node, ast.keyword) and node.arg == "shell":
                yield f":{node.lineno}: no shell, an argument list"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("eval", "exec", "os.system"):
                    yield f":{node.lineno}: no {called}"

    check(rule)


def test_texts_hold_no_machine_paths_and_no_promises() -> None:
    machine = re.compile(r"(?<![\w.$}])/(?:work|root|home)/\w+")
    promise = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

    def rule(path: Path) -> Iterator[str]:
        text = (ROOT / path).read_text(encoding="utf-8")
        for pattern in (machine, promise):
            yield from (f": {found}" for found in pattern.findall(text))

    check(rule, (*SOURCES, *TESTS, *TEXTS))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_complete(name: str) -> None:
    stage = STAGES[name]
    assert stage.name == name
    assert list((ROOT / "conf" / name).rglob("*.yaml")), f"conf/{name} has no YAML"
    for module in stage.modules:
        path = ROOT / "launcher_scripts" / "steps" / f"{module}.py"
        assert path.exists(), f"the stage {name} names the step {module}, which does not exist"
        first = rf'if __name__ == "__main__":\n    check_packages\(\s*"{module}"\)'
        text = path.read_text(encoding="utf-8")
        assert re.search(first, text), f"{path} does not check its packages"
        if name == "evaluate":
            said = f'run_evaluation("{module}", '
            assert said in text, f"{path} does not lock its results"
    for cluster in CLUSTERS:
        golden = ROOT / "tests" / "golden" / cluster / f"{name}.sh"
        assert golden.exists(), f"{golden.relative_to(ROOT)} is missing"


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_complete(name: str) -> None:
    assert CLUSTERS[name].type == name
    group = (ROOT / "conf" / "cluster_type" / f"{name}.yaml").read_text(encoding="utf-8")
    assert group.startswith("# @package _global_\n")
    assert yaml.safe_load((ROOT / "conf" / "cluster" / f"{name}.yaml").read_text())["type"] == name


def test_every_template_is_used() -> None:
    folder = ROOT / "templates"
    templates = [path for path in folder.rglob("*") if path.is_file()]
    files = [*templates, *(ROOT / path for path in SOURCES)]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    for template in templates:
        name = template.relative_to(folder).as_posix()
        # A section of the report is included by its key.
        key = template.name.removesuffix(".html.j2") if name.startswith("report/") else name
        used = f'"{name}"' in sources or f'"{key}"' in sources
        assert used, f"no code renders templates/{name}"


def test_the_evaluation_tasks_have_one_list() -> None:
    tasks = pytest.importorskip("launcher_scripts.evaluation.tasks").TASKS
    assert set(tasks) == set(TASK_NAMES), "TASK_NAMES and evaluation.tasks.TASKS differ"
    for path in (ROOT / "conf" / "evaluate").rglob("*.yaml"):
        assert set(yaml.safe_load(path.read_text())["tasks"]) <= set(TASK_NAMES), path
