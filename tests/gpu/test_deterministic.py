"""A deterministic model on CUDA: the same answers to the last bit, whatever runs beside."""

from __future__ import annotations

import pytest

from launcher_scripts.engine.runner import loading
from tests.engine.small_models import engine_for, random_tensors
from tests.engine.test_deterministic import LORA, check_company, check_prefixes
from tests.gpu import test_t5
from tests.gpu.test_engine import MODERN, wider

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

MODELS = {
    "gpt": wider(),
    "rope": wider(**MODERN),
    "lora": wider(**MODERN, parts=LORA),
    "post norms": wider(norm_placement="post"),
    "experts": wider(**MODERN, num_experts=7, experts_per_token=2),
    "t5": test_t5.wider(),
}
ROWS = [12, 96]  # of few the project's own kernels make products, of more cuBLAS


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("model", "quantization"),
    [*((model, None) for model in MODELS), *((model, "fp8") for model in ("gpt", "lora", "t5"))],
)
def test_a_row_is_answered_as_alone(model: str, quantization: str | None, rows: int) -> None:
    config = MODELS[model]
    tensors = test_t5.calm_tensors(config) if model == "t5" else random_tensors(config)
    engine = engine_for(
        config,
        tensors,
        device="cuda",
        data_type="bf16",
        quantization=quantization,
        max_batch_size=rows,
        deterministic=True,
    )
    check_company(engine, model, seed=rows)
    engine.close()


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_found_prefixes_and_drafts_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, rows: int, drafting: bool
) -> None:
    monkeypatch.setattr(loading, "FIXED_CHUNK", 32)
    config = MODELS["rope"]
    tensors = random_tensors(config)
    options = {"max_batch_size": rows, "deterministic": True, "enable_prefix_caching": True}
    if drafting:
        options["draft"] = config, tensors
    check_prefixes(lambda: engine_for(config, tensors, device="cuda", data_type="bf16", **options))
