"""A small original with a tokenizer, exports of it, and an evaluation's twin without a server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.model_repository import ModelRepository, encoding_parameters
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.config.evaluation import ReferenceSettings
from launcher_scripts.config.settings import EvaluateSettings, ExportSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.steps import measure_twin
from launcher_scripts.steps.references import EngineModel
from tests.checkpoint.tiny_models import BART, LLAMA, LLAMA_31_ROPE, T5, UNTIED

BYTE_PAIRS = Path(__file__).parents[1] / "data" / "tokenizers" / "gpt2bpe"
BOS, END = "<s>", "</s>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
TEXTS = (
    "the first of all the texts is about the sea and the ships that went over it",
    "a second one says that nothing is ever as it was when the day began",
    "she opened the door, looked at the rain and closed it again without a word",
)


def write_tokenizer(
    folder: Path, *, bos: bool = True, closes: bool = False, swapped: bool = False
) -> None:
    """tokenizer.json and its companions, of the small byte-level vocabulary.

    bos, closes: whether a text begins with one, and ends with an end token
    swapped:     two tokens have each other's ids
    """
    vocab = json.loads((BYTE_PAIRS / "vocab.json").read_text())
    if swapped:
        vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    lines = (BYTE_PAIRS / "merges.txt").read_text().splitlines()
    merges = [tuple(line.split()) for line in lines if line and not line.startswith("#")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS), AddedToken(END)])
    if bos or closes:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS if bos else ''} $A {END if closes else ''}".strip(),
            special_tokens=[(each, tokenizer.token_to_id(each)) for each in (BOS, END)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"bos_token": BOS, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": TEMPLATE}))


def write_original(folder: Path, *, bos: bool = True) -> Path:
    """A LLaMA of random weights in Hugging Face's format, with a tokenizer."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, bos=bos)
    values = {**LLAMA, **UNTIED, "max_position_embeddings": 64, "rope_parameters": LLAMA_31_ROPE}
    return _saved(folder, "LlamaForCausalLM", "LlamaConfig", values)


def write_t5_original(folder: Path) -> Path:
    """A T5 of random weights in Hugging Face's format, with a tokenizer."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, bos=False, closes=True)
    values = {**T5, **UNTIED, "feed_forward_proj": "gated-gelu", "pad_token_id": 0}
    return _saved(folder, "T5ForConditionalGeneration", "T5Config", values)


def write_bart_original(folder: Path) -> Path:
    """A BART, as write_t5_original."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, closes=True)
    values = {**BART, "pad_token_id": 0, "forced_eos_token_id": None}
    return _saved(folder, "BartForConditionalGeneration", "BartConfig", values)


def _saved(folder: Path, model: str, config: str, values: dict[str, Any]) -> Path:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, end = (tokenizer.token_to_id(each) for each in (BOS, END))
    values = {**values, "vocab_size": end + 1, "bos_token_id": start, "eos_token_id": end}
    torch.manual_seed(3)
    made = getattr(transformers, model)(getattr(transformers, config)(**values))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.02, 0.3)
    made.save_pretrained(folder)
    return folder


def export_original(
    original: Path, target: Path, data_type: str = "fp32", tp_size: int = 1, **more: Any
) -> Path:
    """The exported folder of the shards."""
    return export(
        ExportSettings(
            model_name="m",
            model_type="",
            checkpoint_path=str(original),
            triton_model_dir=str(target / "m"),
            weight_data_type=data_type,
            parallelism=Parallelism(tp_size),
            processes=1,
            **more,
        )
    )


def put_original(
    repository: Path, name: str, source: Path, model_type: str = "gpt3", **more: Any
) -> Path:
    """Export it as a model of a repository for Triton; the folder of the shards."""
    settings = ExportSettings(
        model_name=name,
        model_type=model_type,
        checkpoint_path=str(source),
        triton_model_dir=str(repository / name),
        parallelism=Parallelism(),
        max_batch_size=4,
        processes=1,
        **{"weight_data_type": "fp32", "data_type": "fp32", **more},
    )
    folder = export(settings)
    ModelRepository(repository).write(settings)
    return folder


class InProcess(EngineModel):
    """What the step asks of a client, of an engine in this process."""

    model_type = "GPT"
    parameters: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path, **more: Any) -> None:
        self.checkpoint = FTCheckpoint.open(folder, verify=False)
        self.more = more
        tp_size = self.checkpoint.tp_size
        super().__init__(folder, tp_size, max_tokens=512, name="in process", **more)

    @property
    def special_ids(self) -> SpecialIds:
        said = encoding_parameters(self.checkpoint)
        return SpecialIds.of({name: str(value) for name, value in said.items()})

    def encode(self, _text: str) -> None:
        """There is no served preprocessing."""

    def precision(self, weight_data_type: str) -> str:
        if self.more.get("kv_cache_dtype") == "fp8":
            return "fp8"
        return self.more.get("quantization") or self.more.get("data_type", weight_data_type)


class T5InProcess(InProcess):
    model_type = "T5"


class BartInProcess(InProcess):
    model_type = "BART"


class OpensPrompts(InProcess):
    """A server that puts a token of its own before every prompt."""

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        start = self.checkpoint.config.start_id
        for row in rows:
            asked = replace(row, input_ids=(start, *row.input_ids))
            (output,) = super().generate_rows([asked], in_flight)
            yield replace(output, context_logits=_rows(output)[1:])


class DropsOpenings(InProcess):
    """A server that does not let a prompt's first token be seen."""

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        for row in rows:
            asked = replace(row, input_ids=row.input_ids[1:])
            (output,) = super().generate_rows([asked], in_flight)
            logits = _rows(output)
            yield replace(output, context_logits=np.concatenate([logits[:1], logits]))


def _rows(output: GenerateOutput) -> np.ndarray:
    """The logits [tokens, vocab]; none where they were not asked for."""
    return np.zeros((0, 0)) if output.context_logits is None else np.asarray(output.context_logits)


def twin_settings(
    results: Path, folder: Path, ready_file: Path | str = "none", **twin: Any
) -> EvaluateSettings:
    """Of an evaluation of the exported `folder` by its twin alone, on TEXTS."""
    results.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (results / "texts.jsonl").write_text(lines)
    return EvaluateSettings(
        ready_file=str(ready_file),
        results_dir=str(results),
        model_name="m",
        tokenizer_dir=str(folder),
        twin=ReferenceSettings(
            **{"data_file": str(results / "texts.jsonl"), "continuation": 4, **twin}
        ),
    )


def read_section(settings: EvaluateSettings) -> dict[str, Any]:
    return json.loads((Path(settings.results_dir) / "report.json").read_text())["twin"]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    folder: Path,
    client: type[InProcess] = InProcess,
    twin: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """The report's section of the twin of the exported `folder`, served in this process.

    twin: fields of TwinSettings;  more: of EngineSettings
    """
    ready = {"http": "nowhere:1", "ranks": []}
    monkeypatch.setattr(measure_twin, "open_client", lambda _: (client(folder, **more), ready))
    settings = twin_settings(tmp_path / "results", folder, **(twin or {}))
    measure_twin.measure_twin(replace(settings, resume=resume))
    return read_section(settings)
