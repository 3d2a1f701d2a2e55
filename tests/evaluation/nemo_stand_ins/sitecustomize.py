"""Stand-ins for what NeMo 1.23 imports and does not use on a CPU; Python runs this at its start.

- apex' and Megatron's CUDA extensions, as modules without functions: on a CPU apex' layer norm is
  torch's, and optimizers and fused kernels are not used
- youtokentome, fasttext and opencc: tokenizers of other models, which no longer build
- Megatron's CUDA generators, which dropout would draw from
"""

import contextlib
import sys
import types


class StandIn(types.ModuleType):
    """A module of empty classes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


CUDA = ("amp_C", "apex_C", "distributed_adam_cuda", "fused_adam_cuda", "fused_layer_norm_cuda")
for module in (*CUDA, "youtokentome", "fasttext", "opencc"):
    sys.modules[module] = StandIn(module)

from megatron.core.tensor_parallel import random  # noqa: E402

random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
