"""Ways to plant a fault into an export, and the certificates that such exports get."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.steps import measure_twin, references
from launcher_scripts.steps.references import OpenedSource
from tests.checkpoint.tiny_models import GPT2, LLAMA, UNTIED
from tests.evaluation import twins

Plant = Callable[[Path], None]
Values = np.ndarray
WINDOWS = {
    **LLAMA,
    **UNTIED,
    "head_dim": 6,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 2,
}
EXPERTS = {
    **LLAMA,
    **UNTIED,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def _of_class(name: str, values: dict[str, Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        twins.write_tokenizer(folder)
        config = f"{name.removesuffix('LMHeadModel').removesuffix('ForCausalLM')}Config"
        return twins._saved(folder, name, config, values)

    return write


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": twins.write_original,
    "qwen3": _of_class("Qwen3ForCausalLM", WINDOWS),
    "gpt2": _of_class("GPT2LMHeadModel", {**GPT2, "n_positions": 64}),
    "mixtral": _of_class("MixtralForCausalLM", EXPERTS),
    "t5": twins.write_t5_original,
}


@dataclass(frozen=True)
class Planted:
    """A fault: how it is planted, and the parts and the layer that would be right to name."""

    family: str
    name: str
    plant: Plant | None
    parts: tuple[str, ...]
    layer: int | None = None
    hidden: bool = False
    client: type[twins.InProcess] | None = None


def seal(folder: Path) -> None:
    """Write the manifest anew, of the files as they are: a server takes them."""
    manifest = read_manifest(folder)
    assert manifest is not None
    files = []
    for entry in manifest.files:
        content = (folder / entry.name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        files.append(
            replace(entry, algorithm="sha256", digest=digest, crc32=None, bytes=len(content))
        )
    replace(manifest, files=tuple(files)).write(folder)


def tensor(
    stem: str, made: Callable[[Values], Values], shape: tuple[int, int] | None = None
) -> Plant:
    def plant(folder: Path) -> None:
        (file,) = sorted(folder.glob(f"{stem}*.bin"))
        values = np.fromfile(file, np.float32)
        values = made(values if shape is None else values.reshape(shape))
        file.write_bytes(np.ascontiguousarray(values, np.float32).tobytes())

    return plant


def exchanged(one: str, other: str) -> Plant:
    def plant(folder: Path) -> None:
        (first,), (second,) = (sorted(folder.glob(f"{stem}*.bin")) for stem in (one, other))
        values, others = first.read_bytes(), second.read_bytes()
        assert len(values) == len(others) and values != others
        first.write_bytes(others)
        second.write_bytes(values)

    return plant


def setting(name: str, value: Any) -> Plant:
    """Another value in config.ini; None: the line is removed."""

    def plant(folder: Path) -> None:
        file = folder / "config.ini"
        lines = file.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(f"{name} = ")]
        if value is not None:
            where = [n for n, line in enumerate(lines) if line.startswith(f"{name} = ")]
            kept = [f"{name} = {value}" if n in where else line for n, line in enumerate(lines)]
            if not where:
                kept = [*lines, f"{name} = {value}"]
        assert kept != lines, name
        file.write_text("\n".join(kept) + "\n")

    return plant


def tokenizer(change: Callable[[dict[str, Any]], None]) -> Plant:
    def plant(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return plant


def template(text: str | None) -> Plant:
    def plant(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        content = json.loads(file.read_text())
        content["chat_template"] = text
        if text is None:
            del content["chat_template"]
        file.write_text(json.dumps(content))

    return plant


def noise(values: Values) -> Values:
    return values + np.random.default_rng(0).normal(0, 0.05, values.shape)


def one_column(values: Values) -> Values:
    values[:, 2] = values[:, 3]
    return values


def head_transposed(values: Values) -> Values:
    """The first head's square transposed."""
    values[:4, :4] = values[:4, :4].T.copy()
    return values


def rolled_heads(values: Values) -> Values:
    values[:, :16] = np.roll(values[:, :16], 4, axis=1)
    return values


def keys_and_queries(values: Values) -> Values:
    return np.concatenate([values[:, 16:32], values[:, :16], values[:, 32:]], axis=1)


