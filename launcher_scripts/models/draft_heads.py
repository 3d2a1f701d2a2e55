"""Draft heads: a layer that proposes tokens from hidden states of the model that it drafts for.

"mtp" is a model's layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437): a projection of
the token's embedding and the hidden state before it, both normalized, and a layer of the model's
kind; the output projection is the model's. "eagle3" is a head of EAGLE-3 (arXiv:2503.01840): it
projects the hidden states before three of the model's layers, its attention reads the token's
embedding, too, and it has an output projection of some of the vocabulary. Both have the model's
embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.models.family import ModelConfig, Partition, Source, WeightSpec

MTP, EAGLE3 = "mtp", "eagle3"
DRAFT_HEADS = (MTP, EAGLE3)
IDS = "draft.ids"
_QKV = "layers.*.attention.query_key_value.weight"


@dataclass(frozen=True, kw_only=True)
class DraftHeadSizes(ModelConfig):
    """Hyperparameters of a draft head; draft_vocab_size: of an EAGLE-3's output projection."""

    draft_head: str | None = None
    draft_vocab_size: int | None = None

    @property
    def draft_input_size(self) -> int:
        """Width of the input of the head's projection."""
        return self.hidden_size * (3 if self.draft_head == EAGLE3 else 2)

    @property
    def draft_attention_size(self) -> int:
        """Width of the input of an EAGLE-3's attention."""
        return 2 * self.hidden_size

    def _check_layers(self, problems: Problems) -> None:
        """See ModelConfig; note heads that are not supported, too."""
        super()._check_layers(problems)
        if self.draft_head is None:
            if self.draft_vocab_size is not None:
                problems.add("draft_vocab_size needs draft_head", got=self.draft_vocab_size)
            return
        problems.check_choice("draft_head", self.draft_head, DRAFT_HEADS)
        if self.num_layers != 1:
            problems.add("a draft head has one layer", got=self.num_layers, choices=(1,))
        if self.has_row_states:
            problems.add("a draft head has attention", got=", ".join(sorted(self.branch_kinds)))
        if self.draft_head == EAGLE3:
            problems.check_minimum("draft_vocab_size", self.draft_vocab_size or 0, 1)
        elif self.draft_vocab_size is not None:
            problems.add("draft_vocab_size is of EAGLE-3", got=self.draft_head, choices=(EAGLE3,))


