"""evaluate.twin against a real server: a GPT and a T5 beside what transformers makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.config.settings import write_settings
from launcher_scripts.steps import measure_twin
from tests.server.processes import running

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("tritonserver")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The repository of a running server with `gpt` and `t5`, which streams; its ready file."""
    from tests.evaluation import twins

    folder = tmp_path_factory.mktemp("served_twins")
    sources = {
        "gpt": ("gpt3", twins.write_original(folder / "gpt")),
        "t5": ("t5", twins.write_t5_original(folder / "t5")),
    }
    repository = folder / "model_repo"
    for name, (model_type, source) in sources.items():
        twins.put_original(repository, name, source, model_type, decoupled=name == "t5")
    with running(folder / "deploy", repository, device="cpu") as step:
        step.wait_until_ready()
        yield repository, step.settings.ready_file


@pytest.mark.parametrize(("name", "protocol"), [("gpt", "grpc"), ("t5", "http")])
def test_a_served_model_is_its_original(
    served: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    protocol: str,
) -> None:
    from tests.evaluation import twins

    repository, ready_file = served
    settings = replace(
        twins.twin_settings(tmp_path / "results", repository / name / "1" / "1-gpu", ready_file),
        model_name=name,
        protocol=protocol,
        ready_timeout=20.0,
    )
    write_settings(settings, tmp_path / "settings.yaml")
    status = measure_twin.main(["--settings", str(tmp_path / "settings.yaml")])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "nothing was found that rounding does not explain" in said.out
    section = twins.read_section(settings)
    assert section["findings"] == []
    assert section["metrics"]["kl"]["value"] < 1e-9
    assert section["metrics"]["same_continuation"]["value"] == 1


def test_the_served_preprocessing_is_what_is_compared(
    served: tuple[Path, Path], tmp_path: Path
) -> None:
    from tests.evaluation import twins

    repository, ready_file = served
    folder = repository / "gpt" / "1" / "1-gpu"
    source = twins.write_original(tmp_path / "original", bos=False)
    settings = replace(
        twins.twin_settings(tmp_path / "results", folder, ready_file, checkpoint=str(source)),
        model_name="gpt",
        ready_timeout=20.0,
    )
    measure_twin.measure_twin(settings)
    assert [each["name"] for each in twins.read_section(settings)["findings"]] == ["added_bos"]
