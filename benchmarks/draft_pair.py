"""Two small models of bytes, trained on the same text: a model, and a draft model for it.

No pair of one vocabulary is at hand where nothing can be downloaded. These are decoders of LLaMA's
kind with an id for each byte: 12 layers of 128, and a draft of two.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
import transformers

from benchmarks.quantization_accuracy import exported

BYTES, CONTEXT, ROWS = 256, 128, 4
SHAPES = {"model": (12, 128), "draft": (2, 128)}  # layers, hidden size
LEARNING_RATE, WARM_UP = 2e-3, 0.05  # the latter is a share of the time


def exported_pair(folder: Path) -> dict[str, Path]:
    """The files that `trained_pair` has left in the folder; {} where there are none."""
    found = {name: folder / f"{name}-ft" / "model" / "1" / "1-gpu" for name in SHAPES}
    return found if all(path.is_dir() for path in found.values()) else {}


def trained_pair(text: bytes, minutes: float, folder: Path) -> dict[str, Path]:
    """The exported files of both; the model trains for so many minutes, the draft half of it, on
    what the model makes of the same text.

    Says how well each foretells the text, or the model, in the end.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = None
    for name, share in (("model", 1.0), ("draft", 0.5)):
        made, loss = _trained(data, *SHAPES[name], 60 * minutes * share, model)
        parameters = sum(each.numel() for each in made.parameters()) / 1e6
        print(f"{name}: {parameters:.1f} M parameters, {loss / math.log(2):.2f} bits a byte")
        made.save_pretrained(folder / name)
        exported(folder / name, "gpt3", folder / f"{name}-ft", tokenizer="none")
        model = made
    return exported_pair(folder)


def _trained(
    data: torch.Tensor,
    layers: int,
    hidden: int,
    seconds: float,
    teacher: transformers.LlamaForCausalLM | None,
) -> tuple[transformers.LlamaForCausalLM, float]:
    """A model trained for so long, and its loss towards the end.

    teacher: whose probabilities it learns; None: the text
    """
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=BYTES,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            max_position_embeddings=8 * CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95))
    start, loss = time.monotonic(), math.log(BYTES)
    while (share := (time.monotonic() - start) / seconds) < 1:
        warm = min(1.0, share / WARM_UP)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm * (1 + math.cos(math.pi * share)) / 2
        first = torch.randint(len(data) - CONTEXT, (ROWS, 1))
        ids = data[first + torch.arange(CONTEXT)]
        wanted = ids[:, 1:].flatten()
        with torch.autocast("cpu", torch.bfloat16):
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(input_ids=ids).logits[:, :-1].flatten(0, 1).softmax(-1)
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        found = torch.nn.functional.cross_entropy(logits.float(), wanted)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss += 0.05 * (found.item() - loss)
    return model, loss
