"""The text models of a model repository: text to ids, ids to text, and the ensemble of all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from launcher_scripts import tokenizer
from launcher_scripts.checkpoint.fastertransformer import FTCheckpoint
from launcher_scripts.contracts import TextContract
from launcher_scripts.models import family_of
from launcher_scripts.render import render
from launcher_scripts.settings import ExportSettings
from launcher_scripts.tokenizer import tokenizer_files

# An ensemble has no files of its own, but a version, and object stores have no empty folders.
VERSION_NOTE = "README.txt"
VERSION_TEXT = "It keeps the folder of the ensemble's version where folders cannot be empty.\n"

PREPROCESSING_FROM_ENSEMBLE = {
    "QUERY": "INPUT_0",
    "REQUEST_OUTPUT_LEN": "INPUT_1",
    "BAD_WORDS_DICT": "INPUT_2",
    "STOP_WORDS_DICT": "INPUT_3",
}
POSTPROCESSING_FROM_MODEL = {
    "TOKENS_BATCH": "output_ids",
    "RESPONSE_INPUT_LENGTHS": "response_input_lengths",
    "sequence_length": "sequence_length",
    "streamed_length": "streamed_length",
    "is_finished": "is_finished",
    "text_start": "text_start",
}
POSTPROCESSING_TO_ENSEMBLE = {"OUTPUT": "OUTPUT_0", "OUTPUT_DELTA": "OUTPUT_DELTA"}


def write_text_models(
    folder: Path,
    settings: ExportSettings,
    checkpoint: FTCheckpoint,
    text: TextContract,
    names: dict[str, str],
) -> None:
    """The text models as they will stand in the repository, inside `folder`.

    names: role -> folder
    """
    leading = {"leading_axes": 1} if settings.interactive else {}
    configs = {
        "preprocessing": render(
            "text_model.pbtxt.j2",
            name=names["preprocessing"],
            max_batch_size=settings.max_batch_size,
            inputs=text.preprocessing_inputs,
            outputs=text.preprocessing_outputs,
            parameters={**preprocessing_parameters(checkpoint), **leading},
        ),
        "ensemble": ensemble_config(settings, text, names),
    }
    if "postprocessing" in names:
        configs["postprocessing"] = render(
            "text_model.pbtxt.j2",
            name=names["postprocessing"],
            max_batch_size=settings.max_batch_size,
            inputs=text.postprocessing_inputs,
            outputs=text.postprocessing_outputs,
            parameters=leading,
        )
    for role, config in configs.items():
        version_dir = folder / names[role] / "1"
        version_dir.mkdir(parents=True)
        (folder / names[role] / "config.pbtxt").write_text(config, encoding="utf-8")
        if role == "ensemble":
            (version_dir / VERSION_NOTE).write_text(VERSION_TEXT, encoding="utf-8")
        else:
            for path in text_model_files(role, checkpoint.folder):
                shutil.copyfile(path, version_dir / path.name)


def preprocessing_parameters(checkpoint: FTCheckpoint) -> dict[str, Any]:
    """What fills rows up, and the token that closes an input where the model was trained so.

    The T5 models of transformers end their inputs with the end token, NeMo's do not.
    """
    config = checkpoint.config
    parameters = {"pad_id": config.end_id if config.pad_id is None else config.pad_id}
    source = checkpoint.manifest.source if checkpoint.manifest is not None else {}
    if family_of(config).name == "t5" and source.get("format") == "huggingface":
        parameters["closing_id"] = config.end_id
    return parameters


def text_model_files(role: str, checkpoint_dir: Path) -> list[Path]:
    """What the version folder of a text model holds."""
    room = Path(__file__).resolve().parent.parent / "backends"
    return [
        room / role / "model.py",
        room / "text_tensors.py",
        *([room / "text_deltas.py"] if role == "postprocessing" else []),
        Path(tokenizer.__file__),
        *tokenizer_files(checkpoint_dir),
    ]


def ensemble_config(settings: ExportSettings, text: TextContract, names: dict[str, str]) -> str:
    """config.pbtxt of the ensemble; names that begin with _ stay between its steps."""
    ensemble_outputs = {tensor.name for tensor in text.ensemble_outputs}
    preprocessing = {tensor.name for tensor in text.preprocessing_inputs}
    postprocessing = {tensor.name for tensor in text.postprocessing_inputs}
    model_outputs = {
        source: source if source in ensemble_outputs else f"_{source}"
        for name, source in POSTPROCESSING_FROM_MODEL.items()
        if name in postprocessing
    }
    text_inputs = PREPROCESSING_FROM_ENSEMBLE.values()
    own = set(POSTPROCESSING_TO_ENSEMBLE.values())
    steps = [
        {
            "model": names["preprocessing"],
            "inputs": {
                name: source
                for name, source in PREPROCESSING_FROM_ENSEMBLE.items()
                if name in preprocessing
            },
            "outputs": {t.name: f"_{t.name}" for t in text.preprocessing_outputs},
        },
        {
            "model": settings.model_name,
            "inputs": {
                **{name: f"_{source}" for name, source in text.model_inputs.items()},
                **{t.name: t.name for t in text.ensemble_inputs if t.name not in text_inputs},
            },
            "outputs": {
                **model_outputs,
                **{t.name: t.name for t in text.ensemble_outputs if t.name not in own},
            },
        },
    ]
    if "postprocessing" in names:
        made = {
            name: model_outputs[source]
            for name, source in POSTPROCESSING_FROM_MODEL.items()
            if name in postprocessing
        }
        steps.append(
            {
                "model": names["postprocessing"],
                "inputs": made,
                "outputs": POSTPROCESSING_TO_ENSEMBLE,
            }
        )
    return render(
        "ensemble.pbtxt.j2",
        name=names["ensemble"],
        max_batch_size=settings.max_batch_size,
        inputs=text.declared_ensemble_inputs(settings.data_type),
        outputs=text.declared_ensemble_outputs(settings.data_type),
        steps=steps,
    )
