"""The line before an export: parameters are those transformers counts."""

from pathlib import Path

import pytest

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.layout.tasks import plan_tasks
from launcher_scripts.checkpoint.verification import Forecast
from launcher_scripts.models import family_of
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS

# final_logits_bias is stored, but no parameter; a Marian's positions are not stored.
STORED = {"bart": 67, "mbart": 67, "pegasus": 67, "marian": 67 - 2 * 20 * 16}


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_parameters_are_counted_once(tmp_path: Path, name: str) -> None:
    model = (DECODERS | ENCODER_DECODERS)[name].save(tmp_path / "hf")
    checkpoint = open_source(Archive(tmp_path / "hf"))
    specs = family_of(checkpoint.config).weights(checkpoint.config)
    tasks = plan_tasks(checkpoint, specs, name)
    forecast = Forecast.of("huggingface", "gpt", tasks, 1000, 10**9)
    expected = model.num_parameters() + STORED.get(name, 0)
    assert forecast.parameters == expected
    assert forecast.bytes_to_read == 4 * expected


def test_the_line() -> None:
    forecast = Forecast("nemo", "t5", 2_849_757_184, 11_399_028_736, 5_699_514_368, 60 * 10**9)
    assert str(forecast) == (
        "plan: a t5 of 2,849.8 million parameters from nemo; reads 11.40 GB, writes 5.70 GB, "
        "60 GB free; about 28 s"
    )
