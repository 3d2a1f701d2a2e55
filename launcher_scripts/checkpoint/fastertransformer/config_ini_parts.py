"""Learned parts in config.ini: prompt tables, IA3 vectors and adapters.

The keys are those of FasterTransformer's converters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.ini_keys import IniKeys, Sections
from launcher_scripts.models.learned_parts import (
    NORM_POSITIONS,
    LearnedParts,
    PromptTask,
)

# FasterTransformer's number for prompt tables of p-tuning and prompt tuning.
PROMPT_LEARNING_TYPE = 3


def prompt_keys(parts: LearnedParts) -> dict[str, str]:
    """For the section of the stack that prompts are given to."""
    if not parts.prompt_tasks:
        return {}
    return {
        "num_tasks": str(len(parts.prompt_tasks)),
        "prompt_learning_start_id": str(parts.prompt_start_id),
        "prompt_learning_type": str(PROMPT_LEARNING_TYPE),
    }


def adapter_keys(parts: LearnedParts) -> dict[str, str]:
    """For the section of every stack."""
    if not parts.adapter_size:
        return {}
    return {
        "has_adapter": "True",
        "adapter_inter_size": str(parts.adapter_size),
        "adapter_norm_position": parts.adapter_norm_position,
    }


def ia3_keys(parts: LearnedParts) -> dict[str, str]:
    keys = {"ia3_num_tasks": str(parts.ia3_num_tasks)} if parts.ia3_num_tasks else {}
    return keys | ({"ia3_adapted": "True"} if parts.ia3_adapted else {})


def task_sections(parts: LearnedParts) -> Sections:
    """[task_0], [task_1], ... for the prompt tables."""
    return {
        f"task_{number}": {"task_name": task.name, "prompt_length": str(task.length)}
        for number, task in enumerate(parts.prompt_tasks)
    }


def read_parts(
    sections: Mapping[str, IniKeys], stack: IniKeys, structure: IniKeys
) -> dict[str, Any]:
    """Field `parts` of a config, left out where there are none.

    stack:     the section with the keys of prompts and adapters
    structure: the section with those of IA3
    """
    values: dict[str, Any] = {}
    count = stack.number("num_tasks", 0)
    if count > len(sections):
        stack.problems.add("num_tasks is more than there are sections", got=count)
        count = 0
    if count:
        tasks = [sections.get(f"task_{number}") for number in range(count)]
        for number, task in enumerate(tasks):
            if task is None:
                stack.problems.add(f"section [task_{number}] is missing")
        values["prompt_tasks"] = tuple(
            PromptTask(task.values.get("task_name", ""), task.number("prompt_length", None))
            for task in tasks
            if task is not None
        )
    if count or "prompt_learning_start_id" in stack.values:
        default = stack.number("vocab_size", 0) + 1
        values["prompt_start_id"] = stack.number("prompt_learning_start_id", default)
    if stack.boolean("has_adapter", False):
        values |= {
            "adapter_size": stack.number("adapter_inter_size", None),
            "adapter_norm_position": stack.text("adapter_norm_position", "pre", NORM_POSITIONS),
        }
    values["ia3_num_tasks"] = structure.number("ia3_num_tasks", 0)
    values["ia3_adapted"] = structure.boolean("ia3_adapted", False)
    return {"parts": LearnedParts(**values)}
