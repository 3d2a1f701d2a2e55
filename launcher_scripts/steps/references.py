"""References that compute the logits of a source checkpoint: its maker's code, or this project's
engine.

Both the twin of an export and that of an evaluation take their reference from here.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.export import export, open_source
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import float32
from launcher_scripts.checkpoint.layout.source_checkpoint import Hints
from launcher_scripts.checkpoint.layout.tasks import plan_tasks
from launcher_scripts.checkpoint.model_repository import TRANSFORMERS
from launcher_scripts.checkpoint.sources import nemo_files
from launcher_scripts.checkpoint.sources.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.checkpoint.verification import altered_files, altered_tensors
from launcher_scripts.common.errors import CheckpointError, ConfigError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from launcher_scripts.config.evaluation import ReferenceSettings
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.megatron_models import CoreModel, NemoReference
from launcher_scripts.evaluation.tasks.task import HiddenStates, NoReferenceError, Reference
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel, TransformersText
from launcher_scripts.evaluation.twin.diagnosis import AlteredFile, Render, TextSide
from launcher_scripts.evaluation.twin.faults import LayerComparison, LayerTrace
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.fleet import local_chat_template
from launcher_scripts.models import family_of
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.repository import FILE_NAME

ENGINE = "engine"
SECONDS = 3600.0
PROMPT_TOKENS = 16
DECODER_TOKENS = 8
# Of the largest logit. Both sides hold the weights rounded to weight_data_type and compute in
# float32, so they differ by the order of sums: some 1e-7 for two layers, more for deep models.
TOLERANCE = 1e-4
# Tables that the export scales or multiplies before it rounds them differ by that rounding: two
# and a half times the half types' 2**-11 and 2**-8. These are the dialects that have such tables.
ROUNDED_TOLERANCES = {"fp32": TOLERANCE, "fp16": 1.25e-3, "bf16": 1e-2}
COMBINING = re.compile("_scaled|_projected")
CGROUPS = Path("/sys/fs/cgroup")


def tolerance(dialects: Iterable[str], weight_data_type: str) -> float:
    """The difference that a good export may have, as a part of the largest logit."""
    combined = any(COMBINING.search(dialect) for dialect in dialects)
    return ROUNDED_TOLERANCES[weight_data_type] if combined else TOLERANCE


class EngineModel(Reference):
    """An exported folder in the engine, with its reference kernels on the CPU; to be closed."""

    def __init__(
        self, folder: Path, tp_size: int, *, max_tokens: int, name: str = "", **more: Any
    ) -> None:
        """max_tokens: of all rows at once; more: further fields of EngineSettings"""
        from launcher_scripts.engine.engine import Engine, EngineSettings

        settings = EngineSettings(
            folder,
            parallelism=Parallelism(tp_size),
            device="cpu",
            max_tokens=max_tokens,
            verify=False,
            **{"max_batch_size": 1, **more},
        )
        self.name = name
        self._engine = Engine.load(settings)

    def __enter__(self) -> EngineModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def logits(self, ids: Sequence[int], decoder_ids: Sequence[int] = ()) -> NDArray[np.float32]:
        """float32 [tokens, vocab] at every position of the prompt, or of the decoder's."""
        request = GenerateRequest(
            tuple(ids),
            output_len=0,
            decoder_input_ids=tuple(decoder_ids),
            return_context_logits=True,
        )
        return np.asarray(self._engine.submit(request).result(SECONDS).context_logits)

    def generate_rows(
        self,
        rows: Iterable[GenerateRequest],
        in_flight: int = 8,  # noqa: ARG002
    ) -> Iterator[GenerateOutput]:
        """Iterate over the outputs of the rows, in order."""
        for row in rows:
            yield self._engine.submit(row).result(SECONDS)


def _core_model(path: Path) -> CoreModel:
    checkpoint: Any = open_source(Archive(path))
    if not isinstance(checkpoint, MegatronCoreCheckpoint) or checkpoint.adapters:
        raise NoReferenceError("the core alone does not have the adapters")
    if not isinstance(checkpoint.config, GPTConfig):
        raise NoReferenceError("an encoder-decoder of Megatron-LM core has no reference")
    tensors = checkpoint.tensors.items()
    return CoreModel(
        dict(checkpoint.options.raw), ((name, float32(tensor.read())) for name, tensor in tensors)
    )


