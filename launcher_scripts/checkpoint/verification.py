"""An export in one line before it starts, and its proof: every tensor rebuilt and compared.

The signature of a model repository: made by the export, verified before it is served.

It has the format of OpenSSF's model signing (github.com/sigstore/model-transparency), so that
the command `model_signing` of that package makes and verifies the same one. It covers every file of
the repository: weights, manifests, config.pbtxt, tokenizers, and the code of the text models.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer.folder import DTYPES, FTCheckpoint, WeightFile
from launcher_scripts.checkpoint.fastertransformer.manifest import ALGORITHM, DIGESTS, hash_file
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, Workspace, float32
from launcher_scripts.checkpoint.layout.layouts import rank_columns
from launcher_scripts.checkpoint.layout.tasks import Task
from launcher_scripts.checkpoint.layout.writing import strips
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.config.security import SIGN, VERIFY_SIGNATURE, SigningKey, TrustedSigner
from launcher_scripts.models import value_count
from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec
from launcher_scripts.models.repository import serving_options

# What two processors and an ordinary disk write, layouts and digests included
# (benchmarks/export.py); more of them are faster.
BYTES_PER_SECOND = 4e8


@dataclass(frozen=True)
class Forecast:
    """Sizes in bytes; parameters are counted once, however often they are tied."""

    source: str
    family: str
    parameters: int
    bytes_to_read: int
    bytes_to_write: int
    bytes_free: int

    @classmethod
    def of(
        cls, source: str, family: str, tasks: Iterable[Task], bytes_to_write: int, bytes_free: int
    ) -> Forecast:
        """Measure the source tensors of `tasks`."""
        tensors = {_location(tensor): tensor for task in tasks for tensor in task.tensors}
        parameters = sum(_count(tensor) for tensor in tensors.values())
        pieces = [piece for tensor in tensors.values() for piece in tensor.pieces]
        to_read = sum(piece.values.nbytes for piece in pieces)
        return cls(source, family, parameters, to_read, bytes_to_write, bytes_free)

    @property
    def seconds(self) -> float:
        return max(self.bytes_to_write, self.bytes_to_read) / BYTES_PER_SECOND

    def __str__(self) -> str:
        return (
            f"plan: a {self.family} of {self.parameters / 1e6:,.1f} million parameters from "
            f"{self.source}; reads {self.bytes_to_read / 1e9:,.2f} GB, writes "
            f"{self.bytes_to_write / 1e9:,.2f} GB, {self.bytes_free / 1e9:,.0f} GB free; "
            f"about {max(self.seconds, 1):,.0f} s"
        )


def _location(tensor: SourceTensor) -> object:
    """Return a key that tasks reading the same tensor share."""
    if not tensor.pieces:
        return id(tensor)
    return tensor.pieces[0].values.__array_interface__["data"][0]


def _count(tensor: SourceTensor) -> int:
    return tensor.nbytes // tensor.dtype.itemsize


def weight_bytes(config: ModelConfig, tp_size: int, weight_data_type: str) -> int:
    """Size of all .bin files together."""
    return DTYPES[weight_data_type].itemsize * value_count(config, tp_size)


def verify_export(folder: Path, tasks: Sequence[Task], processes: int) -> None:
    """Compare `folder` with what `tasks` read from the source, bit by bit.

    Raises CheckpointError with every tensor that differs, and for what FTCheckpoint.open refuses.
    """
    checkpoint = FTCheckpoint.open(folder)
    problems = Problems(f"the exported checkpoint {folder}")
    workers = min(processes, len(os.sched_getaffinity(0)))
    per_thread = threading.local()

    def start() -> None:
        per_thread.workspace = Workspace()

    def same(task: Task) -> bool:
        return _same(checkpoint, task, per_thread.workspace)

    with ThreadPoolExecutor(workers, initializer=start) as pool:
        for task, sound in zip(tasks, pool.map(same, tasks), strict=True):
            if not sound:
                problems.add(f"{task.name} is not what the source holds")
    problems.raise_if_any(CheckpointError)


def altered_files(
    checkpoint: FTCheckpoint, tasks: Sequence[Task]
) -> list[tuple[WeightFile, WeightFile | None]]:
    """The files that are not what `tasks` read from the source, each with the one whose content
    it has; None: that of none.
    """
    expected: dict[str, tuple[WeightFile, str]] = {}
    workspace = Workspace()
    for task in tasks:
        blocks = task.blocks(workspace)
        for file in task.files(checkpoint.tp_size):
            columns = rank_columns(task.spec, task.config, checkpoint.tp_size, file.tp_rank, blocks)
            digest = DIGESTS[ALGORITHM]()
            for strip in strips(
                columns, checkpoint.dtype, task.name, workspace, allow_nonfinite=True
            ):
                digest.update(np.ascontiguousarray(strip).reshape(-1).view(np.uint8).data)
            expected[file.name] = (file, digest.hexdigest())
    owners = {digest: file for file, digest in expected.values()}
    altered = []
    for name, (file, right) in expected.items():
        result = hash_file(checkpoint.folder / name)
        if result != right:
            altered.append((file, owners.get(result)))
    return altered


def altered_tensors(
    checkpoint: FTCheckpoint, tasks: Sequence[Task], files: Iterable[WeightFile]
) -> dict[str, str]:
    """The tensors that the altered `files` are of, with what distinguishes each from the source's
    (tensor_kind).
    """
    names = {file.spec.tensor_name(file.layer) for file in files}
    workspace, kinds = Workspace(), {}
    for task in tasks:
        name = task.spec.tensor_name(task.layer)
        if name not in names:
            continue
        values = rebuilt(checkpoint, task.spec, task.layer)
        if values is None:
            kinds[name] = "different copies of a head"
            continue
        pieces = _strips(task, checkpoint.dtype, workspace)
        expected = np.concatenate([np.array(strip).reshape(-1) for strip in pieces])
        expected = expected.view(values.dtype).reshape(values.shape)
        kinds[name] = tensor_kind(float32(values), float32(expected))
    return kinds


def tensor_kind(values: NDArray[Any], expected: NDArray[Any]) -> str:
    """What distinguishes a stored tensor from the one that it should be, in a few words."""
    one, other = (np.asarray(item, dtype=np.float64) for item in (values, expected))
    if not np.isfinite(one).all():
        return "not numbers"
    if not one.any():
        return "zero"
    if one.ndim == 2:
        if one.shape[0] == one.shape[1] and np.array_equal(one, other.T):
            return "transposed"
        if np.array_equal(one.ravel(), other.T.ravel()):
            return "transposed in memory"
        for axis, label in ((0, "rows"), (1, "columns")):
            if _same_lines(one, other, axis):
                return f"{label} in another order"
    if np.array_equal(np.sort(one, axis=None), np.sort(other, axis=None)):
        return "values in another order"
    different = one != other
    if different.mean() < 0.5:
        return _partial(different)
    scale = float((one * other).sum() / max(float((other * other).sum()), 1e-300))
    size = max(_rms(other), 1e-30)
    if np.abs(one - scale * other).max() < 1e-3 * size * max(abs(scale), 1e-3):
        return "of the other sign" if abs(scale + 1) < 1e-3 else f"multiplied by {scale:.4g}"
    shift = float(np.mean(one - other))
    if np.abs(one - other - shift).max() < 1e-3 * size:
        return f"shifted by {shift:.4g}"
    error = _rms(one - other) / size
    return f"rounded (error {error:.2g})" if error < 0.02 else f"other values (error {error:.2g})"


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _same_lines(one: NDArray[Any], other: NDArray[Any], axis: int) -> bool:
    lines, expected = (
        np.sort(np.moveaxis(item, axis, 0) @ _weights(item, axis)) for item in (one, other)
    )
    return bool(np.allclose(lines, expected, rtol=1e-9, atol=1e-12))


def _weights(values: NDArray[Any], axis: int) -> NDArray[Any]:
    """Numbers that tell the lines along `axis` apart by their sums."""
    return np.random.default_rng(0).normal(size=values.shape[1 - axis])


def _partial(different: NDArray[np.bool_]) -> str:
    if different.ndim != 2:
        positions = np.flatnonzero(different)
        return f"other values from {positions[0]} to {positions[-1]}"
    rows, columns = (np.flatnonzero(different.any(axis=axis)) for axis in (1, 0))
    return f"other values in rows {rows[0]} to {rows[-1]}, columns {columns[0]} to {columns[-1]}"


def rebuilt(checkpoint: FTCheckpoint, spec: WeightSpec, layer: int | None) -> NDArray[Any] | None:
    """One whole stored tensor of an exported folder; None when copies of a head differ."""
    config, tp_size = checkpoint.config, checkpoint.tp_size
    if tp_size == 1 or not spec.partition.per_rank:
        return checkpoint.read(spec, layer)
    ranks = [checkpoint.read(spec, layer, rank) for rank in range(tp_size)]
    if spec.partition is Partition.ROW_PARALLEL:
        rows: NDArray[Any] = np.concatenate([rank.view(_bits(rank)) for rank in ranks])
        return rows.view(checkpoint.dtype)
    blocks, start = [], 0
    for axis in spec.blocks or spec.shape[-1:]:
        stop = start + config.local_size(axis, tp_size)
        parts = [rank.view(_bits(rank))[..., start:stop] for rank in ranks]
        full = np.concatenate(parts, axis=-1)
        start = stop
        copies = full.shape[-1] // int(getattr(config, axis))
        if copies > 1:
            size = int(getattr(config, "head_size", 1))
            heads = full.reshape(*full.shape[:-1], -1, copies, size)
            if not (heads == heads[..., :1, :]).all():
                return None
            full = heads[..., 0, :].reshape(*full.shape[:-1], -1)
        blocks.append(full)
    together = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=-1)
    return np.ascontiguousarray(together).view(checkpoint.dtype)


def full_tensor(checkpoint: FTCheckpoint, spec: WeightSpec, layer: int | None) -> NDArray[Any]:
    """See `rebuilt`. Raises CheckpointError when copies of a head differ."""
    values = rebuilt(checkpoint, spec, layer)
    if values is None:
        name = spec.tensor_name(layer)
        raise CheckpointError(f"{checkpoint.folder}: the ranks' copies of a head of {name} differ")
    return values


def _strips(task: Task, dtype: np.dtype[Any], workspace: Workspace) -> Iterator[NDArray[Any]]:
    """The source's values as they are stored, in pieces."""
    columns = [unit for block in task.blocks(workspace) for unit in block]
    return strips(columns, dtype, task.name, workspace, allow_nonfinite=True)


