"""Write an mcore GPT as a `.nemo` file, also one that is read from a GGUF file.

Write an mcore GPT as a `.nemo` file, in the layout NeMo 1.23 gives it.

A `.nemo` file is a tar archive: artifacts and model_config.yaml at its root, and below
model_weights/ a distributed checkpoint of Megatron-LM core 0.5 with its zarr backend. There every
tensor is a folder: `.zarray` (zarr 2, no compressor) and one raw file per chunk. The layers of a
stack form one tensor with a leading layer axis, in chunks of one layer; the two halves of a gated
linear_fc1 (first the activated one) are chunks of their own.

Nothing but one chunk is held in memory, and no torch is needed: the few files that are
torch.save's are written as the zip archives they are.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import ARTIFACT
from launcher_scripts.checkpoint.layout.source_checkpoint import Hints
from launcher_scripts.checkpoint.layout.tasks import plan_tasks
from launcher_scripts.checkpoint.sources.gguf_checkpoint import GGUFCheckpoint
from launcher_scripts.checkpoint.sources.gguf_tokenizer import gguf_special_tokens
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models import gpt_weights
from launcher_scripts.models.gpt import GPTConfig

WEIGHTS = "model_weights"

METADATA = {
    "sharded_backend": "zarr",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

# Transformer Engine keeps a state of its own beside each of these; empty outside FP8 training.
LINEARS = (
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Weight:
    """One tensor of a state dict, read when its turn comes. `read` returns float32 or float16."""

    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]
    dtype: str = "<f4"


@dataclass(frozen=True)
class ZarrTensor:
    """One stored tensor: `chunk` returns the values at an index of the chunk grid."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    chunk: Callable[[tuple[int, ...]], NDArray[Any]]
    dtype: str = "<f4"

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Every index of the chunk grid, last axis fastest."""
        sizes = zip(self.shape, self.chunks, strict=True)
        return product(*(range(-(-size // chunk)) for size, chunk in sizes))

    @property
    def chunk_bytes(self) -> int:
        return int(np.prod(self.chunks)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class _ArchiveFile:
    """One file of the archive, its bytes made when they are written."""

    path: str
    size: int
    content: Callable[[], bytes | memoryview]


def stacked_tensors(weights: Mapping[str, Weight], *, gated: bool) -> list[ZarrTensor]:
    """The stored tensors of an unsharded mcore GPT state dict.

    weights: keys without the prefix `model.`, layers as `decoder.layers.<n>.<rest>`
    gated:   whether linear_fc1 holds two halves

    Raises CheckpointError when layers are missing or their shapes differ.
    """
    layers: dict[str, dict[int, Weight]] = {}
    tensors = []
    for key, weight in weights.items():
        match = _LAYER.fullmatch(key)
        if match:
            layers.setdefault(match[2], {})[int(match[1])] = weight
        else:
            tensors.append(_single(f"model.{key}", weight))
    _check_layers(layers)
    for suffix, stack in layers.items():
        tensors.append(_stack(f"model.decoder.layers.{suffix}", suffix, stack, gated))
    return tensors


def _check_layers(layers: Mapping[str, Mapping[int, Weight]]) -> None:
    problems = Problems("the state dict")
    count = 1 + max((max(stack) for stack in layers.values()), default=-1)
    for suffix, stack in layers.items():
        missing = sorted(set(range(count)) - set(stack))
        if missing:
            problems.add(f"decoder.layers.*.{suffix} is missing for layers {missing}")
        kinds = {(weight.shape, weight.dtype) for weight in stack.values()}
        if len(kinds) > 1:
            problems.add(f"decoder.layers.*.{suffix} differs between layers", got=sorted(kinds))
    problems.raise_if_any(CheckpointError)


def _single(name: str, weight: Weight) -> ZarrTensor:
    return ZarrTensor(name, weight.shape, weight.shape, lambda _: weight.read(), weight.dtype)


def _stack(name: str, suffix: str, stack: Mapping[int, Weight], gated: bool) -> ZarrTensor:
    shape = stack[0].shape
    halves = 2 if gated and suffix in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias") else 1
    rows = shape[0] // halves

    def chunk(index: tuple[int, ...]) -> NDArray[Any]:
        values = stack[index[0]].read()
        return values[index[1] * rows : (index[1] + 1) * rows][None]

    return ZarrTensor(name, (len(stack), *shape), (1, rows, *shape[1:]), chunk, stack[0].dtype)


def write_nemo(
    path: Path,
    config: Mapping[str, Any],
    tensors: list[ZarrTensor],
    artifacts: Mapping[str, bytes],
    *,
    overwrite: bool = False,
) -> None:
    """Write one `.nemo` file, completely or not at all.

    config:    becomes model_config.yaml; its values name artifacts as `nemo:<artifact name>`
    artifacts: names (of artifact_name) and contents of the files at the archive's root

    Raises CheckpointError when `path` exists and `overwrite` is not asked, or when a chunk is not
    of the announced size.
    """
    if path.exists() and not overwrite:
        raise CheckpointError(problem("the .nemo file exists already", got=str(path)))
    members = [
        _constant("model_config.yaml", yaml.safe_dump(dict(config), sort_keys=False).encode()),
        *(_constant(name, content) for name, content in artifacts.items()),
        _constant(f"{WEIGHTS}/metadata.json", json.dumps(METADATA).encode()),
        _constant(f"{WEIGHTS}/common.pt", _torch_file("common", b"\x80\x02}q\x00.")),
        *(member for tensor in tensors for member in _tensor_members(tensor)),
        *_extra_states(int(config["num_layers"])),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        with tarfile.open(partial, "x", format=tarfile.PAX_FORMAT) as archive:
            _add_members(archive, members)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def artifact_name(name: str, content: bytes) -> str:
    """The name of an artifact in the archive: 32 hexadecimal digits before its own name."""
    return f"{hashlib.sha256(content).hexdigest()[:32]}_{name}"


def _constant(path: str, content: bytes) -> _ArchiveFile:
    return _ArchiveFile(path, len(content), lambda: content)


def _tensor_members(tensor: ZarrTensor) -> Iterator[_ArchiveFile]:
    folder = f"{WEIGHTS}/{tensor.name}"
    header = {
        "chunks": list(tensor.chunks),
        "compressor": None,
        "dtype": tensor.dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(tensor.shape),
        "zarr_format": 2,
    }
    yield _constant(f"{folder}/.zarray", json.dumps(header, indent=4).encode())
    for index in tensor.indices():
        name = ".".join(map(str, index))
        yield _ArchiveFile(f"{folder}/{name}", tensor.chunk_bytes, _chunk_reader(tensor, index))


def _chunk_reader(tensor: ZarrTensor, index: tuple[int, ...]) -> Callable[[], memoryview]:
    def read() -> memoryview:
        values = np.ascontiguousarray(tensor.chunk(index), dtype=tensor.dtype)
        if values.shape != tensor.chunks:
            raise CheckpointError(
                problem(
                    f"chunk {index} of {tensor.name} has another shape than announced",
                    got=values.shape,
                    choices=(tensor.chunks,),
                )
            )
        return values.data.cast("B")

    return read


def _extra_states(num_layers: int) -> Iterator[_ArchiveFile]:
    """The empty states of Transformer Engine: an io.BytesIO that holds a torch.save of None."""
    buffer = io.BytesIO(_torch_file("archive", b"\x80\x02N."))
    buffer.seek(0, io.SEEK_END)
    for linear in LINEARS:
        for layer in range(num_layers):
            name = f"shard_{layer}_{num_layers}"
            folder = f"{WEIGHTS}/model.decoder.layers.{linear}._extra_state"
            yield _constant(
                f"{folder}/{name}.pt", _torch_file(name, pickle.dumps(buffer, protocol=2))
            )


def _torch_file(name: str, pickled: bytes) -> bytes:
    """Return the bytes that torch.save writes for an object without tensors, from its pickle."""
    identity = str(int.from_bytes(hashlib.sha256(pickled).digest(), "big"))[:40]
    records = {
        "data.pkl": pickled,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        "version": b"3\n",
        ".data/serialization_id": identity.encode(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for record, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"{name}/{record}"), content)
    return buffer.getvalue()


def _add_members(archive: tarfile.TarFile, members: list[_ArchiveFile]) -> None:
    """Folders and files in the order of tarfile.add: by name, depth first."""
    now = int(time.time())
    archive.addfile(_folder(".", now, mode=0o700))
    added: set[str] = set()
    for member in sorted(members, key=lambda member: member.path.split("/")):
        parents = [str(parent) for parent in Path(member.path).parents][-2::-1]
        for parent in parents:
            if parent not in added:
                archive.addfile(_folder(f"./{parent}", now))
                added.add(parent)
        info = tarfile.TarInfo(f"./{member.path}")
        info.size, info.mtime, info.mode = member.size, now, 0o644
        archive.addfile(info, io.BytesIO(member.content()))


def _folder(name: str, now: int, mode: int = 0o755) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mtime, info.mode = tarfile.DIRTYPE, now, mode
    return info


ARCHITECTURE = "llama"
CONFIG = Path(__file__).with_name("nemo_llama_config.yaml")

VOCABULARY_MULTIPLE = 128  # make_vocab_size_divisible_by of nemo_llama_config.yaml

EMBEDDING, OUTPUT, FINAL_NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
# mcore key -> Hugging Face's tensor, where one is the other.
PER_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


class GGUFLlama:
    """An open GGUF file; tensors are dequantised to float32 when they are read.

    Raises CheckpointError when the file is of another architecture, lacks fields or tensors, or has
    what nemo_llama_config.yaml does not speak of: biases, scaled rotary positions.
    """

    def __init__(self, path: Path) -> None:
        self.checkpoint = GGUFCheckpoint.open(Archive(path), Hints())
        self.metadata = self.checkpoint.metadata
        config, architecture = self.checkpoint.config, self.checkpoint.architecture
        plain = _plain(config) if isinstance(config, GPTConfig) else None
        if architecture != ARCHITECTURE or plain is None or config != plain:
            raise CheckpointError(problem(f"{path} is not a plain Llama", got=architecture))
        self.shape = plain
        plan_tasks(self.checkpoint, gpt_weights.weights(self.shape), f"the GGUF file {path}")

    @property
    def tied_embeddings(self) -> bool:
        """Return whether the output layer is the embedding table."""
        return self.shape.tied_embeddings

    def weights(self, query_groups: int | None = None) -> dict[str, Weight]:
        """The mcore GPT state dict, keys without the prefix `model.`.

        query_groups: at least the file's number of key/value heads. Further groups are filled
        with zeros, the output projection's columns included, so that the model computes the same
        function with a number of heads that more tensor-parallel sizes divide.
        """
        groups = query_groups or self.shape.num_kv_heads
        if groups < self.shape.num_kv_heads:
            raise CheckpointError(
                problem(
                    "query_groups must not be less than the key/value heads of the file",
                    got=groups,
                    choices=(f"{self.shape.num_kv_heads} or more",),
                )
            )
        weights = {
            "embedding.word_embeddings.weight": self._vocabulary(EMBEDDING),
            "decoder.final_layernorm.weight": self._weight(FINAL_NORM),
        }
        if not self.tied_embeddings:
            weights["output_layer.weight"] = self._vocabulary(OUTPUT)
        for layer in range(self.shape.num_layers):
            for key, value in self._layer(f"layers.{layer}", groups).items():
                weights[f"decoder.layers.{layer}.{key}"] = value
        return weights

    def _layer(self, block: str, groups: int) -> dict[str, Weight]:
        shape = self.shape
        heads = shape.num_heads // shape.num_kv_heads  # query heads of one group
        qkv_rows = groups * (heads + 2) * shape.head_size
        return {
            **{key: self._weight(f"{block}.{name}") for key, name in PER_LAYER.items()},
            "self_attention.linear_qkv.weight": Weight(
                (qkv_rows, shape.hidden_size), partial(self._qkv, block, groups)
            ),
            "self_attention.linear_proj.weight": Weight(
                (shape.hidden_size, groups * heads * shape.head_size),
                partial(self._projection, block, groups),
            ),
            "mlp.linear_fc1.weight": Weight(
                (2 * shape.ffn_size, shape.hidden_size), partial(self._gate_and_up, block)
            ),
        }

    def read(self, name: str) -> NDArray[Any]:
        """One tensor as float32, rows as output features, in Hugging Face's order."""
        return self.checkpoint.tensors[name].read()

    def _weight(self, name: str) -> Weight:
        return Weight(self.checkpoint.tensors[name].shape, partial(self.read, name))

    def _vocabulary(self, name: str) -> Weight:
        """A table with a row per token, filled up with zeros to a multiple as NeMo does."""
        rows = self.shape.vocab_size
        padding = -rows % VOCABULARY_MULTIPLE
        return Weight(
            (rows + padding, self.shape.hidden_size),
            lambda: np.pad(self.read(name), ((0, padding), (0, 0))) if padding else self.read(name),
        )

    def _qkv(self, block: str, groups: int) -> NDArray[Any]:
        """[groups * (heads of a group + 2) * head_size, hidden]: q.. k v of every group."""
        shape = self.shape
        q, k, v = (self.read(f"{block}.self_attn.{part}_proj.weight") for part in "qkv")
        rows = (shape.num_kv_heads, -1, shape.head_size, shape.hidden_size)
        parts = [part.reshape(rows) for part in (q, k, v)]
        merged = np.concatenate(parts, axis=1)  # [G, H/G + 2, D, hidden]
        padding = ((0, groups - shape.num_kv_heads), (0, 0), (0, 0), (0, 0))
        return np.pad(merged, padding).reshape(-1, shape.hidden_size)

    def _projection(self, block: str, groups: int) -> NDArray[Any]:
        """[hidden, groups * heads of a group * head_size]."""
        weight = self.read(f"{block}.self_attn.o_proj.weight")
        per_group = weight.shape[1] // self.shape.num_kv_heads
        return np.pad(weight, ((0, 0), (0, (groups - self.shape.num_kv_heads) * per_group)))

    def _gate_and_up(self, block: str) -> NDArray[Any]:
        parts = [self.read(f"{block}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        return np.concatenate(parts)


def _plain(config: GPTConfig) -> GPTConfig:
    """The Llama of the same sizes that has nothing else."""
    sizes = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size")
    others = ("ffn_size", "max_positions", "rotary_base", "norm_eps", "tied_embeddings")
    ids = ("start_id", "end_id", "pad_id")
    return GPTConfig(
        position_embedding="rope",
        normalization="rmsnorm",
        activation="silu",
        gated=True,
        attention_bias=False,
        mlp_bias=False,
        **{name: getattr(config, name) for name in (*sizes, *others, *ids)},
    )


def nemo_config(
    llama: GGUFLlama, artifacts: Mapping[str, str], query_groups: int
) -> dict[str, Any]:
    """NeMo's model_config.yaml for the weights that `llama.weights(query_groups)` gives.

    artifacts: key of section `tokenizer` -> name of the artifact: `model`, and of COMPANIONS
    """
    shape = llama.shape
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config |= {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": query_groups * (shape.num_heads // shape.num_kv_heads),
        "num_query_groups": query_groups,
        "kv_channels": shape.head_size,
        "encoder_seq_length": shape.max_positions,
        "max_position_embeddings": shape.max_positions,
        "layernorm_epsilon": shape.norm_eps,
        "rotary_base": shape.rotary_base,
        "share_embeddings_and_output_weights": llama.tied_embeddings,
    }
    config["tokenizer"] |= {
        "library": "huggingface",
        **{key: f"{ARTIFACT}{name}" for key, name in artifacts.items()},
        "special_tokens": gguf_special_tokens(llama.metadata),
    }
    config["data"]["seq_length"] = shape.max_positions
    return config
