"""What a server's first steps launch is known, and compiled, without its weights or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from triton import knobs

from benchmarks.shapes import CONFIGS
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine import engine as engine_module
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.plan import Choice, Plan
from launcher_scripts.engine.model.families import kernels_for
from launcher_scripts.engine.runner import kernel_precompiler as precompile
from launcher_scripts.engine.runner import prefill, prompt_batch
from launcher_scripts.engine.runner.kernel_precompiler import (
    EagerGraphs,
    KernelPrecompiler,
    traced_runner,
)
from launcher_scripts.engine.runner.loading import EngineSettings, Launches, Timeline
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.kernels.cuda import compiling
from launcher_scripts.kernels.cuda.compiling import traits_of
from launcher_scripts.models.adapters import Adapters
from launcher_scripts.models.family import ModelConfig
from tests.engine.small_agm import agm_config
from tests.engine.small_bart import bart_config
from tests.engine.small_models import (
    generate,
    random_tensors,
    runner_for,
    small_config,
    write_checkpoint,
)
from tests.engine.small_t5 import t5_config, t5_tensors
from tests.kernels.hopper import Hopper, hopper

__all__ = ["hopper"]

GPU = torch.device("cuda")
CONFIG = small_config(hidden_size=64, num_heads=1, num_kv_heads=1, head_size=64, max_positions=128)
ALL_BUCKETS = prompt_batch.TOKEN_BUCKETS
FEW_BUCKETS = (ALL_BUCKETS[0], ALL_BUCKETS[2], ALL_BUCKETS[-1])
NOTE = "the first kernels are compiled"
LORA = Adapters(
    lora_names=("sql", "law"),
    lora_rank=8,
    lora_targets=("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h"),
)
SMALL = {
    "ALiBi": small_config(position_embedding="alibi"),
    "norms after the sums": small_config(norm_placement="post"),
    "normed embeddings": small_config(embedding_norm=True),
    "wide heads": small_config(head_size=160, num_heads=2, num_kv_heads=2),
    "windows": small_config(num_layers=4, sliding_window=8, full_attention_layers="3"),
    "experts": small_config(mlp_bias=False, num_experts=5, experts_per_token=2),
    "few layers with experts": small_config(
        mlp_bias=False,
        num_layers=4,
        num_experts=5,
        experts_per_token=2,
        router_score_function="sigmoid",
        expert_bias=True,
        dense_layers="0,1,2",
        dense_ffn_size=48,
    ),
    "a score of no token": small_config(
        activation="clamped_swiglu",
        gated=True,
        attention_sinks=True,
        num_experts=5,
        experts_per_token=2,
        router_bias=True,
    ),
    "LoRA adapters": small_config(parts=LORA),
    "LoRA of gates": small_config(parts=LORA, gated=True, norm_placement="sandwich"),
    "an encoder": t5_config(encoder_only=True),
    "an encoder alone": t5_config(encoder_only=True, num_decoder_layers=0),
    "BART": bart_config(),
    "AGM": agm_config(),
}


def settings(**more: object) -> EngineSettings:
    return EngineSettings(Path("nowhere"), **{"data_type": "bf16", "max_batch_size": 8, **more})


class NotedKernel:
    """Stands for a compiled kernel, whose second launch takes a tenth of the first one's time."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """There is none."""

    def run(self, *_: object) -> None:
        """Nothing runs."""


@contextmanager
def launches_noted() -> Iterator[set[tuple[str, str]]]:
    """The kernels of launches in the block, by function, types and constants; none is compiled."""
    found: set[tuple[str, str]] = set()
    noted: list[tuple[dict[str, Any], str]] = []

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        found.add((fn.name, key))
        kernels, *_others = fn.jit_function.device_caches[compile["device"]]
        kernels[key] = NotedKernel()
        noted.append((kernels, key))
        return True  # Triton is not to compile it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        yield found
    for kernels, key in noted:
        del kernels[key]


@torch.inference_mode()
def record_all(runner: Runner) -> None:
    runner.execute(Plan(record=tuple(runner.shapes_to_record())))


def traced(model: ModelConfig, **more: object) -> set[tuple[str, str]]:
    with launches_noted() as found, torch.inference_mode():
        record_all(traced_runner(settings(**more), precompile._shortened(model)))
    return found