def _same(checkpoint: FTCheckpoint, task: Task, workspace: Workspace) -> bool:
    """Return whether the rebuilt tensor has the bits that the source's values become."""
    values = rebuilt(checkpoint, task.spec, task.layer)
    if values is None:
        return False
    data = values.reshape(-1).view(np.uint8)
    at = 0
    for strip in _strips(task, checkpoint.dtype, workspace):
        expected = strip.reshape(-1).view(np.uint8)
        if not np.array_equal(data[at : at + expected.size], expected):
            return False
        at += expected.size
    return at == data.size


def _bits(values: NDArray[Any]) -> np.dtype[Any]:
    """An integer type of the same width: bfloat16's own type knows no arithmetic."""
    return np.dtype(f"<u{values.itemsize}")


FILE_NAME = "model.sig"
PACKAGE = "the package model-signing (requirements/sign.txt)"
_COMPILED = "__pycache__"
# How the package lists files that are not as they were signed.
_DIFFERENCES = {
    "altered": re.compile(r"Hash mismatch for \\*'(.*?)\\*'"),
    "not in the signature": re.compile(r"Extra files found in model \\*'.*?\\*': (.*?)[\"']"),
    "missing": re.compile(r"Missing files in model \\*'.*?\\*': (.*?)[\"']"),
}


