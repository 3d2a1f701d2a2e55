"""Errors that say what, got, choices, and where to change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

# Of what was got: a file may hold names of any length.
_MAX_LETTERS = 2000

Member = TypeVar("Member")
Raised = TypeVar("Raised", bound="LauncherError")


class LauncherError(Exception):
    """An error whose message is meant for the user; entry points print it without a traceback.

    problems:  the single findings, where the error reports several
    exit_code: what the process that prints it should exit with
    """

    problems: tuple[str, ...] = ()
    exit_code: int = 1


class ConfigError(LauncherError):
    """The configuration asks for something that cannot be done."""


class CheckpointError(LauncherError):
    """A checkpoint, as read or as written, is not what it should be."""


class VerdictError(LauncherError):
    """The verdict of an evaluation is not GO; exit_code is the verdict's."""


class ClusterError(LauncherError):
    """The cluster refused or lost a job."""


class ServerError(LauncherError):
    """A server did not start, or stopped when it should not."""


class RequestError(LauncherError):
    """One request to the engine is wrong; the others go on."""


class BusyError(RequestError):
    """One request finds no room; the same one may be sent again later."""


def problem(
    subject: str,
    *,
    got: object = None,
    choices: Iterable[object] | None = None,
    change: str | None = None,
) -> str:
    """One sentence: what is wrong, what was got, the valid choices, the key to change."""
    parts = [subject]
    if got is not None:
        text = repr(got)
        parts.append(f"got {text if len(text) <= _MAX_LETTERS else text[:_MAX_LETTERS] + '...'}")
    if choices is not None:
        parts.append("choices: " + ", ".join(str(choice) for choice in choices))
    if change is not None:
        parts.append(f"change {change}")
    return "; ".join(parts)


class Problems:
    """Collects problems so that the user sees all of them at once.

    >>> problems = Problems("the export settings")
    >>> problems.add("tensor_model_parallel_size must be at least 1", got=0)
    >>> problems.raise_if_any(ConfigError)
    Traceback (most recent call last):
    ...
    launcher_scripts.common.errors.ConfigError: 1 problem in the export settings:
    - tensor_model_parallel_size must be at least 1; got 0
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.messages: list[str] = []

    def add(
        self,
        subject: str,
        *,
        got: object = None,
        choices: Iterable[object] | None = None,
        change: str | None = None,
    ) -> None:
        self.messages.append(problem(subject, got=got, choices=choices, change=change))

    def add_first(self, messages: Sequence[str], limit: int) -> None:
        """Note the first of many findings of one kind, and how many more there are."""
        for message in messages[:limit]:
            self.add(message)
        if len(messages) > limit:
            self.add(f"and {len(messages) - limit} more like it")

    def check_choice(
        self, subject: str, got: str, choices: Iterable[str], change: str | None = None
    ) -> None:
        """Note a value that is none of the choices."""
        names = tuple(choices)
        if got not in names:
            self.add(f"unknown {subject}", got=got, choices=names, change=change)

    def check_minimum(
        self, subject: str, got: float, minimum: int, change: str | None = None
    ) -> None:
        """Note a number that is too small."""
        if not got >= minimum:  # also what is no number
            self.add(f"{subject} must be at least {minimum}", got=got, change=change)

    def merge(self, error: LauncherError) -> None:
        """Take over what another check has found, unless it is known already."""
        messages = error.problems or (str(error),)
        self.messages.extend(message for message in messages if message not in self.messages)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take over an error of the block instead of letting it pass."""
        try:
            yield
        except LauncherError as error:
            self.merge(error)

    def error(self, kind: type[Raised]) -> Raised:
        """The findings as one error."""
        count = len(self.messages)
        head = f"{count} problem{'s' if count > 1 else ''} in {self.subject}:"
        error = kind("\n".join([head, *(f"- {message}" for message in self.messages)]))
        error.problems = tuple(self.messages)
        return error

    def raise_if_any(self, error: type[LauncherError]) -> None:
        if self.messages:
            raise self.error(error)


def lookup(table: Mapping[str, Member], name: str, key: str) -> Member:
    """The member of `table` called `name`; a wrong name is answered with the right ones.

    `key` is the configuration key the name came from, for the message.
    """
    try:
        return table[name]
    except KeyError:
        raise ConfigError(
            problem(f"unknown {key}", got=name, choices=sorted(table), change=key)
        ) from None
