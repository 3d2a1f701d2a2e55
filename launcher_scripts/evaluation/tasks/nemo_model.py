"""The only door to NeMo: a GPT in a `.nemo` file, restored and run by NeMo's own model.

NeMo runs whatever code a checkpoint names, so it is for files that are trusted. It needs
nemo_toolkit in the Python that runs this (docs/nemo-toolkit.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.task import Model, Reference, reject_tuned


class NemoModel(Reference, Model):
    """Scores, and generates greedily; every token takes a pass over the whole row."""

    def __init__(self, path: Path, *, any_class: bool = False) -> None:
        """Raises ConfigError when NeMo is not there or cannot restore the file.

        any_class: whether torch may create what the file's pickles name beside tensors
        """
        if any_class:
            # What torch 2.6 and later, whose loader is strict by default, looks at.
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        try:
            import nemo
            import torch
            from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import (
                MegatronGPTModel,
            )
            from nemo.collections.nlp.parts.nlp_overrides import (
                NLPDDPStrategy,
                NLPSaveRestoreConnector,
            )
            from pytorch_lightning import Trainer
            from pytorch_lightning.plugins.environments import LightningEnvironment
        except ImportError as error:
            message = f"this Python has no NeMo with Megatron's GPT: {error}"
            change = "the Python that runs this (docs/nemo-toolkit.md)"
            raise ConfigError(problem(message, change=change)) from error
        self._torch = torch
        try:
            trainer = Trainer(
                devices=1,
                accelerator="auto",
                strategy=NLPDDPStrategy(),
                # Not the ranks of the job that this may run in.
                plugins=[LightningEnvironment()],
                logger=False,
                enable_checkpointing=False,
            )
            self._model = MegatronGPTModel.restore_from(
                str(path), trainer=trainer, save_restore_connector=NLPSaveRestoreConnector()
            ).eval()
            trainer.strategy.setup_environment()
        except Exception as error:  # NeMo, Lightning and Megatron raise everything there is
            message = f"NeMo cannot restore {path}: {type(error).__name__}: {error}"
            raise ConfigError(message) from error
        self._device = next(self._model.parameters()).device
        self._end_id = self._model.tokenizer.eos_id
        self.versions = {"nemo_toolkit": nemo.__version__, "torch": torch.__version__}
        self.name = f"NeMo {nemo.__version__}: {path}"

    @property
    def device(self) -> str:
        return str(self._device)

    def generate_rows(
        self,
        rows: Iterable[GenerateRequest],
        in_flight: int = 8,  # noqa: ARG002
    ) -> Iterator[GenerateOutput]:
        """Iterate over the outputs of the rows, in order, up to their end tokens."""
        for row in rows:
            reject_tuned([row], "NeMo's model", beam_width=row.sampling.beam_width != 1)
            ids = list(row.input_ids)
            while len(ids) < len(row.input_ids) + row.output_len:
                ids.append(int(self._logits(ids)[-1].argmax()))
                if ids[-1] == self._end_id:
                    break
            yield GenerateOutput(tuple(ids[len(row.input_ids) :]))

    def logits(self, ids: Sequence[int], _decoder_ids: Sequence[int] = ()) -> NDArray[np.float32]:
        """float32 [tokens, padded vocabulary] at every position of the prompt."""
        result: NDArray[np.float32] = self._logits(ids).float().cpu().numpy()
        return result

    def save(self, path: Path) -> None:
        """Write the model as NeMo does."""
        self._model.save_to(str(path))

    def _logits(self, ids: Sequence[int]) -> Any:
        """[S, padded vocabulary]"""
        torch = self._torch
        tokens = torch.tensor([list(ids)], device=self._device)  # [1, S]
        positions = torch.arange(tokens.shape[1], device=self._device)[None]
        square = torch.ones(1, 1, *2 * tokens.shape[1:], device=self._device)
        with torch.inference_mode():
            return self._model(tokens, positions, square.tril() < 0.5, None)[0]
