"""The location and the kind of a fault: the first layer that differs, its part, and the change that
makes the two agree.

Every layer of the export runs on the hidden states that the original's layer reads, so its error is
its own. Within the first layer that differs, the operations are compared with what the modules of
the original make, whatever these are called. Then other settings and other orders of weights are
tried: one with which the layer agrees says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.evaluation.tasks.task import HiddenStates
from launcher_scripts.evaluation.twin.diagnosis import (
    ADDED_BOS,
    CHAT_TEMPLATE,
    LOST_BOS,
    OTHER,
    ROPE_SCALING,
    SCALED_LOGITS,
    SWAPPED_SHARD,
    TOKENIZER,
    Finding,
)
from launcher_scripts.evaluation.twin.variants import (
    Change,
    part_of_setting,
    setting_variants,
    weight_variants,
)

Floats = NDArray[np.float32]
# Of the hidden states themselves: float32's rounding, beside large values that a layer passes on.
_ROUNDING = 4e-6
_NOT_COMPARABLE = 1e30  # JSON has no infinity
_ENCODER, _DECODER = "encoder", "decoder"

# The part of a model that a tensor belongs to; the first row that fits.
_TENSORS = (
    (r"lm_head|shared\.bias", "head"),
    (r"final_layer_?norm", "final_norm"),
    (r"wpe|\.ape|embed_positions|relative_attention_bias", "positions"),
    (r"wte|shared\.weight|embed_tokens|pre_decoder_layernorm", "embedding"),
    (r"EncDecAttention|decoder.*layer\.1\.layer_norm|cross", "cross_attention"),
    (r"query_norm|key_norm|latent_norm|_a_norm", "head_norm"),
    (r"input_layernorm|layer\.0\.layer_norm", "attention_norm"),
    (r"post_attention_layernorm|layer_norm|layernorm", "mlp_norm"),
    (r"output_norm", "output_norm"),
    (r"query_key_value|SelfAttention\.(q|k|v|qkv)|attention\.(query|key|kv)", "query_key_value"),
    (r"attention\.gate|sinks", "attention"),
    (r"attention\.dense|SelfAttention\.o", "attention_output"),
    (r"router|gate\.weight|expert_bias", "router"),
    (r"dense_h_to_4h|\.wi2?\.|fc1", "mlp_input"),
    (r"dense_4h_to_h|\.wo\.|fc2", "mlp_output"),
)
# The part that an operation of a traced layer belongs to: (branch, operation).
_STEPS = {
    ("attention", "norm"): "attention_norm",
    ("attention", "query"): "query_key_value",
    ("attention", "key"): "query_key_value",
    ("attention", "value"): "query_key_value",
    ("attention", "projection"): "query_key_value",
    ("attention", "attention"): "attention",
    ("attention", "output"): "attention_output",
    ("mlp", "norm"): "mlp_norm",
    ("mlp", "inner"): "mlp_input",
    ("mlp", "output"): "mlp_output",
    ("experts", "norm"): "mlp_norm",
    ("experts", "experts"): "experts",
}
# Findings that are of what is computed, not of texts.
COMPUTED = (ROPE_SCALING, SCALED_LOGITS, SWAPPED_SHARD, OTHER)
# The part of findings that have no tensor and no setting.
_FINDINGS = {
    LOST_BOS: "tokenizer",
    ADDED_BOS: "tokenizer",
    TOKENIZER: "tokenizer",
    CHAT_TEMPLATE: "chat_template",
    ROPE_SCALING: "positions",
    SCALED_LOGITS: "head",
}
# Operations that a module of the original makes, too.
_COMPARED = ("norm", "query", "key", "value", "attention", "inner", "output", "experts")


class LayerStep(Protocol):
    """The result of an operation; see engine/runner/tracing.py."""

    @property
    def branch(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def values(self) -> Floats: ...


class Traced(Protocol):
    """An export whose layers run one by one; see engine/runner/tracing.py."""

    config: Any

    @property
    def stacks(self) -> dict[str, int]: ...
    def variant(self, changes: Mapping[str, Any], change: Change | None) -> Traced: ...
    def embed(self, stack: str, ids: Sequence[int]) -> Floats: ...
    def layer(
        self, stack: str, layer: int, x: Floats, source: Floats | None = None
    ) -> Sequence[LayerStep]: ...
    def encoder_norm(self, x: Floats) -> Floats: ...
    def head(self, x: Floats) -> tuple[Floats, Floats]: ...


class HiddenStateModel(Protocol):
    """The original, with its hidden states; see tasks/transformers_model.py."""

    name: str

    def layer_states(
        self, ids: Sequence[int], decoder_ids: Sequence[int], stacks: Mapping[str, int]
    ) -> HiddenStates: ...
    def intermediates(
        self,
        ids: Sequence[int],
        decoder_ids: Sequence[int],
        layer: tuple[str, int],
        stacks: Mapping[str, int],
    ) -> list[Floats]: ...


@dataclass(frozen=True)
class Location:
    """A location in a model at which its states are compared.

    part: embedding, layer, encoder_norm, final_norm or head;  layer: None outside of the layers
    """

    part: str
    stack: str
    layer: int | None = None


@dataclass(frozen=True)
class Fault:
    """A difference with its location.

    part:  of the model, as in docs/certificate.md
    kind:  what is wrong with it, in a few words
    name:  the tensor or the setting; None: unknown
    stack, layer: None outside of the layers
    """

    part: str
    kind: str
    text: str
    name: str | None = None
    stack: str | None = None
    layer: int | None = None


@dataclass(frozen=True)
class LayerTrace:
    """Errors by layer, and the first one that is more than rounding.

    errors: each location's error, as a part of what the layer adds
    skipped: why nothing was compared; "" otherwise
    """

    reference: str
    limit: float
    errors: tuple[tuple[Location, float], ...] = ()
    first: Fault | None = None
    skipped: str = ""

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        if self.skipped:
            return {"skipped": self.skipped}
        return {
            "reference": self.reference,
            "limit": self.limit,
            "errors": [{**vars(location), "error": error} for location, error in self.errors],
            "first": None if self.first is None else vars(self.first),
        }


def part_of_tensor(name: str) -> str:
    """The part of a model that a tensor belongs to."""
    return next((part for pattern, part in _TENSORS if re.search(pattern, name)), "layer")


def stack_of_tensor(name: str) -> str:
    """Encoder or decoder."""
    return _ENCODER if name.startswith("encoder.") else _DECODER


def faults_of(
    findings: Sequence[Finding], trace: LayerTrace, *, served_differs: bool
) -> list[Fault]:
    """Return every fault with its location: of texts, tensors, settings and layers.

    served_differs: whether the served model computes what rounding does not explain
    """
    faults: list[Fault] = []
    agree = bool(trace.errors) and trace.first is None
    for finding in findings:
        evidence = finding.evidence
        for file in evidence.get("files", ()):
            faults.append(_of_file(file))
        for name, (served, original) in evidence.get("settings", {}).items():
            text = f"{name} is {served}, the original's is {original}"
            faults.append(Fault(part_of_setting(name), "setting", text, name))
        if "closing_ids" in evidence:
            faults.append(Fault("tokenizer", finding.name, finding.text))
        elif finding.name in _FINDINGS and not ({"files", "settings"} & evidence.keys()):
            by_server = agree and finding.name in COMPUTED
            part = "server" if by_server else _FINDINGS[finding.name]
            faults.append(Fault(part, finding.name, finding.text))
    faults = list(dict.fromkeys(faults))
    exact = any(fault.name is not None for fault in faults)
    explained = any(finding.evidence.get("explained_by") for finding in findings)
    first = trace.first
    if first is not None and not exact and (served_differs or first.name is not None):
        # Logits that agree with other settings say more than a layer without an explanation.
        faults.insert(len(faults) if explained and first.name is None else 0, first)
    unplaced = [one for one in findings if one.name == OTHER]
    if unplaced and not faults:
        compared = not trace.skipped
        text = unplaced[0].text
        if compared:
            text = (
                "The export's layers compute what the original's do, and the served model does "
                "not: look at its kernels, its parameters and its server."
            )
        faults.append(Fault("server" if compared else "unknown", OTHER, text))
    return faults


def _of_file(file: Any) -> Fault:
    """The fault of an altered weight file: evidence of `AlteredFile`."""
    row = file if isinstance(file, dict) else vars(file)
    name, holds = row["tensor"], row["holds"]
    kind = f"content of {holds}" if holds else row["kind"]
    return Fault(
        part_of_tensor(name),
        kind,
        f"{name} is {kind}" if not holds else f"{name} has the {kind}",
        name,
        stack_of_tensor(name),
        row["layer"],
    )


def relative_error(values: Floats, expected: Floats, scale: Floats | None = None) -> float:
    """Root mean square of the difference over that of `scale`, which is `expected` by default.

    _NOT_COMPARABLE for another shape or for what is not a number.
    """
    if values.shape != expected.shape or not np.isfinite(values).all():
        return _NOT_COMPARABLE
    size = _rms(expected if scale is None else scale)
    rounding = _ROUNDING * _rms(expected)
    return max(0.0, _rms(values - expected) - rounding) / max(size, 1e-30)


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


class LayerComparison:
    """An export beside its original on one row of token ids.

    limit: the error up to which two layers are the same
    """

    def __init__(
        self,
        export: Traced,
        original: HiddenStateModel,
        ids: Sequence[int],
        decoder_ids: Sequence[int],
        limit: float,
    ) -> None:
        self._export, self._original = export, original
        self._ids, self._decoder_ids = ids, decoder_ids
        self._limit = limit
        self._states = original.layer_states(ids, decoder_ids, export.stacks)

    def trace(self) -> LayerTrace:
        """Compare all layers, and look into the first one that differs."""
        errors = tuple(
            (location, self.error(self._export, location)) for location in self._locations()
        )
        differing = [location for location, error in errors if not error <= self._limit]
        first = self._fault(differing[0], differing) if differing else None
        return LayerTrace(self._original.name, self._limit, errors, first)

    def _locations(self) -> Iterator[Location]:
        for stack, count in self._export.stacks.items():
            yield Location("embedding", stack)
            yield from (Location("layer", stack, layer) for layer in range(count))
            if stack == _ENCODER:
                yield Location("encoder_norm", stack)
        yield Location("final_norm", _DECODER)
        yield Location("head", _DECODER)

    def error(self, export: Traced, location: Location) -> float:
        """The error of one location, of its own inputs."""
        states, layers = self._states, self._states.layers[location.stack]
        if location.part == "embedding":
            ids = self._ids if location.stack == _ENCODER or not self._decoder_ids else None
            result = export.embed(location.stack, self._decoder_ids if ids is None else ids)
            return relative_error(result, layers[0][0])
        if location.part == "encoder_norm" and states.source is not None:
            return relative_error(export.encoder_norm(layers[-1][1]), states.source)
        if location.layer is not None:
            steps = self._steps(export, location)
            before, expected = layers[location.layer]
            return relative_error(steps[-1].values, expected, expected - before)
        normed, logits = export.head(layers[-1][1])
        if location.part == "final_norm":
            # A scale of the logits may be part of the norm.
            scaled = float((normed * states.normed).sum() / max((normed * normed).sum(), 1e-30))
            return min(relative_error(normed * factor, states.normed) for factor in (1.0, scaled))
        width = min(logits.shape[1], states.logits.shape[1])
        return relative_error(logits[:, :width], states.logits[:, :width])

    def _steps(self, export: Traced, location: Location) -> Sequence[LayerStep]:
        layer = location.layer or 0
        source = self._states.source if location.stack == _DECODER else None
        before, _ = self._states.layers[location.stack][layer]
        return export.layer(location.stack, layer, before, source)

    def _fault(self, location: Location, differing: Sequence[Location]) -> Fault:
        """Name the part of the location, and the change with which it agrees."""
        part, detail = location.part, ""
        if location.layer is not None:
            part, detail = self._part_of_layer(location, differing)
        where = location.stack, location.layer
        explained = self._explained(location, part)
        if explained is not None:
            fault_part, kind, name, text = explained
            return Fault(fault_part, kind, text, name, *where)
        name = location.part if location.layer is None else f"layer {location.layer}"
        text = f"{name} of the {location.stack} is the first that differs, in its {part}{detail}"
        return Fault(part, detail.strip(" ,;:") or "other values", text, None, *where)

    def _part_of_layer(self, location: Location, differing: Sequence[Location]) -> tuple[str, str]:
        """The part of a layer that differs first, and at which positions."""
        steps = self._steps(self._export, location)
        matches = self._matches(location, steps)
        reliable = self._reliable(location, differing, steps)
        for index, step in enumerate(steps[:-1]):
            part = "cross_attention"
            if step.branch != part:
                part = _STEPS.get((step.branch, step.operation), "layer")
            if not reliable[index] or step.operation not in _COMPARED:
                continue
            error, expected = matches[index]
            if error <= self._limit:
                continue
            if step.operation == "attention" and expected is not None:
                moved = self._moved_heads(steps[:index], matches)
                if moved is not None:
                    return _STEPS[step.branch, moved], f", {moved} heads in another order"
                return part, _profile(step.values, expected, self._limit)
            detail = f", {step.operation}" if step.operation in ("query", "key", "value") else ""
            return part, detail
        return "layer", ""

    def _moved_heads(
        self, steps: Sequence[LayerStep], matches: Sequence[tuple[float, Floats | None]]
    ) -> str | None:
        """Return the first operation whose heads are the original's, but not in its order.

        Values within a head may be in another order: of a rotary layout, for one.
        """
        size = getattr(self._export.config, "head_size", None)
        for step, (_, expected) in zip(steps, matches, strict=False):
            if step.operation not in ("query", "key", "value") or expected is None or not size:
                continue
            if step.values.shape != expected.shape or step.values.shape[-1] % size:
                continue
            values, others = (
                np.sort(side.reshape(len(side), -1, size), -1) for side in (step.values, expected)
            )
            if relative_error(values, others) > self._limit:
                return step.operation
        return None

    def _reliable(
        self, location: Location, differing: Sequence[Location], steps: Sequence[LayerStep]
    ) -> list[bool]:
        """Return which steps have a counterpart: as in a layer that agrees, if there is one."""
        others = range(self._export.stacks[location.stack])
        sound = (Location("layer", location.stack, n) for n in others)
        for other in sound:
            if other in differing:
                continue
            local = self._steps(self._export, other)
            if [step.operation for step in local] == [step.operation for step in steps]:
                matches = self._matches(other, local)
                return [error <= self._limit for error, _ in matches]
        return [True] * len(steps)

    def _matches(
        self, location: Location, steps: Sequence[LayerStep]
    ) -> list[tuple[float, Floats | None]]:
        """Each step's error beside the original's intermediate that is nearest to it, and that."""
        candidates = self._original.intermediates(
            self._ids, self._decoder_ids, (location.stack, location.layer or 0), self._export.stacks
        )
        joined = np.concatenate(
            [s.values for s in steps if s.operation in ("query", "key", "value")]
            or [steps[0].values],
            axis=1,
        )
        both = nearest(joined, candidates)
        result = []
        for step in steps:
            match = nearest(step.values, candidates)
            if step.operation in ("query", "key", "value") and both[0] <= self._limit:
                match = both
            result.append(match)
        return result

    def _explained(self, location: Location, part: str) -> tuple[str, str, str, str] | None:
        """The part, the kind, the name and a sentence about the change with which it agrees."""
        variants = [*setting_variants(self._export.config), *weight_variants(self._export.config)]
        variants.sort(key=lambda variant: variant.part not in (part, part.rpartition("_")[2]))
        for variant in variants:
            if variant.location != location.part:
                continue
            try:
                export = self._export.variant(variant.changes, variant.change)
                error = self.error(export, location)
            except Exception:  # a combination that no model has, in whatever library notices
                continue
            if error <= self._limit:
                where = location.part if location.layer is None else f"layer {location.layer}"
                text = (
                    f"{where} of the {location.stack} agrees with the original with {variant.text}"
                )
                return variant.part, variant.kind, variant.name, text
        return None


def nearest(values: Floats, candidates: Iterable[Floats]) -> tuple[float, Floats | None]:
    """Return the nearest of `candidates`, also in another order of columns, behind its error."""
    best: tuple[float, Floats | None] = (_NOT_COMPARABLE, None)
    for expected in candidates:
        if expected.shape != values.shape:
            continue
        error = relative_error(values, expected)
        if error > 1e-5:
            error = min(error, relative_error(np.sort(values, 1), np.sort(expected, 1)))
        if error < best[0]:
            best = (error, expected)
    return best


def _profile(values: Floats, expected: Floats, limit: float) -> str:
    """The positions at which attention differs, and what that means."""
    errors = [relative_error(values[n : n + 1], expected[n : n + 1]) for n in range(len(values))]
    first = next((n for n, error in enumerate(errors) if error > limit), 0)
    if first == 0:
        return ", from the first position on: heads, sinks or a gate"
    if first == 1:
        return ", from the second position on: rotary positions, scale or mask"
    return f", from position {first} on: a window"