@dataclass(frozen=True)
class ReferenceRunner:
    """A library that computes a source's logits.

    source:   the format that it reads
    packages: what has to be installed for it
    rounds:   whether it can take on the rounding of an export's files (round_weights)
    """

    source: str
    packages: tuple[str, ...]
    open: Callable[[Path], Any]
    rounds: bool = True


# NeMo runs what a checkpoint names: where the user has named that as the original, not in exports.
RUNNERS = {
    "transformers": ReferenceRunner("huggingface", ("torch", "transformers"), TransformersModel),
    "core": ReferenceRunner("megatron_core", ("torch", "megatron"), _core_model),
    "nemo": ReferenceRunner("nemo", ("torch", "nemo"), NemoReference, rounds=False),
}


def runner_of(source: str | None) -> str | None:
    """The name of what computes sources of this format; None where nothing but the engine does."""
    return next((name for name, runner in RUNNERS.items() if runner.source == source), None)


def missing_runner_packages(runner: str) -> list[str]:
    """Return the packages that this Python lacks."""
    return [name for name in RUNNERS[runner].packages if find_spec(name) is None]


class EngineStates:
    """The hidden states of an original that the engine runs: of an export of its tensors."""

    def __init__(self, folder: Path) -> None:
        from launcher_scripts.engine.runner.tracing import TracedModel

        self._model = TracedModel(FTCheckpoint.open(folder, verify=False))
        self._last: tuple[Any, HiddenStates] | None = None  # every layer is read for them
        self.name = "this project's engine, on the original's tensors"

    def layer_states(
        self, ids: Sequence[int], decoder_ids: Sequence[int], stacks: Mapping[str, int]
    ) -> HiddenStates:
        """See TransformersModel.layer_states."""
        key = tuple(ids), tuple(decoder_ids)
        if self._last is None or self._last[0] != key:
            self._last = key, self._compute(ids, decoder_ids, stacks)
        return self._last[1]

    def _compute(
        self, ids: Sequence[int], decoder_ids: Sequence[int], stacks: Mapping[str, int]
    ) -> HiddenStates:
        model, layers, source = self._model, {}, None
        if model.stacks != stacks:
            raise NoReferenceError(f"the original has {model.stacks}, the export {stacks} layers")
        states = np.empty(0, np.float32)
        for stack, count in stacks.items():
            of_decoder = len(stacks) > 1 and stack == "decoder"
            states = model.embed(stack, decoder_ids if of_decoder else ids)
            pairs = []
            for layer in range(count):
                after = model.layer(stack, layer, states, source)[-1].values
                pairs.append((states, after))
                states = after
            layers[stack] = pairs
            if stack == "encoder":
                source = model.encoder_norm(states)
        return HiddenStates(layers, source, *model.head(states))

    def intermediates(
        self,
        ids: Sequence[int],
        decoder_ids: Sequence[int],
        layer: tuple[str, int],
        stacks: Mapping[str, int],
    ) -> list[NDArray[np.float32]]:
        """See TransformersModel.intermediates."""
        states, (stack, number) = self.layer_states(ids, decoder_ids, stacks), layer
        source = states.source if stack == "decoder" else None
        before, _ = states.layers[stack][number]
        return [step.values for step in self._model.layer(stack, number, before, source)]


TRACED_TOKENS = 48
_LAYER_LIMIT = 2e-4  # of what a layer adds, in float32


