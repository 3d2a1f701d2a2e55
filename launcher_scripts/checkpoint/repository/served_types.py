"""What a checkpoint can be served as: the user's `model_type`, and its name in config.pbtxt."""

from __future__ import annotations

from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES

KEY = "export.run.model_type"


def backend_model_type(model_type: str, config: ModelConfig) -> str:
    """The row of CONTRACTS that `model_type` means.

    Raises ConfigError when it is unknown, or cannot serve a model of these hyperparameters.
    """
    name = lookup(BACKEND_MODEL_TYPES, model_type, KEY)
    fitting = fitting_model_types(config)
    if model_type in fitting:
        return name
    alone = " (an encoder alone)" if _encoder_only(config) else ""
    what = f"the checkpoint, of family {family_of(config).name}{alone},"
    raise ConfigError(
        problem(
            f"{what} cannot be served as this model_type",
            got=model_type,
            choices=fitting,
            change=KEY,
        )
    )


def fitting_model_types(config: ModelConfig) -> list[str]:
    """The user's model_types that can serve a model of these hyperparameters, the usual first."""
    family, encoder_only = family_of(config).name, _encoder_only(config)
    return [
        key
        for key, row in BACKEND_MODEL_TYPES.items()
        if CONTRACTS[row].family == family and (CONTRACTS[row].encoder_only or not encoder_only)
    ]


def _encoder_only(config: ModelConfig) -> bool:
    return bool(getattr(config, "encoder_only", False))
