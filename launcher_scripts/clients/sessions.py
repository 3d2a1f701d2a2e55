"""Sessions of interactive text generation: their requests' order and their further tensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from launcher_scripts.clients.connection import SequenceStep, Tensors
from launcher_scripts.clients.models import Models
from launcher_scripts.common.errors import ConfigError, Problems, problem


def steps(flags: argparse.Namespace, rows: int) -> Iterator[tuple[SequenceStep, Tensors]]:
    """The requests of one session, the first and the last marked, with their further tensors:
    the first one carries the session's sizes, UINT32 [rows, 1] each.
    """
    sizes = {
        "session_len": np.full((rows, 1), flags.session_len, np.uint32),
        "memory_len": np.full((rows, 1), flags.memory_len, np.uint32),
    }
    last = flags.num_session_steps - 1
    for number in range(flags.num_session_steps):
        step = SequenceStep(flags.session_id, number == 0, number == last)
        yield step, sizes if step.start else {}


def in_session(tensors: Tensors) -> Tensors:
    """The tensors with the axis of one that a model with sessions has in front: [1, rows, ...]."""
    return {name: array[None] for name, array in tensors.items()}


def require_sessions(models: Models) -> None:
    """Raises ConfigError for a model that forgets every request."""
    if not models.sessions:
        raise ConfigError(
            problem(
                f"model {models.name} has no sessions",
                change="--model, or export with export.triton_deployment.interactive=True",
            )
        )


def check_flags(flags: argparse.Namespace) -> None:
    """Raises ConfigError that names every number that is too small."""
    problems = Problems("the session's flags")
    for name in ("num_session_steps", "session_len", "memory_len", "session_id"):
        problems.check_at_least(name, getattr(flags, name), 1, f"--{name}")
    problems.raise_if_any(ConfigError)
