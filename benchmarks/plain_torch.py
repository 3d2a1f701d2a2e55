"""The peer every machine has: a GPT decode step in plain torch, captured in one CUDA graph.

No kernel of its own: cuBLAS products, torch's norms and attention, argmax and the next embedding
on the device. What a careful user of torch would write in an afternoon.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.engine.model.weights import LayerWeights, ModelWeights
from launcher_scripts.kernels.operands import Norm


class PlainTorchGPT:
    """Greedy generation at batch 1 with the product's own weights (learned positions, tanh GELU).

    max_tokens: prompt and generated tokens the cache has room for
    """

    def __init__(self, weights: ModelWeights, max_tokens: int) -> None:
        self.weights = weights
        self.config = weights.config
        table = weights.decoder.embedding.tokens
        self.dtype, self.device = table.dtype, table.device
        shape = (
            len(weights.decoder.layers),
            2,
            1,
            self.config.num_heads,
            max_tokens,
            self.config.head_size,
        )
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.columns = torch.arange(max_tokens, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def generate(self, prompt: Tensor, output_len: int) -> list[int]:
        """The ids that follow prompt [T]."""
        if self.graph is None:
            self._capture()
        positions = torch.arange(prompt.shape[0], device=self.device)
        self._step(prompt, positions, causal=True)
        self.position.fill_(prompt.shape[0])
        tokens = [self.token.clone()]
        for _ in range(output_len - 1):
            self.graph.replay()
            tokens.append(self.token.clone())
        return torch.cat(tokens).tolist()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._decode()

    def _decode(self) -> None:
        self._step(self.token, self.position, causal=False)
        self.position += 1

    def _step(self, ids: Tensor, positions: Tensor, *, causal: bool) -> None:
        """Run ids [T] at positions [T] and leave the next token in self.token."""
        weights = self.weights
        tables = weights.decoder.embedding
        x = tables.tokens[ids] + tables.positions[positions]  # [T, hidden]
        mask = None if causal else (self.columns <= positions)[None, None, None]
        for index, layer in enumerate(weights.decoder.layers.values()):
            x = self._layer(x, layer, self.cache[index], positions, mask)
        head = weights.head
        last = self._norm(x[-1:], head.norm)
        self.token.copy_(functional.linear(last, head.weight).float().argmax(-1))

    def _layer(
        self, x: Tensor, layer: LayerWeights, cache: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        count, heads = x.shape[0], self.config.num_heads
        attention, mlp = layer.attention, layer.mlp
        qkv = self._linear(self._norm(x, attention.in_proj.norm), attention.in_proj)
        query, key, value = qkv.view(count, 3, heads, -1).permute(1, 2, 0, 3)[:, None]
        cache[0].index_copy_(2, positions, key)
        cache[1].index_copy_(2, positions, value)
        if mask is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(
                query, cache[0], cache[1], attn_mask=mask
            )
        mixed = mixed[0].transpose(0, 1).reshape(count, -1)
        x = x + self._linear(mixed, attention.out_proj)
        hidden = self._linear(self._norm(x, mlp.in_proj.norm), mlp.in_proj)
        hidden = functional.gelu(hidden, approximate="tanh")
        return x + self._linear(hidden, mlp.out_proj)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, bias = norm.weight.to(self.dtype), norm.bias.to(self.dtype)
        return functional.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)

    @staticmethod
    def _linear(x: Tensor, linear) -> Tensor:
        return functional.linear(x, linear.weight, linear.bias)
