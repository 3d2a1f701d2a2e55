"""vLLM is asked for a model of the same size as ours."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.floors import numbers
from benchmarks.vllm_server import GPTS, POSITIONS, transformers_config


def test_transformers_reads_the_sizes_of_our_shapes() -> None:
    for shape in ("126m", "1.3b-modern", "8b-modern"):
        config = GPTS[shape]
        written = transformers_config(config)
        read = AutoConfig.for_model(**written)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read)
        ours = numbers(replace(config, max_positions=POSITIONS), lambda _: True)
        assert sum(each.numel() for each in model.parameters()) == ours
