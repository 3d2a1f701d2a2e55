"""Step: ask a served model and its original checkpoint the same, and say where they differ."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("measure_twin")

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.verification import sign_repository, weight_bytes
from launcher_scripts.clients.model_client import Client, open_client
from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.common.tokenizer import TokenizerError, load_tokenizer
from launcher_scripts.config.evaluation import ReferenceSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.evaluation.journal import FOLDER, Journal
from launcher_scripts.evaluation.report import Report, files_of, measured_on, set_up
from launcher_scripts.evaluation.tables import reference_table
from launcher_scripts.evaluation.tasks.task import Reference
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel
from launcher_scripts.evaluation.twin.certificate import (
    SIGNED_KEY,
    certificate,
    lines,
    write_certificate,
)
from launcher_scripts.evaluation.twin.diagnosis import Inspection, Rotary, TextSide
from launcher_scripts.evaluation.twin.measurement import (
    DATA_FILE,
    ComparedModels,
    compare_models,
    read_reference_texts,
)
from launcher_scripts.steps.evaluation_step import run_evaluation
from launcher_scripts.steps.measure_accuracy import log_progress
from launcher_scripts.steps.references import (
    ENGINE,
    KEY,
    OpenedSource,
    chat_render,
    compare_layers,
    free_memory,
    opened_reference,
    served_checkpoint,
)

FAMILIES = ("gpt", "t5", "bart")
# Of the twin's settings: no answer depends on these.
_LOCATIONS = ("checkpoint", "data_file", "batch_size", "margin", "alpha", "layers", "sign")


def main(argv: Sequence[str] | None = None) -> int:
    description = "Compare a served model with its original."
    return run_evaluation("measure_twin", description, measure_twin, argv)


def measure_twin(settings: EvaluateSettings) -> None:
    """The twin of the settings; reported when all texts are compared."""
    block = settings.twin
    if block is None:
        raise ConfigError(problem("no twin to measure", change="evaluate.twin"))
    texts = read_reference_texts(block)
    report = Report(Path(settings.results_dir), settings.model_name)
    folder = Path(settings.tokenizer_dir)
    served = served_checkpoint(folder)
    original = OpenedSource.of(block, served)
    client, ready = open_client(settings)
    with client, ExitStack() as stack:
        data = [block.data_file or str(DATA_FILE)]
        environment = measured_on(settings, ready, data=data, parameters=client.parameters)
        runner, reference = _reference(block, original, stack)
        dependencies = _set_up(environment, block, client, original, reference)
        file = Path(settings.results_dir) / FOLDER / "twin.jsonl"
        journal = stack.enter_context(
            Journal(file, dependencies, environment, resume=settings.resume)
        )
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenizer-")))
        comparison = ComparedModels(
            client,
            reference,
            _served_side(client, folder, original),
            original.text_side(runner, files),
            precision=client.precision(served.weight_data_type if served else "fp32"),
            encodes=_encodes(client),
            positions=_positions(served.config if served else original.source.config),
            inspection=_inspection(original, served, reference),
            continued=journal.continued,
        )
        sources = {"source": original.format, "num_attention_heads": original.num_heads}
        trace = partial(compare_layers, original, served, reference, sources) if served else None
        if trace is not None and block.layers:
            comparison = replace(comparison, trace=trace)
        result = compare_models(block, comparison, texts, str(original.path), log_progress("twin"))
    report.add_twin(block, result, journal.measured_on)
    content = certificate(settings.model_name, report.content["twin"])
    issued = write_certificate(report.results_dir, content)
    if block.sign is not None:
        sign_repository(issued, block.sign, SIGNED_KEY)
    print("\n".join(["", *lines(content), f"certificate: {issued}", ""]))
    print("\n".join([reference_table(result), "", f"report: {report.html_file}"]))


def _set_up(
    environment: Mapping[str, Any],
    twin: ReferenceSettings,
    client: Client,
    original: OpenedSource,
    reference: Reference,
) -> dict[str, Any]:
    """Return everything that the answers of both depend on."""
    settings = {name: value for name, value in asdict(twin).items() if name not in _LOCATIONS}
    special = client.special_ids
    return set_up(
        environment,
        settings=settings,
        special_ids=[special.opening, special.closing, special.decoder],
        original={**files_of(original.path), "reference": reference.name},
    )


def _encodes(client: Client) -> bool:
    """Return whether the served model is an encoder-decoder; refuses what gives no logits."""
    contract = lookup(CONTRACTS, client.model_type, "model_type")
    if contract.encoder_only or contract.family not in FAMILIES:
        raise ConfigError(
            problem(
                "a model of this type gives no logits to compare with its original's",
                got=client.model_type,
                choices=[
                    name
                    for name, contract in CONTRACTS.items()
                    if contract.family in FAMILIES and not contract.encoder_only
                ],
                change="evaluate.twin=null",
            )
        )
    return contract.family != "gpt"


def _reference(
    settings: ReferenceSettings, original: OpenedSource, stack: ExitStack
) -> tuple[str, Reference]:
    """Return the reference and its name; with `auto` the engine if the maker's code fails."""
    needed, free = weight_bytes(original.source.config, 1, "fp32"), free_memory()
    if needed > free:
        raise ConfigError(
            problem(
                f"the original needs {needed / 1e9:.1f} GB of memory in float32",
                got=f"{free / 1e9:.1f} GB free",
                change=f"the machine, or {KEY}",
            )
        )
    runner, tokens = (
        original.runner(settings.runner),
        2 * (settings.max_tokens + settings.continuation),
    )
    options = {"source": original.format, "num_attention_heads": original.num_heads}
    try:
        return runner, stack.enter_context(opened_reference(original.path, runner, tokens, options))
    except ConfigError as error:
        if settings.runner != "auto" or runner == ENGINE:
            raise
        print(f"note: this project's engine runs the original: {error}", flush=True)
    return ENGINE, stack.enter_context(opened_reference(original.path, ENGINE, tokens, options))


def _served_side(client: Client, folder: Path, original: OpenedSource) -> TextSide | None:
    """Return the served model's reading of texts: by its own preprocessing if the server has
    one."""
    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError as error:
        print(f"note: the served tokenizer is not compared: {error}", flush=True)
        return None
    special = client.special_ids

    def encode(text: str) -> Sequence[int]:
        ids = client.encode(text)
        return special.surround(tokenizer.encode(text)) if ids is None else ids

    decoder = special.decoder or (original.source.config.start_id,)
    return TextSide(encode, tokenizer, chat_render(folder, tokenizer), decoder)


def _positions(config: Any) -> int | None:
    limited = getattr(config, "position_embedding", None) in ("learned", "rope")
    return int(config.max_positions) if limited else None


def _no_alternatives(_ids: Sequence[int]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Iterate over nothing, for a reference that cannot compute other rotary positions than its
    own."""
    return iter(())


def _inspection(
    original: OpenedSource, served: FTCheckpoint | None, reference: Reference
) -> Inspection:
    config = original.source.config
    rotary: Rotary | None = None
    if getattr(config, "position_embedding", None) == "rope":
        rotary = _no_alternatives
        if isinstance(reference, TransformersModel):
            rotary = reference.rotary_alternatives
    return Inspection(
        settings=None if served is None else lambda: original.other_settings(served),
        weights=None if served is None else lambda: original.altered(served),
        rotary=rotary,
        # A tokenizer without such a token leaves the default, which may be no id of the model.
        start_id=config.start_id if config.start_id < config.vocab_size else None,
    )


if __name__ == "__main__":
    sys.exit(main())
