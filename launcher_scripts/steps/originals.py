"""The original of a served model: where it lies, how it reads texts, and how its tensors differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.layout.source_checkpoint import Hints
from launcher_scripts.checkpoint.layout.tasks import make_plan
from launcher_scripts.checkpoint.repository.text_models import TRANSFORMERS
from launcher_scripts.checkpoint.sources import nemo_training
from launcher_scripts.checkpoint.verification import altered_files
from launcher_scripts.common.errors import CheckpointError, ConfigError, problem
from launcher_scripts.common.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from launcher_scripts.config.twin import TwinSettings
from launcher_scripts.evaluation.tasks.transformers_model import TransformersText
from launcher_scripts.evaluation.twin.diagnosis import AlteredFile
from launcher_scripts.evaluation.twin.texts import Render, TextSide
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.loading import own_chat_template
from launcher_scripts.models import family_of
from launcher_scripts.models.ini_text import FILE_NAME
from launcher_scripts.steps.references import ENGINE, RUNNERS, missing_packages, runner_of

KEY = "evaluate.twin.checkpoint"
RUNNER_KEY = "evaluate.twin.runner"
# What an export may be told: they are not part of what is computed.
_TOLD = ("start_id", "end_id", "pad_id")


def served_checkpoint(folder: Path) -> FTCheckpoint | None:
    """The exported folder that is served, where it can be read here."""
    if not (folder / FILE_NAME).is_file():
        return None
    return FTCheckpoint.open(folder, verify=False)


@dataclass(frozen=True)
class Original:
    """A source checkpoint, opened by its reader.

    path:      as the reader takes it
    source:    a SourceCheckpoint
    num_heads: what the reader has to be told; None: nothing
    """

    path: Path
    source: Any
    num_heads: int | None = None

    @classmethod
    def of(cls, settings: TwinSettings, served: FTCheckpoint | None) -> Original:
        """The one that the settings name, else what the served model was exported from.

        Raises ConfigError where there is none, or it lacks what the served one has learned.
        """
        manifest = served.manifest if served is not None else None
        known = dict(manifest.source) if manifest is not None else {}
        name = settings.checkpoint or known.get("path")
        if known.get("adapters"):
            what = "the original alone does not have the served model's adapters"
            raise ConfigError(problem(what, got=sorted(known["adapters"]), change=KEY))
        if name is None or not Path(name).exists():
            what = "the original checkpoint is not there"
            if settings.checkpoint is None:
                what += ", which the served model's manifest should name"
            raise ConfigError(problem(what, got=name, change=KEY))
        path, wanted = nemo_training.locate(Path(name), "last")
        config: Any = served.config if served is not None else None
        only = bool(getattr(config, "encoder_only", False))
        # Its files alone tell neither a config.ini for random weights nor how many heads there are.
        same = settings.checkpoint is None
        heads = config.num_heads if same and known.get("format") == "megatron" else None
        kind = str(known.get("format")) if same else "auto"
        return cls(path, open_source(Archive(path), kind, Hints(heads, only, wanted, True)), heads)

    @property
    def format(self) -> str:
        return str(self.source.describe()["format"])

    def runner(self, wanted: str) -> str:
        """What runs it: `wanted`, of `auto` the maker's code where that is installed.

        Raises ConfigError for one that does not read this format or is not installed.
        """
        maker = runner_of(self.format)
        if wanted == "auto":
            return ENGINE if maker is None or missing_packages(maker) else maker
        if wanted not in (ENGINE, maker):
            choices = ["auto", ENGINE, *([maker] if maker else [])]
            what = f"{RUNNERS[wanted].source} is what this runner reads, not {self.format}"
            raise ConfigError(problem(what, got=wanted, choices=choices, change=RUNNER_KEY))
        if wanted != ENGINE and (missing := missing_packages(wanted)):
            what = f"this Python has no {' and '.join(missing)}"
            raise ConfigError(problem(what, got=wanted, choices=["auto"], change=RUNNER_KEY))
        return wanted

    def text_side(self, runner: str, folder: Path) -> TextSide | None:
        """How it reads texts; None for a checkpoint without a tokenizer.

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
                theirs = TransformersText(self.path)
            except ConfigError as error:
                print(f"note: this project reads the original's texts: {error}", flush=True)
            else:
                render = theirs.render if theirs.has_chat_template else None
                return TextSide(theirs.encode, tokenizer, render)
        before, after = tokenizer.around() if self.format in TRANSFORMERS else ([], [])
        return TextSide(
            lambda text: [*before, *tokenizer.encode(text), *after],
            tokenizer,
            chat_render(folder, tokenizer),
        )

    def other_settings(self, served: FTCheckpoint) -> Mapping[str, tuple[Any, Any]]:
        """Hyperparameters with another value than the source's: name -> (served, original)."""
        ours: Any = served.config
        theirs = self.source.config
        if type(ours) is not type(theirs):
            return {"family": (family_of(ours).name, family_of(theirs).name)}
        pairs = {
            item.name: (getattr(ours, item.name), getattr(theirs, item.name))
            for item in dataclasses.fields(theirs)
            if item.name not in _TOLD
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def altered(self, served: FTCheckpoint) -> Sequence[AlteredFile]:
        """The served files that the source's tensors do not give.

        [] where the tensors cannot be read as the served ones are: a note says why.
        """
        try:
            specs = family_of(self.source.config).weights(self.source.config)
            found = altered_files(served, make_plan(self.source, specs, str(self.path)))
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
            )
            for file, holds in found
        ]


def chat_render(folder: Path, tokenizer: Tokenizer) -> Render | None:
    """Writes a chat as the gateway does with the files of `folder`; None without a template."""
    template = own_chat_template(folder, tokenizer)
    if template is None:
        return None

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return template.render(messages)
        except ApiError as error:
            raise ValueError(str(error)) from error

    return render
