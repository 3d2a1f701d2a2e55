"""The model families: one row each."""

import math

from launcher_scripts.models import agm, bart, gpt, gpt_weights, t5, t5_weights
from launcher_scripts.models.family import Family, ModelConfig

FAMILIES = {
    "gpt": Family("gpt", gpt.GPTConfig, gpt_weights.weights),
    "t5": Family("t5", t5.T5Config, t5_weights.weights),
    "bart": Family("bart", bart.BartConfig, bart.weights),
    "agm": Family("agm", agm.AgmConfig, agm.weights),
}


def family_of(config: ModelConfig) -> Family:
    """The row whose hyperparameters these are."""
    return next(row for row in FAMILIES.values() if row.config_type is type(config))


def value_count(config: ModelConfig, tp_size: int = 1) -> int:
    """Returns the number of values in all weight files of `tp_size` ranks together."""
    return sum(
        math.prod(spec.shape_on(config.of_layer(layer), tp_size)) * len(spec.tp_ranks(tp_size))
        for spec in family_of(config).weights(config)
        for layer in spec.layer_numbers(config)
    )