def set_buckets(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    for module in (prefill, prompt_batch):
        monkeypatch.setattr(module, "TOKEN_BUCKETS", sizes)


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of prompts of every size takes seconds."""
    set_buckets(monkeypatch, FEW_BUCKETS)


@pytest.mark.usefixtures("hopper")
def test_few_sizes_of_prompts_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few = traced(CONFIG)
    set_buckets(monkeypatch, ALL_BUCKETS)
    assert traced(CONFIG) == few


INT8, FP8 = {"quantization": "int8"}, {"quantization": "fp8"}
KEPT_FP8 = {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("126m", {}, marks=pytest.mark.slow),
        ("1.3b-modern", FP8 | KEPT_FP8),
        pytest.param("t5-base", INT8, marks=pytest.mark.slow),
    ],
)
def test_neither_the_number_of_layers_nor_that_of_tokens_matters(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch, name: str, kind: dict[str, str]
) -> None:
    few = traced(CONFIGS[name], **kind)
    assert len(few) > 20
    config = CONFIGS[name]
    names = [key for key in ("num_layers", "num_decoder_layers") if hasattr(config, key)]
    monkeypatch.setattr(
        precompile, "_shortened", lambda _: replace(config, **dict.fromkeys(names, 3))
    )
    assert traced(config, max_tokens=2000, **kind) == few
    assert not hopper.loaded


@pytest.mark.parametrize(
    ("name", "data_type"),
    [
        *(("experts", "bf16"), ("LoRA adapters", "bf16"), ("BART", "bf16"), ("windows", "fp32")),
        *(pytest.param(name, "bf16", marks=pytest.mark.slow) for name in SMALL),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_all_kinds_of_models(name: str, data_type: str) -> None:
    assert len(traced(SMALL[name], data_type=data_type, max_batch_size=80)) >= 5


@pytest.mark.usefixtures("hopper")
def test_those_of_a_draft_model() -> None:
    draft = SMALL["wide heads"]
    with launches_noted() as found:
        record_all(traced_runner(settings(), SMALL["LoRA adapters"], draft))
    assert found > traced(SMALL["LoRA adapters"])
    shapes = traced_runner(settings(), SMALL["ALiBi"], draft).shapes_to_record()
    assert {shape.choice for shape in shapes if shape.draft_model} == {Choice.GREEDY}


@pytest.mark.usefixtures("hopper")
def test_layers_with_a_window_and_without() -> None:
    """Two layers stand for all: one of each kind."""
    kinds = [
        small_config(num_layers=6, sliding_window=8, full_attention_layers=layers)
        for layers in ("1", "2,5", None)
    ]
    one, other, windows_alone = map(traced, kinds)
    assert one == other > windows_alone


@pytest.mark.usefixtures("hopper")
def test_layers_that_do_not_rotate() -> None:
    """Layers of three kinds need what each of them needs, with a window or without it."""
    rope = small_config(position_embedding="rope", num_layers=6)
    some, window = {"unrotated_layers": "2,5"}, {"sliding_window": 8, "full_attention_layers": "2"}
    plain, mixed = traced(rope), traced(replace(rope, **some))
    assert mixed > plain
    assert traced(replace(rope, **some, **window)) > traced(replace(rope, **window))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["126m", "t5-base"])
def test_ranks_that_are_not_there(name: str) -> None:
    two, model = Parallelism(2, 1), CONFIGS[name]
    alone = traced(model, parallelism=two)
    shared = traced(model, parallelism=two, enable_custom_all_reduce=True)
    assert named(shared - alone) >= {
        "gemv_to_peers",
        "add_from_peers",
        "parts_to_owner",
        "sums_to_peers",
        "exchange_best",
    }
    prompts = {"attend_blocks"} if name == "t5-base" else {"attend_prompts"}
    assert named(alone) >= {*prompts, "add_and_normalize"}


def named(launches: set[tuple[str, str]]) -> set[str]:
    """The kernels' functions."""
    return {name.rpartition(".")[2] for name, _ in launches}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("gpt", kind) for kind in ({}, INT8)),
        ("t5", FP8 | KEPT_FP8),
        *(pytest.param("gpt", kind, marks=pytest.mark.slow) for kind in (FP8, KEPT_FP8)),
        *(pytest.param("t5", kind, marks=pytest.mark.slow) for kind in ({}, INT8)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_tensors_with_values_need_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: dict[str, str]
) -> None:
    """All that a rank records, and nothing else, is compiled beforehand."""
    config = small_config(num_layers=3) if family == "gpt" else t5_config()
    tensors = (random_tensors if family == "gpt" else t5_tensors)(config)
    options = {"data_type": "bf16", "max_batch_size": 8, **kind}
    foreseen = traced(config, **options)
    monkeypatch.setattr(compiling, "INTERPRETER", traits_of(torch.device("meta")))
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what kernels would have written
    monkeypatch.setattr(torch, "mm", lambda first, second, **_: first.float() @ second.float())
    launches = Launches(kernels_for("cuda"), EagerGraphs())
    with launches_noted() as found:
        record_all(runner_for(config, tensors, launches=launches, **options)[1])
    assert found == foreseen
    assert len(found) > 20


