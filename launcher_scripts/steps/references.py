"""What computes the logits of a source checkpoint: its maker's code, or this project's engine.

Both the twin of an export and that of an evaluation take their reference from here.
"""

from __future__ import annotations

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
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.dtypes import float32
from launcher_scripts.checkpoint.sources.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.settings import ExportSettings, TokenizerSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.core_model import CoreModel
from launcher_scripts.evaluation.tasks.nemo_model import NemoModel
from launcher_scripts.evaluation.tasks.task import NoReferenceError, Reference
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel
from launcher_scripts.models.gpt import GPTConfig

ENGINE = "engine"
SECONDS = 3600.0
CGROUPS = Path("/sys/fs/cgroup")


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

    def generate_each(
        self,
        rows: Iterable[GenerateRequest],
        in_flight: int = 8,  # noqa: ARG002
    ) -> Iterator[GenerateOutput]:
        """What every row became, in order."""
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
class Runner:
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
    "transformers": Runner("huggingface", ("torch", "transformers"), TransformersModel),
    "core": Runner("megatron_core", ("torch", "megatron"), _core_model),
    "nemo": Runner("nemo", ("torch", "nemo"), NemoModel, rounds=False),
}


def runner_of(source: str | None) -> str | None:
    """The name of what computes sources of this format; None where nothing but the engine does."""
    return next((name for name, runner in RUNNERS.items() if runner.source == source), None)


def missing_packages(runner: str) -> list[str]:
    """Those that this Python lacks."""
    return [name for name in RUNNERS[runner].packages if find_spec(name) is None]


@contextmanager
def opened_reference(
    path: Path, runner: str, max_tokens: int, told: Mapping[str, Any]
) -> Iterator[Reference]:
    """The original at `path`, run by `runner`: one of RUNNERS, or ENGINE.

    The engine reads the source's tensors as an export in float32, in a temporary folder.
    max_tokens: of a row;  told: fields of ExportSettings that say how it is read
    """
    if runner != ENGINE:
        yield RUNNERS[runner].open(path)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twin-")))
        settings = ExportSettings(
            model_name="original",
            model_type="",
            checkpoint_path=str(path),
            triton_model_dir=str(folder / "original"),
            tokenizer=TokenizerSettings("none"),
            parallelism=Parallelism(),
            weight_data_type="fp32",
            **told,
        )
        name = f"this project's engine, float32 on the CPU: {path}"
        model = EngineModel(export(settings), 1, max_tokens=max_tokens, name=name)
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
        for place in (folder, *folder.parents):
            if place.is_relative_to(root) and (place / file).is_file():
                said = (place / file).read_text(encoding="ascii").strip()
                yield from [] if said == "max" else [int(said)]
