"""The certificate: its statistics, planted faults, its file, its signature and its command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from launcher_scripts.checkpoint.verification import sign_repository
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.security import SigningKey
from launcher_scripts.evaluation.tasks.logits import (
    RowComparison,
    design_effect,
    equivalence,
    student_quantile,
    student_tail,
)
from launcher_scripts.evaluation.twin import certificate
from launcher_scripts.steps import certificate as command
from tests.evaluation import planted_faults
from tests.evaluation.planted_faults import FAULTS
from tests.evaluation.planting import Bench, Planted, is_found, is_located
from tests.server.test_signature import key_files


def row(differences: list[float]) -> RowComparison:
    """A row of which only the log-probabilities count."""
    count = len(differences)
    ones = np.ones(count + 1)
    served, reference = np.array(differences) - 2, np.full(count, -2.0)
    return RowComparison(0 * ones, ones > 0, ones.astype(int), served, reference, ones, ones, ones)


@pytest.mark.parametrize(
    ("tail", "free", "expected"),
    [(0.05, 1, 6.3138), (0.05, 9, 1.8331), (0.025, 30, 2.0423), (0.005, 4, 4.6041)],
)
def test_quantiles_are_those_of_the_tables(tail: float, free: int, expected: float) -> None:
    assert student_quantile(tail, free) == pytest.approx(expected, abs=1e-4)
    assert student_tail(expected, free) == pytest.approx(tail, abs=1e-5)
    assert student_tail(-expected, free) == pytest.approx(1 - tail, abs=1e-5)


def test_both_one_sided_tests_are_those_of_the_means_of_texts() -> None:
    """With texts of one length, the clustered test is Student's of the texts' means."""
    generator = np.random.default_rng(0)
    values = generator.normal(0.002, 0.01, (8, 5))
    found = equivalence([row(list(line)) for line in values], 0.01)
    means = values.mean(axis=1)
    error = means.std(ddof=1) / np.sqrt(8)
    assert found.mean == pytest.approx(means.mean())
    assert found.standard_error == pytest.approx(error)
    assert found.p_above == pytest.approx(student_tail((0.01 - means.mean()) / error, 7))
    assert found.p_below == pytest.approx(student_tail((0.01 + means.mean()) / error, 7))
    assert found.high is not None
    assert found.equivalent == (found.p <= 0.05) == (found.high < 0.01)


def test_a_shift_is_different_and_one_text_decides_nothing() -> None:
    generator = np.random.default_rng(1)
    shifted = [row(list(generator.normal(0.1, 0.01, 5))) for _ in range(8)]
    found = equivalence(shifted, 0.01)
    assert found.different and not found.equivalent
    alone = equivalence(shifted[:1], 0.01)
    assert (alone.p, alone.low, alone.different) == (1.0, None, False)


def test_false_equivalence_has_the_level_of_the_test() -> None:
    """At the margin itself, with texts that shift as a whole, alpha of the tests say equivalent."""
    generator, accepted = np.random.default_rng(2), 0
    for _ in range(1000):
        texts = generator.normal(0.01, 0.004, (10, 1)) + generator.normal(0, 0.004, (10, 4))
        accepted += equivalence([row(list(line)) for line in texts], 0.01).equivalent
    assert 25 <= accepted <= 78


def test_flips_of_one_text_count_as_fewer() -> None:
    together = [np.ones(10), *[np.zeros(10)] * 9]
    assert design_effect(together) > 5
    spread = [np.eye(10)[n] for n in range(10)]
    assert design_effect(spread) == 1.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


HANDFUL = {
    ("llama", "gate and up exchanged"),
    ("llama", "the other rotary layout"),
    ("qwen3", "sliding_window 5"),
    ("gpt2", "no bias of a norm, hidden"),
    ("llama", "rotary_base 20000.0"),
    ("llama", "tokenizer: a dropped token"),
    ("llama", "tokenizer: an added token more"),
    ("mixtral", "queries' heads rolled"),
    ("llama", "a server that is not exact"),
}


@pytest.mark.parametrize("key", sorted(HANDFUL))
def test_a_planted_fault_is_located(bench: Bench, key: tuple[str, str]) -> None:
    fault = [one for one in FAULTS if (one.family, one.name) == key][-1]
    content = bench.certificate(fault)
    assert is_found(content)
    assert is_located(fault, content), content["faults"]


def test_a_clean_export_is_equivalent_and_verified(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bench.certificate(Planted("llama", "clean", None, ()))
    assert content["statement"] == "equivalent"
    assert content["faults"] == [] and content["layers"]["first"] is None
    assert content["flips"]["count"] == 0 and content["test"]["p"] < 1e-3
    certificate.write_certificate(tmp_path, content)
    arguments = ["verify", str(tmp_path), "--export", str(bench.clean("llama"))]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    for name in ("manifest", "tokenizer", "chat_template", "shards"):
        assert f"\n{name}: " in printed
    other = [*arguments[:-1], str(bench.clean("llama", "bf16"))]
    assert command.main(other) == 3
    assert "it is of another manifest" in capsys.readouterr().err


def test_what_is_not_a_certificate(tmp_path: Path) -> None:
    file = tmp_path / certificate.FILE_NAME
    for text in ("{", json.dumps({"schema": 1, "statement": "fine", "digests": {}})):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is not a certificate"):
            certificate.read(tmp_path)


def test_a_signature_covers_the_certificate(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("model_signing")
    _, private, public = key_files(tmp_path, "signer")
    folder = certificate.write_certificate(
        tmp_path, bench.certificate(Planted("llama", "clean", None, ()))
    )
    sign_repository(folder, SigningKey(private), certificate.SIGNED_KEY)
    arguments = ["verify", str(folder), "--public-key", public]
    assert command.main(arguments) == 0
    assert "signature: valid" in capsys.readouterr().out
    file = folder / certificate.FILE_NAME
    file.write_text(file.read_text().replace('"schema": 1', '"schema":  1'))
    assert command.main(arguments) == 3
    assert f"altered: {certificate.FILE_NAME}" in capsys.readouterr().err


@pytest.mark.slow
def test_faults_are_found_and_located() -> None:
    assert planted_faults.main(()) == 0
