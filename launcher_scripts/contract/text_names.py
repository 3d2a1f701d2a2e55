"""Today's names of text requests: those of the TensorRT-LLM backend's text models.

This file stands alone: it is copied beside the text models of a Triton repository.
"""

from __future__ import annotations

# name -> the ensemble's own name for the same, or the token model's
SAME_AS = {
    "text_input": "INPUT_0",
    "max_tokens": "INPUT_1",
    "bad_words": "INPUT_2",
    "stop_words": "INPUT_3",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "return_log_probs": "is_return_log_probs",
}