def keys_and_values(values: Values) -> Values:
    third = (values.shape[1] - 16) // 2
    return np.concatenate([values[:, :16], values[:, 16 + third :], values[:, 16 : 16 + third]], 1)


def paired(values: Values) -> Values:
    """The halves of each head of 4 in pairs, of queries and keys: the other rotary layout."""
    turned = values[:, :24].reshape(16, 6, 4)[:, :, [0, 2, 1, 3]].reshape(16, 24)
    return np.concatenate([turned, values[:, 24:]], axis=1)


def bf16(values: Values) -> Values:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


class Cold(twins.InProcess):
    """A server that divides logits by a temperature."""

    def generate_rows(self, rows: Any, in_flight: int = 8) -> Any:
        for output in super().generate_rows(rows, in_flight):
            logits = output.context_logits
            yield (
                output
                if logits is None
                else replace(output, context_logits=np.asarray(logits) / 0.7)
            )


class Noisy(twins.InProcess):
    """A server whose kernels are not exact."""

    def generate_rows(self, rows: Any, in_flight: int = 8) -> Any:
        for output in super().generate_rows(rows, in_flight):
            logits = output.context_logits
            if logits is not None:
                values = np.asarray(logits)
                noise = np.random.default_rng(0).normal(0, 0.02, values.shape)
                output = replace(output, context_logits=(values + noise).astype(np.float32))
            yield output


class Quantized(twins.InProcess):
    """A server that quantizes and says nothing of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, data_type="bf16", quantization="int8")

    def precision(self, weight_data_type: str) -> str:
        return weight_data_type


class Forgetful(twins.InProcess):
    """A server that reads the first token of a prompt where its fourth should be."""

    def generate_rows(self, rows: Any, in_flight: int = 8) -> Any:
        def wrong(row: GenerateRequest) -> GenerateRequest:
            ids = row.input_ids
            return replace(row, input_ids=(*ids[:3], ids[0], *ids[4:]) if len(ids) > 4 else ids)

        outputs: Any = super().generate_rows([wrong(row) for row in rows], in_flight)
        result: list[GenerateOutput] = list(outputs)
        yield from result


class Bench:
    """Originals and clean exports of the families, made once, and certificates of copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clean: dict[tuple[str, str], Path] = {}

    def clean(self, family: str, data_type: str = "fp32") -> Path:
        key = family, data_type
        if key not in self._clean:
            original = self.folder / family / "original"
            if not original.exists():
                FAMILIES[family](original)
            self._clean[key] = twins.export_original(
                original, self.folder / family / data_type, data_type
            )
        return self._clean[key]

    def certificate(self, fault: Planted, data_type: str = "fp32") -> dict[str, Any]:
        """The certificate of a copy with the fault."""
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        clean = self.clean(fault.family, data_type)
        shutil.copytree(clean, copy / clean.name)
        exported = copy / clean.name
        if fault.plant is not None:
            fault.plant(exported)
            seal(exported)
        kind = twins.T5InProcess if fault.family == "t5" else twins.InProcess
        client = (fault.client or kind)(exported)
        ready = {"http": "nowhere:1", "ranks": []}
        with ExitStack() as stack:
            opened = patch.object(measure_twin, "open_client", lambda _: (client, ready))
            stack.enter_context(opened)
            stack.enter_context(patch("launcher_scripts.evaluation.report.html", lambda _: ""))
            if fault.hidden:
                stack.enter_context(patch.object(references, "altered_files", lambda *_: []))
                stack.enter_context(patch.object(OpenedSource, "other_settings", lambda *_: {}))
            settings = twins.twin_settings(copy / "results", exported, continuation=0)
            measure_twin.measure_twin(settings)
        content: dict[str, Any] = json.loads(
            (copy / "results" / "certificate" / "certificate.json").read_text()
        )
        return content


def is_found(content: dict[str, Any]) -> bool:
    return content["statement"] == "different"


def is_located(fault: Planted, content: dict[str, Any]) -> bool:
    """Return whether the first fault has the right part and, where the fault has one, layer."""
    if not content["faults"]:
        return False
    first = content["faults"][0]
    return first["part"] in fault.parts and fault.layer in (None, first["layer"])
