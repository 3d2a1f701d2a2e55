"""The twin of an export: one prompt through the exported weights, and through another's code.

The exported folder runs in the engine with its reference kernels, the source in the library that
made it, both in float32 on the CPU. What the tensors cannot show is found so: a wrong epsilon, a
wrong base of the rotary positions, a key that nobody read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.convert.export import open_source
from launcher_scripts.checkpoint.convert.forecast import weight_bytes
from launcher_scripts.checkpoint.convert.plan import float32
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.sources.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.common.errors import CheckpointError, ConfigError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.core_model import CoreModel
from launcher_scripts.evaluation.transformers_model import TransformersModel
from launcher_scripts.models.gpt import GPTConfig

PROMPT_TOKENS = 16
DECODER_TOKENS = 8
# Of the largest logit. Both sides hold the weights rounded to weight_data_type and compute in
# float32, so they differ by the order of sums: some 1e-7 for two layers, more for deep models.
TOLERANCE = 1e-4
# Tables that the export scales or multiplies before it rounds them differ by that rounding: two
# and a half times the half types' 2**-11 and 2**-8. These are the dialects that have such tables.
ROUNDED_TOLERANCES = {"fp32": TOLERANCE, "fp16": 1.25e-3, "bf16": 1e-2}
COMBINING = re.compile("_scaled|_projected")
SECONDS = 3600.0
CGROUPS = Path("/sys/fs/cgroup")


class Reference(Protocol):
    """What computes the logits of a source."""

    name: str

    def round_weights(self, data_type: str) -> None: ...

    def logits(
        self, ids: Sequence[int], decoder_ids: Sequence[int] = ()
    ) -> NDArray[np.float32]: ...


def _core_model(path: Path) -> CoreModel:
    checkpoint: Any = open_source(Archive(path))
    if not isinstance(checkpoint, MegatronCoreCheckpoint) or checkpoint.adapters:
        raise ConfigError("the core alone does not have the learned parts")
    if not isinstance(checkpoint.config, GPTConfig):
        raise ConfigError("an encoder-decoder of Megatron-LM core has no reference")
    tensors = checkpoint.tensors.items()
    return CoreModel(
        dict(checkpoint.options.raw), ((name, float32(tensor.read())) for name, tensor in tensors)
    )


# Format of the source -> the packages that its reference needs, and what opens it.
REFERENCES: dict[str, tuple[tuple[str, ...], Callable[[Path], Reference]]] = {
    "huggingface": (("torch", "transformers"), TransformersModel),
    "megatron_core": (("torch", "megatron"), _core_model),
}


def compare(folder: Path, settings: ExportSettings) -> dict[str, Any]:
    """Compare the logits of an exported folder with those of its source; what the manifest says.

    That is `skipped` with the reason where there is no reference.
    Raises CheckpointError when they differ by more than `tolerance`.
    """
    checkpoint = FTCheckpoint.open(folder, verify=False)
    source = checkpoint.manifest.source if checkpoint.manifest is not None else {}
    skipped = _obstacle(checkpoint, source, settings)
    if skipped:
        return _said({"skipped": skipped})
    config: Any = checkpoint.config
    ids, decoder_ids = _prompt(config)
    try:
        reference = REFERENCES[source["format"]][1](Path(source["path"]))
        reference.round_weights(checkpoint.weight_data_type)
        expected = reference.logits(ids, decoder_ids)
    except ConfigError as error:
        return _said({"skipped": str(error)})
    name = reference.name
    del reference
    try:
        found = _engine_logits(folder, checkpoint.tp_size, ids, decoder_ids)
    except ConfigError as error:
        return _said({"skipped": str(error)})
    largest = float(np.abs(expected).max())
    difference = float(np.abs(found - expected).max())
    limit = tolerance(source["dialects"], checkpoint.weight_data_type) * largest
    if not difference <= limit:  # NaN is a difference too
        raise CheckpointError(
            problem(
                f"the exported model computes other logits than {name}",
                got=f"a difference of {difference:.3g}",
                choices=[f"up to {limit:.3g}, the largest logit being {largest:.3g}"],
            )
        )
    return _said(
        {
            "reference": name,
            "prompt": list(ids),
            "largest_difference": difference,
            "largest_logit": largest,
            "tolerance": limit,
        }
    )


def tolerance(dialects: Iterable[str], weight_data_type: str) -> float:
    """The difference that a good export may have, as a part of the largest logit."""
    combined = any(COMBINING.search(dialect) for dialect in dialects)
    return ROUNDED_TOLERANCES[weight_data_type] if combined else TOLERANCE


def _obstacle(checkpoint: FTCheckpoint, source: Any, settings: ExportSettings) -> str:
    """Why there can be no twin; "" where there can."""
    if source.get("format") not in REFERENCES:
        return f"no reference computes checkpoints of {source.get('format')}"
    if settings.prompt_checkpoints or settings.ia3_checkpoints or settings.adapter_checkpoints:
        return "the source alone does not have the learned parts"
    if getattr(checkpoint.config, "encoder_only", False):
        return "an encoder alone has no logits"
    packages, _ = REFERENCES[source["format"]]
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        return f"this Python has no {' and '.join(missing)}"
    needed, free = weight_bytes(checkpoint.config, checkpoint.tp_size, "fp32"), _free_memory()
    if needed > free:
        return f"it needs {needed / 1e9:.1f} GB of memory in float32; {free / 1e9:.1f} GB are free"
    return ""


def _prompt(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids, the same every time: of the prompt, and of the decoder's if there is one."""
    length = min(PROMPT_TOKENS, getattr(config, "max_positions", None) or PROMPT_TOKENS)
    numbers = np.random.default_rng(0).integers(config.vocab_size, size=(2, PROMPT_TOKENS))
    ids = tuple(int(number) for number in numbers[0, :length])
    if not hasattr(config, "num_decoder_layers"):
        return ids, ()
    rest = (int(number) for number in numbers[1, : min(DECODER_TOKENS, length) - 1])
    return ids, (config.start_id, *rest)


def _engine_logits(
    folder: Path, tp_size: int, ids: tuple[int, ...], decoder_ids: tuple[int, ...]
) -> NDArray[np.float32]:
    """float32 [tokens, vocab] at every position of the (decoder's) prompt."""
    from launcher_scripts.engine.engine import Engine, EngineSettings

    settings = EngineSettings(
        folder,
        parallelism=Parallelism(tp_size),
        device="cpu",
        max_batch_size=1,
        max_tokens=4 * PROMPT_TOKENS,
        verify=False,
    )
    engine = Engine.load(settings)
    try:
        request = GenerateRequest(
            ids, output_len=0, decoder_input_ids=decoder_ids, return_context_logits=True
        )
        return np.asarray(engine.submit(request).result(SECONDS).context_logits)
    finally:
        engine.close()


def _free_memory() -> int:
    """Bytes that this job can have: what the node can give, and no more than its cgroups allow.

    What the job holds already is not subtracted: most of it is the page cache of the export.
    """
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return min([int(kilobytes) * 1024, *_cgroup_limits(Path("/proc/self/cgroup"), CGROUPS)])


def _cgroup_limits(memberships: Path, root: Path) -> Iterator[int]:
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


def _said(result: dict[str, Any]) -> dict[str, Any]:
    """Tell the user what the manifest gets."""
    if "skipped" in result:
        print(f"note: no twin was compared: {result['skipped']}", flush=True)
    else:
        print(
            f"the logits differ by {result['largest_difference']:.3g} at most from "
            f"{result['reference']} (tolerance {result['tolerance']:.3g})",
            flush=True,
        )
    return result
