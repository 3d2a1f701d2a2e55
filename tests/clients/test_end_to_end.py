"""end_to_end_test beside the models of the original's own repository."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from launcher_scripts.clients import end_to_end_test
from launcher_scripts.clients.end_to_end_test import SENTENCES, column

ROWS = len(SENTENCES)
# model of the original's all_models/gpt -> (inputs, outputs)
ORIGINAL = {
    "preprocessing": (
        ("QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "REQUEST_OUTPUT_LEN"),
        (
            "INPUT_ID",
            "REQUEST_INPUT_LEN",
            "BAD_WORDS_IDS",
            "STOP_WORDS_IDS",
            "REQUEST_OUTPUT_LEN",
        ),
    ),
    "fastertransformer": (
        (
            "input_ids",
            "input_lengths",
            "request_output_len",
            "bad_words_list",
            "stop_words_list",
            "runtime_top_k",
            "runtime_top_p",
            "beam_search_diversity_rate",
            "temperature",
            "len_penalty",
            "repetition_penalty",
            "random_seed",
            "is_return_log_probs",
            "beam_width",
        ),
        ("output_ids", "sequence_length", "cum_log_probs", "output_log_probs"),
    ),
    "postprocessing": (("TOKENS_BATCH",), ("OUTPUT",)),
    "ensemble": (None, ("OUTPUT_0", "sequence_length", "cum_log_probs", "output_log_probs")),
}


class OriginalServer:
    """Declares the original's tensors, and refuses every other one as Triton does."""

    def __enter__(self) -> OriginalServer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def models(self) -> list[str]:
        return sorted(ORIGINAL)

    def model_config(self, name: str) -> dict[str, Any]:
        inputs, outputs = ORIGINAL[name]
        return {
            "input": [{"name": each} for each in inputs or ()],
            "output": [{"name": each} for each in outputs],
            "parameters": {"model_type": {"string_value": "GPT"}},
        }

    def infer(self, name: str, tensors: dict[str, Any], **_: Any) -> dict[str, Any]:
        inputs, outputs = ORIGINAL[name]
        unknown = set() if inputs is None else tensors.keys() - set(inputs)
        assert not unknown, f"unexpected inference input {unknown} for model {name}"
        numbers = np.ones((ROWS, 1), np.uint32)
        text = column([" and left"] * ROWS)
        return {each: text if each.startswith("OUTPUT") else numbers for each in outputs}


def test_the_originals_models_are_asked_with_their_own_tensors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_to_end_test, "connect_server", lambda _: OriginalServer())
    assert end_to_end_test.main([]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    for name in ORIGINAL:
        assert f"============After {name}============\n" in printed
    assert printed.count("[' and left']") == 2 * ROWS
