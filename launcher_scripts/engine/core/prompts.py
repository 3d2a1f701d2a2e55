"""A request's prompt: which of its tokens are virtual, and whether the model has what it names."""

from __future__ import annotations

from launcher_scripts.common.errors import Problems
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.session import Session
from launcher_scripts.models.adapters import adapters_of
from launcher_scripts.models.family import ModelConfig


def prompt_start_id(config: ModelConfig) -> int:
    """The first id that is a virtual token: config.ini's, or the first beyond the vocabulary."""
    return adapters_of(config).prompt_start_id or config.vocab_size


def real_ids(request: GenerateRequest, start: int) -> tuple[int, ...]:
    """input_ids without virtual tokens, which begin with the id `start`."""
    if request.soft_prompt or not _has_prompt(request):
        return request.input_ids
    return tuple(token for token in request.input_ids if token < start)


def with_prompt(
    request: GenerateRequest, ids: tuple[int, ...], config: ModelConfig
) -> tuple[int, ...]:
    """ids as the engine has them: -1 - n stands for row n of the prompt table."""
    if not _has_prompt(request):
        return ids
    if request.soft_prompt:
        return (*range(-1, -1 - _length(request, config), -1), *ids)
    start = prompt_start_id(config)
    return tuple(start - 1 - token if token >= start else token for token in ids)


def prompt_in_session(
    session: Session, request: GenerateRequest, prompt: tuple[int, ...]
) -> tuple[int, ...]:
    """What the request adds to the cache: the token left over from before, and its own prompt.

    A request without ids goes on where the session is, be it after an end token.
    """
    if request.input_ids or not session.positions:
        return (*session.pending, *prompt)
    return session.pending or session.ended


def check_adapters(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    """Whether the model has the tables and vectors that the request names."""
    parts = adapters_of(config)
    if request.ia3_task is not None:
        if not parts.ia3_num_tasks:
            problems.add("Cannot request ia3_tasks, model has no IA3 adapters")
        elif not 0 <= request.ia3_task < parts.ia3_num_tasks:
            choices = (f"0-{parts.ia3_num_tasks - 1}",)
            problems.add(
                "Requested IA3 tasks aren't in the range", got=request.ia3_task, choices=choices
            )
    if request.lora_adapter not in (None, *range(len(parts.lora_names))):
        problems.add(
            "lora_task_id names no LoRA adapter of the model",
            got=request.lora_adapter,
            choices=[f"{number} ({name})" for number, name in enumerate(parts.lora_names)] or None,
        )
    if request.prompt_embedding is not None:
        _check_embedding(problems, request, config)
    elif request.prompt_task is not None:
        tasks = parts.prompt_tasks
        if not 0 <= request.prompt_task < len(tasks):
            problems.add(
                "prompt_learning_task_name_ids names no loaded prompt table",
                got=request.prompt_task,
                choices=[f"{number} ({task.name})" for number, task in enumerate(tasks)] or None,
            )
            return
    if request.soft_prompt or not _has_prompt(request):
        return
    length, start = _length(request, config), prompt_start_id(config)
    if request.prompt_embedding is not None and max(request.input_ids, default=-1) < start:
        problems.add(
            "request_prompt_embedding has no effect: input_ids has no virtual tokens",
            choices=(f"ids {start}-{start + length - 1}",) if length else (),
        )
    beyond = [token for token in request.input_ids if token >= start + length]
    if beyond:
        problems.add(
            f"input_ids has virtual tokens beyond the {length} of the row's prompt",
            got=beyond[:5],
            choices=(f"{start}-{start + length - 1}",) if length else (),
        )


def _check_embedding(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    shape = tuple(request.prompt_embedding.shape)
    if len(shape) != 2 or shape[1] != config.hidden_size:
        problems.add(
            "request_prompt_embedding must be [virtual tokens, hidden size]",
            got=list(shape),
            choices=(f"[n, {config.hidden_size}]",),
        )
    elif not bool(request.prompt_embedding.isfinite().all()):
        problems.add("request_prompt_embedding has values that are no numbers")


def _has_prompt(request: GenerateRequest) -> bool:
    return request.prompt_task is not None or request.prompt_embedding is not None


def _length(request: GenerateRequest, config: ModelConfig) -> int:
    """Rows of the request's prompt table, 0 without one."""
    if request.prompt_embedding is not None:
        return int(request.prompt_embedding.shape[0])
    tasks = adapters_of(config).prompt_tasks
    if request.prompt_task is None or not 0 <= request.prompt_task < len(tasks):
        return 0
    return tasks[request.prompt_task].length
