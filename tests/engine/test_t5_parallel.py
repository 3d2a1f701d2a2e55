"""Every TP x PP of a T5 gives what one rank gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.engine.small_models import (
    check_same_answers,
    engine_for,
    load_engine,
    write_checkpoint,
)
from tests.engine.small_t5 import (
    DECODER,
    SOURCE,
    VARIANTS,
    as_encoder,
    decoder_logits,
    encode,
    t5_config,
    t5_tensors,
)

CASES = [
    ("google", 2, 1),
    ("cross_bias", 1, 2),
    ("separate", 2, 2),
    pytest.param("cross_bias", 4, 1, marks=pytest.mark.slow),
    pytest.param("gated", 1, 2, marks=pytest.mark.slow),
    pytest.param("learned", 2, 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "tp", "pp"), CASES)
def test_ranks_agree_with_one(tmp_path: Path, name, tp, pp):
    config = t5_config(**VARIANTS[name], vocab_size=65)
    tensors = t5_tensors(config)
    alone = engine_for(config, tensors)
    together = load_engine(tmp_path, config, tensors, tp, pp)
    want, got = (decoder_logits(engine, SOURCE, DECODER) for engine in (alone, together))
    assert (want - got).abs().max() <= 2e-5 * want.abs().max()
    check_same_answers(alone, together, SOURCE)
    alone.close()
    together.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_the_encoder_of_a_whole_checkpoint(tmp_path: Path, tp, pp):
    """model_type T5-Encoder loads the encoder alone, and every rank's heads are in the answer."""
    config = t5_config(**VARIANTS["nemo"], num_decoder_layers=1)
    tensors = t5_tensors(config)
    alone = engine_for(as_encoder(config), tensors)
    together = load_engine(tmp_path, config, tensors, tp, pp, model_type="T5-Encoder")
    together.warm_up()
    for source in (SOURCE, SOURCE[:1]):
        one, many = (encode(engine, source, attentions=True) for engine in (alone, together))
        assert many.hidden_state.shape == (len(source), config.hidden_size)
        assert many.attentions.shape == (2, 4, len(source), len(source))
        assert (one.hidden_state - many.hidden_state).abs().max() <= 2e-5
        assert (one.attentions - many.attentions).abs().max() <= 2e-5
    alone.close()
    together.close()


def test_what_a_checkpoint_cannot_be_served_as(tmp_path: Path):
    config = t5_config()
    folder = write_checkpoint(tmp_path / "1-gpu", config, t5_tensors(config), 1)

    def load(**more: object) -> None:
        Engine.load(EngineSettings(folder, device="cpu", **more))

    with pytest.raises(ConfigError, match=r"of family t5, cannot .*got 'GPT'; choices: T5, T5-Enc"):
        load(model_type="GPT")
    with pytest.raises(ConfigError, match=r"unknown model_type; got 'T6'; choices: .*GPT, .*T5"):
        load(model_type="T6")
    with pytest.raises(ConfigError, match="pipeline_para_size 3 exceeds the model's 2 layers"):
        load(parallelism=Parallelism(1, 3))


def test_an_encoders_own_checkpoint(tmp_path: Path):
    config = replace(as_encoder(t5_config()), num_decoder_layers=0)
    tensors = t5_tensors(config)
    engine = load_engine(tmp_path, config, tensors, 1, 1)
    assert encode(engine, SOURCE).hidden_state.shape == (len(SOURCE), config.hidden_size)
    engine.close()
    with pytest.raises(ConfigError, match="choices: T5-Encoder"):
        load_engine(tmp_path, config, tensors, 1, 1, model_type="T5")