def compare_layers(
    original: OpenedSource, served: FTCheckpoint, reference: Reference, options: Mapping[str, Any]
) -> LayerTrace:
    """Compare the layers of the export with the original's on token ids that are always the same.

    A reference of transformers gets the export's rounding, and keeps it.
    """
    from launcher_scripts.engine.runner.tracing import TracedModel

    config: Any = served.config
    source = served.manifest.source if served.manifest is not None else {}
    ids, decoder_ids = prompt_ids(config, TRACED_TOKENS, TRACED_TOKENS // 2)
    limit = _LAYER_LIMIT
    if tolerance(source.get("dialects", ()), served.weight_data_type) > TOLERANCE:
        limit = ROUNDED_TOLERANCES[served.weight_data_type]
    with ExitStack() as stack:
        states: Any = reference
        if isinstance(reference, TransformersModel):
            reference.round_weights(served.weight_data_type)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layers-")))
            exported = export_source(original.path, folder, served.weight_data_type, options)
            states = EngineStates(exported)
        try:
            pair = TracedModel(served), states
            return LayerComparison(*pair, ids, decoder_ids, limit).trace()
        except (NoReferenceError, CheckpointError) as error:
            return LayerTrace(reference.name, limit, skipped=str(error))


def export_source(path: Path, folder: Path, data_type: str, options: Mapping[str, Any]) -> Path:
    """Export the tensors of a source for one rank; returns the folder of the shards."""
    settings = ExportSettings(
        model_name="original",
        model_type="",
        checkpoint_path=str(path),
        triton_model_dir=str(folder / "original"),
        tokenizer=TokenizerSettings("none"),
        parallelism=Parallelism(),
        **{"weight_data_type": data_type, **options},
    )
    return export(settings)


@contextmanager
def opened_reference(
    path: Path, runner: str, max_tokens: int, options: Mapping[str, Any]
) -> Iterator[Reference]:
    """The original at `path`, run by `runner`: one of RUNNERS, or ENGINE.

    The engine reads the source's tensors as an export in a temporary folder, in float32 by default.
    max_tokens: of a row;  options: fields of ExportSettings that say how it is read
    """
    if runner != ENGINE:
        yield RUNNERS[runner].open(path)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twin-")))
        name = f"this project's engine, float32 on the CPU: {path}"
        exported = export_source(path, folder, "fp32", options)
        model = EngineModel(exported, 1, max_tokens=max_tokens, name=name)
        yield stack.enter_context(model)


def free_memory() -> int:
    """Bytes that this job can have: what the node can give, and no more than its cgroups allow.

    What the job holds already is not subtracted: most of it is the page cache of the export.
    """
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return min([int(kilobytes) * 1024, *cgroup_limits(Path("/proc/self/cgroup"), CGROUPS)])


def cgroup_limits(memberships: Path, root: Path) -> Iterator[int]:
    """The memory limits, in bytes, of the cgroups (version 2 and 1) that the process is in."""
    lines = memberships.read_text(encoding="utf-8").splitlines() if memberships.is_file() else []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / controllers / name.strip("/")
        for directory in (folder, *folder.parents):
            if directory.is_relative_to(root) and (directory / file).is_file():
                text = (directory / file).read_text(encoding="ascii").strip()
                yield from [] if text == "max" else [int(text)]


def prompt_ids(
    config: Any, count: int = PROMPT_TOKENS, decoder_count: int = DECODER_TOKENS
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids, the same every time: of the prompt, and of the decoder's if there is one.

    None is the padding token, which M2M-100 in transformers gives no position.
    """
    length = min(count, getattr(config, "max_positions", None) or count)
    numbers = np.random.default_rng(0).integers(config.vocab_size, size=(2, count))
    numbers[numbers == config.pad_id] = config.end_id
    ids = tuple(int(number) for number in numbers[0, :length])
    if not hasattr(config, "num_decoder_layers"):
        return ids, ()
    decoder_ids = (int(number) for number in numbers[1, : min(decoder_count, length) - 1])
    return ids, (config.start_id, *decoder_ids)


KEY = "evaluate.twin.checkpoint"
RUNNER_KEY = "evaluate.twin.runner"
# What an export may be told: they are not part of what is computed.
_SPECIAL_IDS = ("start_id", "end_id", "pad_id")


def served_checkpoint(folder: Path) -> FTCheckpoint | None:
    """The exported folder that is served, where it can be read here."""
    if not (folder / FILE_NAME).is_file():
        return None
    return FTCheckpoint.open(folder, verify=False)


@dataclass(frozen=True)
class OpenedSource:
    """A source checkpoint, opened by its reader.

    path:      as the reader takes it
    source:    a SourceCheckpoint
    num_heads: what the reader has to be told; None: nothing
    """

    path: Path
    source: Any
    num_heads: int | None = None

    @classmethod
    def of(cls, settings: ReferenceSettings, served: FTCheckpoint | None) -> OpenedSource:
        """The one that the settings name, else what the served model was exported from.

        Raises ConfigError where there is none, or it lacks what the served one has learned.
        """
        manifest = served.manifest if served is not None else None
        source = dict(manifest.source) if manifest is not None else {}
        name = settings.checkpoint or source.get("path")
        if source.get("adapters"):
            message = "the original alone does not have the served model's adapters"
            raise ConfigError(problem(message, got=sorted(source["adapters"]), change=KEY))
        if name is None or not Path(name).exists():
            message = "the original checkpoint is not there"
            if settings.checkpoint is None:
                message += ", which the served model's manifest should name"
            raise ConfigError(problem(message, got=name, change=KEY))
        path, selected = nemo_files.locate(Path(name), "last")
        config: Any = served.config if served is not None else None
        only = bool(getattr(config, "encoder_only", False))
        # Its files alone tell neither a config.ini for random weights nor how many heads there are.
        same = settings.checkpoint is None
        heads = config.num_heads if same and source.get("format") == "megatron" else None
        kind = str(source.get("format")) if same else "auto"
        return cls(
            path, open_source(Archive(path), kind, Hints(heads, only, selected, True)), heads
        )

    @property
    def format(self) -> str:
        return str(self.source.describe()["format"])

    def runner(self, requested: str) -> str:
        """Name of the runner: `requested`, of `auto` the maker's code if installed.

        Raises ConfigError for one that does not read this format or is not installed.
        """
        maker = runner_of(self.format)
        if requested == "auto":
            return ENGINE if maker is None or missing_runner_packages(maker) else maker
        if requested not in (ENGINE, maker):
            choices = ["auto", ENGINE, *([maker] if maker else [])]
            message = f"{RUNNERS[requested].source} is what this runner reads, not {self.format}"
            raise ConfigError(problem(message, got=requested, choices=choices, change=RUNNER_KEY))
        if requested != ENGINE and (missing := missing_runner_packages(requested)):
            message = f"this Python has no {' and '.join(missing)}"
            raise ConfigError(problem(message, got=requested, choices=["auto"], change=RUNNER_KEY))
        return requested

    def text_side(self, runner: str, folder: Path) -> TextSide | None:
        """Return its reading of texts; None for a checkpoint without a tokenizer.

        folder: an empty one, for its tokenizer's files
        """
        try:
            files = self.source.tokenizer_files()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            tokenizer = load_tokenizer(folder)
        except (CheckpointError, TokenizerError) as error:
            print(f"note: the original's tokenizer is not compared: {error}", flush=True)
            return None
        if runner == "transformers":
            try:
                reference_text = TransformersText(self.path)
            except ConfigError as error:
                print(f"note: this project reads the original's texts: {error}", flush=True)
            else:
                render = reference_text.render if reference_text.has_chat_template else None
                return TextSide(reference_text.encode, tokenizer, render)
        before, after = tokenizer.surround() if self.format in TRANSFORMERS else ([], [])
        return TextSide(
            lambda text: [*before, *tokenizer.encode(text), *after],
            tokenizer,
            chat_render(folder, tokenizer),
        )

    def other_settings(self, served: FTCheckpoint) -> Mapping[str, tuple[Any, Any]]:
        """Hyperparameters with another value than the source's: name -> (served, original)."""
        served_value: Any = served.config
        source_value = self.source.config
        if type(served_value) is not type(source_value):
            return {"family": (family_of(served_value).name, family_of(source_value).name)}
        pairs = {
            item.name: (getattr(served_value, item.name), getattr(source_value, item.name))
            for item in dataclasses.fields(source_value)
            if item.name not in _SPECIAL_IDS
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def altered(self, served: FTCheckpoint) -> Sequence[AlteredFile]:
        """The served files that the source's tensors do not give.

        [] where the tensors cannot be read as the served ones are: a note says why.
        """
        try:
            specs = family_of(self.source.config).weights(self.source.config)
            plan = plan_tasks(self.source, specs, str(self.path))
            names = altered_files(served, plan)
            kinds = altered_tensors(served, plan, [file for file, _ in names])
        except (CheckpointError, OSError) as error:
            print(f"note: the weights are not compared: {error}", flush=True)
            return []
        return [
            AlteredFile(
                file.name,
                file.spec.tensor_name(file.layer),
                file.layer,
                file.tp_rank,
                None if holds is None else holds.name,
                kinds.get(file.spec.tensor_name(file.layer), ""),
            )
            for file, holds in names
        ]


def chat_render(folder: Path, tokenizer: Tokenizer) -> Render | None:
    """Writes a chat as the gateway does with the files of `folder`; None without a template."""
    template = local_chat_template(folder, tokenizer)
    if template is None:
        return None

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return template.render(messages)
        except ApiError as error:
            raise ValueError(str(error)) from error

    return render