@pytest.fixture
def compiled(hopper: Hopper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Of every kernel that is asked for: whether it was found on the disk, which is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(hopper, "loaded", [])
    asked: list[bool] = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, cache_hit, **_: asked.append(cache_hit)
    )
    return asked


def few_kernels(folder: Path) -> EngineSettings:
    """An engine of one row."""
    write_checkpoint(folder, CONFIG, random_tensors(CONFIG), 1)
    return EngineSettings(folder, data_type="bf16", device="cpu", max_batch_size=1)


@pytest.fixture
def greedy_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that sample take the most time to compile."""
    shapes = Runner.shapes_to_record
    monkeypatch.setattr(
        Runner,
        "shapes_to_record",
        lambda runner: [
            each for each in shapes(runner) if each.choice == Choice.GREEDY and not each.prompt
        ],
    )


@pytest.mark.usefixtures("greedy_steps_alone")
def test_an_engine_waits_for_its_kernels(
    hopper: Hopper, compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(
        engine_module, "KernelPrecompiler", lambda *by_name: KernelPrecompiler(*by_name[:3], GPU)
    )
    engine = Engine.load(few_kernels(tmp_path / "1-gpu"))
    try:
        assert len(generate(engine, (1, 2), 3)) == 3
    finally:
        engine.close()
    steps = [what for what, _ in engine.timeline.events]
    assert steps.index("rank 0 has its weights") < steps.index(NOTE)
    assert steps.index(NOTE) < steps.index("all ranks are ready")
    assert len(compiled) == len(hopper.loaded) >= 10
    assert not any(compiled)
    with torch.inference_mode():  # what the rank would do on a GPU
        record_all(traced_runner(engine.settings, CONFIG))
    memory, written = torch.zeros(12, 33, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for count in (1, 300):  # as rows that choose eagerly do, in other places of the memory
        tokens, slots = torch.arange(count + 1)[1:], torch.arange(count)
        kernels_for("cuda").copy_to_host(tokens, slots, memory, written, 32)
    assert len(compiled) == len(hopper.loaded)
    assert "compiled when they are needed" not in capsys.readouterr().out
    monkeypatch.setattr(precompile, "traced_runner", None)  # which a later start does not call
    later = partial(KernelPrecompiler, draft=None, device=GPU)
    later(replace(engine.settings, checkpoint_dir=tmp_path), CONFIG).wait(Timeline())
    assert capsys.readouterr().out == ""
    later(replace(engine.settings, max_batch_size=2), CONFIG).wait(Timeline())
    assert "kernels are compiled when they are needed" in capsys.readouterr().out


@pytest.mark.usefixtures("hopper")
def test_a_failure_is_said_and_nothing_waits(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fails(*_: object) -> Runner:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(precompile, "traced_runner", fails)
    KernelPrecompiler(settings(), CONFIG, None, GPU).wait(Timeline())
    said = "kernels are compiled when they are needed: RuntimeError: no such operation\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("device", "parallelism"), [("cpu", Parallelism()), ("cuda", Parallelism(1, 2))]
)
def test_where_nothing_is_compiled(device: str, parallelism: Parallelism) -> None:
    timeline = Timeline()
    wanted = settings(parallelism=parallelism)
    KernelPrecompiler(wanted, CONFIG, None, torch.device(device)).wait(timeline)
    assert timeline.events == []