def hidden_state_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers of a model whose inputs an EAGLE-3 reads."""
    return 2, num_layers // 2, num_layers - 3


def weights(
    config: Any,
    norm: Callable[[Any, str], list[WeightSpec]],
    layer: Sequence[WeightSpec],
) -> list[WeightSpec]:
    """Rows of a head, whose layer has the rows `layer`."""
    is_eagle = config.draft_head == EAGLE3
    rows = [_spec("draft.input.weight", ("draft_input_size", "hidden_size"), "transposed")]
    rows.append(_spec("draft.hidden_norm.weight", ("hidden_size",)))
    if not is_eagle:
        return [
            *rows,
            _spec("draft.embedding_norm.weight", ("hidden_size",)),
            *norm(config, "final_layernorm"),
            *layer,
        ]
    columns = "draft_attention_size", "qkv_size"
    vocabulary = replace(
        _spec("lm_head.weight", ("draft_vocab_size", "hidden_size")),
        partition=Partition.VOCAB_PARALLEL,
    )
    return [
        *rows,
        _spec(IDS, ("3", "draft_vocab_size"), "offset_ids"),
        vocabulary,
        *norm(config, "final_layernorm"),
        *(replace(spec, shape=columns) if spec.name == _QKV else spec for spec in layer),
    ]


def _spec(name: str, shape: tuple[str, ...], layout: str = "as_is") -> WeightSpec:
    """A row whose tensor every source calls the same, once it is renamed."""
    return WeightSpec(name, shape, sources={"llama": Source((name,), layout)})


def reject_head(config: Any, folder: str) -> None:
    """Raise ConfigError if the model to be served is a draft head."""
    if getattr(config, "draft_head", None) is not None:
        raise ConfigError(
            problem(
                "a draft head generates no text by itself",
                got=folder,
                choices=["a full model, with the head in draft_model_checkpoint_path"],
                change="model_checkpoint_path in config.pbtxt",
            )
        )


def check_draft_model(
    problems: Problems,
    draft: Any,
    tp_size: int,
    model: Any,
    parallelism: Parallelism,
    change: str,
) -> None:
    """Note the reasons why a model or a head cannot propose tokens of another model.

    draft, model: ModelConfigs; model: None where nothing is known of it yet
    tp_size:      for which the draft model's files are cut
    change:       where the draft model is named
    """
    for name, config in (("draft model", draft), ("model", model)):
        if hasattr(config, "encoder_only"):
            problems.add(f"a draft model is for decoder-only models; the {name} has an encoder")
            return
    if draft.has_row_states:
        problems.add(
            "a draft model takes tokens back, and layers that keep a state of each row cannot",
            got=", ".join(sorted(draft.branch_kinds)),
            choices=["a model whose layers have attention alone"],
            change=change,
        )
        return
    if tp_size != parallelism.tp_size:
        problems.add(
            "the draft model is cut for another number of tensor-parallel ranks",
            got=tp_size,
            choices=[parallelism.tp_size],
            change=change,
        )
    _check_stages(problems, draft, parallelism, change)
    if model is None:
        return
    if draft.vocab_size != model.vocab_size:
        problems.add(
            "the draft model has another vocabulary than the model",
            got=f"{draft.vocab_size} ids",
            choices=[f"{model.vocab_size} ids"],
            change=change,
        )
    check = _check_positions if getattr(draft, "draft_head", None) is None else _check_head
    check(problems, draft, model, change)


def _check_stages(problems: Problems, draft: Any, parallelism: Parallelism, change: str) -> None:
    if getattr(draft, "draft_head", None) is not None and parallelism.pp_size > 1:
        problems.add(
            "a draft head reads hidden states of all layers, which pipeline stages divide",
            got=f"{parallelism.pp_size} stages",
            choices=["1 stage, or a draft model"],
            change=change,
        )
    elif draft.num_layers < parallelism.pp_size:
        problems.add(
            f"the draft model has fewer layers than the {parallelism.pp_size} pipeline stages",
            got=draft.num_layers,
            change=change,
        )


def _check_positions(problems: Problems, draft: Any, model: Any, change: str) -> None:
    model_positions, draft_positions = _positions(model), _positions(draft)
    if draft.position_embedding == "learned" != model.position_embedding:
        model_positions = None  # nothing ends the model's rows
    if draft_positions is not None and (
        model_positions is None or draft_positions < model_positions
    ):
        problems.add(
            "the draft model has fewer positions than the model",
            got=draft_positions,
            choices=["no end" if model_positions is None else f"at least {model_positions}"],
            change=change,
        )


def _check_head(problems: Problems, head: Any, model: Any, change: str) -> None:
    if head.hidden_size != model.hidden_size:
        problems.add(
            "the draft head reads hidden states of another width than the model's",
            got=head.hidden_size,
            choices=[model.hidden_size],
            change=change,
        )
    if head.draft_head == EAGLE3 and min(hidden_state_layers(model.num_layers)) < 1:
        problems.add(
            "an EAGLE-3 head reads hidden states of three layers",
            got=f"a model of {model.num_layers} layers",
            choices=["at least 4 layers"],
            change=change,
        )
    if getattr(model, "num_streams", None) or model.position_embedding == "learned":
        problems.add(
            "draft heads are of models with rotary positions and one hidden state of a token",
            got=model.position_embedding,
            change=change,
        )


def _positions(config: Any) -> int | None:
    """Number of positions of the model; None if unlimited."""
    has_positions = config.position_embedding in ("learned", "rope")
    return int(config.max_positions) if has_positions else None