def sign_repository(repository: Path, signer: SigningKey, change: str = SIGN) -> Path:
    """Write the signature of all files in the folder; returns its path.

    change: the key that names the signer

    Raises CheckpointError where a key cannot be used or a file is a link.
    """
    with _errors(f"{repository} cannot be signed", change):
        from model_signing import hashing, signing

        _remove_compiled(repository)
        path = repository / FILE_NAME
        partial = path.with_name(f"{FILE_NAME}.partial")
        config = signing.Config()
        if signer.certificate is None:
            config.use_elliptic_key_signer(private_key=signer.key)
        else:
            config.use_certificate_signer(
                private_key=signer.key,
                signing_certificate=signer.certificate,
                certificate_chain=signer.chain,
            )
        # BLAKE3 reads a file with all processors; no other file may be left out.
        hashed = hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        hashed.set_ignored_paths(paths=[path, partial], ignore_git_paths=False)
        config.set_hashing_config(hashed)
        try:
            config.sign(repository, partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def verify_signature(repository: Path, signer: TrustedSigner) -> None:
    """Raise CheckpointError unless `signer` signed all files of the folder as they are.

    What Python compiled of the text models is removed before, since no signature covers it.
    """
    path = repository / FILE_NAME
    if not path.is_file():
        change = f"{VERIFY_SIGNATURE}=null, or export again with {SIGN}"
        raise CheckpointError(problem(f"{repository} is not signed: no {FILE_NAME}", change=change))
    _check_inside(repository)
    with _errors(f"the signature of {repository} is not valid", VERIFY_SIGNATURE):
        from model_signing import hashing, verifying

        _remove_compiled(repository)
        config = verifying.Config()
        if signer.public_key is not None:
            config.use_elliptic_key_verifier(public_key=signer.public_key)
        else:
            config.use_certificate_verifier(certificate_chain=signer.certificates)
        hashed = hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        hashed.set_ignored_paths(paths=[path], ignore_git_paths=False)
        config.set_hashing_config(hashed)
        config.verify(repository, path)


def _check_inside(repository: Path) -> None:
    """Raise CheckpointError for a draft model that is outside of the signed folder."""
    problems = Problems(f"what the signature of {repository} does not cover")
    for config in sorted(repository.glob("*/config.pbtxt")):
        draft = serving_options(config)["draft_model_dir"]
        if draft and not Path(draft).is_relative_to(repository):
            change = f"export.triton_deployment.draft_model_dir, or {VERIFY_SIGNATURE}=null"
            problems.add(f"the draft model of {config.parent.name}", got=draft, change=change)
    problems.raise_if_any(CheckpointError)


def _remove_compiled(repository: Path) -> None:
    """Remove bytecode, which Python would believe without a look at the code."""
    for folder in [*map(Path, (root for root, _, _ in os.walk(repository)))]:
        if folder.name == _COMPILED:
            shutil.rmtree(folder)


@contextmanager
def _errors(message: str, change: str) -> Iterator[None]:
    """Whatever the package raises is one CheckpointError, with its reason in one line."""
    try:
        yield
    except LauncherError:
        raise
    except ImportError as error:
        raise CheckpointError(
            problem(f"{message}: this Python lacks {PACKAGE}: {error}", change=change)
        ) from error
    except Exception as error:
        raise CheckpointError(problem(f"{message}: {_reason(error)}", change=change)) from error


def _reason(error: Exception) -> str:
    """The differing files by kind, else the message, in one line."""
    text = " ".join(str(error).split())
    result = {kind: pattern.findall(text) for kind, pattern in _DIFFERENCES.items()}
    kinds = [f"{kind}: {', '.join(names)}" for kind, names in result.items() if names]
    return "; ".join(kinds) or text or type(error).__name__
