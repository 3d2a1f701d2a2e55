"""What a checkpoint can be served as: the user's `model_type`, and its name in config.pbtxt."""

from __future__ import annotations

from launcher_scripts.contracts import CONTRACTS
from launcher_scripts.errors import ConfigError, lookup, problem
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES

KEY = "export.run.model_type"


def backend_model_type(model_type: str, config: ModelConfig) -> str:
    """The row of CONTRACTS that `model_type` means.

    Raises ConfigError when it is unknown, or cannot serve a model of these hyperparameters.
    """
    name = lookup(BACKEND_MODEL_TYPES, model_type, KEY)
    family = family_of(config).name
    encoder_only = bool(getattr(config, "encoder_only", False))
    fitting = [
        key
        for key, row in BACKEND_MODEL_TYPES.items()
        if CONTRACTS[row].family == family and (CONTRACTS[row].encoder_only or not encoder_only)
    ]
    if model_type in fitting:
        return name
    what = f"the checkpoint, of family {family}{' (an encoder alone)' if encoder_only else ''},"
    raise ConfigError(
        problem(
            f"{what} cannot be served as this model_type",
            got=model_type,
            choices=fitting,
            change=KEY,
        )
    )
