"""Which model of a server is meant, and the text models around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.clients.connection import is_decoupled
from launcher_scripts.clients.remote import RemoteServer
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.models.repository import TEXT_MODELS

DEFAULT_MODEL = "fastertransformer"
_OUR_BACKEND = "fastertransformer"


@dataclass(frozen=True)
class Models:
    """One model that generates, and the names of the text models around it (role -> name).

    model_type: what config.pbtxt says of the model
    decoupled:  whether it answers a request with several responses
    sessions:   whether a request goes on where the one before it ended
    """

    name: str
    model_type: str
    decoupled: bool
    sessions: bool
    text: dict[str, str]

    def text_model(self, role: str) -> str:
        """The text model of a role; raises ConfigError where the server has none."""
        if role not in self.text:
            raise ConfigError(
                problem(
                    f"the server has no {role} model for {self.name}",
                    choices=sorted(self.text.values()),
                    change="export.model.tokenizer",
                )
            )
        return self.text[role]


def find_models(server: RemoteServer, wanted: str | None) -> Models:
    """The model called `wanted`; without a name the tools' usual one, else the only one."""
    served = server.models()
    if wanted is not None and wanted not in served:
        raise ConfigError(
            problem("the server has no such model", got=wanted, choices=served, change="--model")
        )
    name = wanted or (DEFAULT_MODEL if DEFAULT_MODEL in served else None)
    configs = {each: server.model_config(each) for each in ([name] if name else served)}
    if name is None:
        ours = [each for each, config in configs.items() if config.get("backend") == _OUR_BACKEND]
        if len(ours) != 1:
            raise ConfigError(
                problem("which model is meant", choices=ours or served, change="--model")
            )
        (name,) = ours
    config = configs[name]
    text = {}
    for role in TEXT_MODELS:
        own = [each for each in (f"{name}_{role}", role) if each in served]
        text.update({role: own[0]} if own else {})
    model_type = parameter(config, "model_type") or "GPT"
    return Models(name, model_type, is_decoupled(config), "sequence_batching" in config, text)


def parameters_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a config.pbtxt as JSON."""
    given = config.get("parameters", {})
    return {name: str(value.get("string_value", "")) for name, value in given.items()}


def parameter(config: Mapping[str, Any], name: str) -> str | None:
    """A parameter of config.pbtxt; None where it has none of that name."""
    return parameters_of(config).get(name)
