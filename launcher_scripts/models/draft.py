"""Whether a small model can propose tokens to a model (speculative decoding)."""

from __future__ import annotations

from typing import Any

from launcher_scripts.common.errors import Problems
from launcher_scripts.common.parallelism import Parallelism


def check_draft_model(
    problems: Problems,
    draft: Any,
    tp_size: int,
    model: Any,
    parallelism: Parallelism,
    change: str,
) -> None:
    """Note why it cannot.

    draft, model: ModelConfigs; model: None where nothing is known of it yet
    tp_size:      for which the draft model's files are cut
    change:       where the draft model is named
    """
    for name, config in (("draft model", draft), ("model", model)):
        if hasattr(config, "encoder_only"):
            problems.add(f"a draft model is for decoder-only models; the {name} has an encoder")
            return
    if tp_size != parallelism.tp_size:
        problems.add(
            "the draft model is cut for another number of tensor-parallel ranks",
            got=tp_size,
            choices=[parallelism.tp_size],
            change=change,
        )
    if draft.num_layers < parallelism.pp_size:
        problems.add(
            f"the draft model has fewer layers than the {parallelism.pp_size} pipeline stages",
            got=draft.num_layers,
            change=change,
        )
    if model is None:
        return
    if draft.vocab_size != model.vocab_size:
        problems.add(
            "the draft model has another vocabulary than the model",
            got=f"{draft.vocab_size} ids",
            choices=[f"{model.vocab_size} ids"],
            change=change,
        )
    least, most = _positions(model), _positions(draft)
    if draft.position_embedding == "learned" != model.position_embedding:
        least = None  # nothing ends the model's rows
    if most is not None and (least is None or most < least):
        problems.add(
            "the draft model has fewer positions than the model",
            got=most,
            choices=["no end" if least is None else f"at least {least}"],
            change=change,
        )


def _positions(config: Any) -> int | None:
    """How many positions the model was made for; None: there is no end to them."""
    made_for = config.position_embedding in ("learned", "rope")
    return int(config.max_positions) if made_for else None
