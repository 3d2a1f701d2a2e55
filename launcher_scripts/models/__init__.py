"""The model families: one row each."""

from launcher_scripts.models import agm, bart, gpt, t5, t5_weights
from launcher_scripts.models.family import Family, ModelConfig

FAMILIES = {
    "gpt": Family("gpt", gpt.GPTConfig, gpt.weights),
    "t5": Family("t5", t5.T5Config, t5_weights.weights),
    "bart": Family("bart", bart.BartConfig, bart.weights),
    "agm": Family("agm", agm.AgmConfig, agm.weights),
}


def family_of(config: ModelConfig) -> Family:
    """The row whose hyperparameters these are."""
    return next(row for row in FAMILIES.values() if row.config_type is type(config))
