"""The shapes of the models that are measured, and the requests they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

VOCABULARY = 51200
POSITIONS = 2048
MODERN = {
    "normalization": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "position_embedding": "rope",
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2-like model."""

    hidden_size: int
    num_layers: int
    num_heads: int

    def config(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=VOCABULARY,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_size=self.hidden_size // self.num_heads,
            ffn_size=4 * self.hidden_size,
            max_positions=POSITIONS,
            end_id=VOCABULARY,
            start_id=0,
        )


SHAPES = {
    "126m": Shape(768, 12, 12),
    "1.3b": Shape(2048, 24, 16),
    "5b": Shape(4096, 24, 32),
    "20b": Shape(6144, 44, 48),
}


def modern(config: GPTConfig) -> GPTConfig:
    """The same size with rotary positions, RMS norms, a gated MLP and a quarter of the keys."""
    width = config.ffn_size * 2 // 3 // 256 * 256
    return replace(config, **MODERN, ffn_size=width, num_kv_heads=config.num_heads // 4)


def t5(hidden: int, layers: int, heads: int, ffn: int) -> T5Config:
    """T5 1.1 of these sizes."""
    return T5Config(
        vocab_size=32128,
        num_layers=layers,
        num_decoder_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        head_size=64,
        ffn_size=ffn,
        activation="gelu",
        gated=True,
        tied_embeddings=False,
        end_id=32127,
    )


# The sizes of Llama 3.1 8B.
LLAMA_8B = replace(
    modern(Shape(4096, 32, 32).config()),
    vocab_size=128256,
    end_id=128256,
    num_kv_heads=8,
    ffn_size=14336,
)

# The sizes of Llama 3.2 1B, which may be a draft model of the one above.
LLAMA_1B = replace(
    LLAMA_8B,
    hidden_size=2048,
    num_layers=16,
    head_size=64,
    ffn_size=8192,
    tied_embeddings=True,
)

# The sizes of Llama 3.1 70B.
LLAMA_70B = replace(
    LLAMA_8B, hidden_size=8192, num_layers=80, num_heads=64, head_size=128, ffn_size=28672
)

# The sizes of Qwen3 30B A3B: of 128 experts a token goes through 8.
QWEN3_30B_A3B = replace(
    modern(Shape(2048, 48, 32).config()),
    vocab_size=151936,
    end_id=151936,
    num_kv_heads=4,
    head_size=128,
    ffn_size=768,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    normalized_experts=True,
)

# The sizes of gpt-oss-20b: of 32 experts a token goes through 4.
GPT_OSS_20B = replace(
    modern(Shape(2880, 24, 64).config()),
    vocab_size=201088,
    end_id=201088,
    num_kv_heads=8,
    head_size=64,
    ffn_size=2880,
    activation="clamped_swiglu",
    attention_bias=True,
    attention_sinks=True,
    mlp_bias=True,
    num_experts=32,
    experts_per_token=4,
    normalized_experts=True,
    router_bias=True,
    sliding_window=128,
    full_attention_layers=layer_list(range(1, 24, 2)),
    tied_embeddings=False,
)

_LETTERS = {"M": "mamba2", "-": "mlp", "*": "attention"}
_PLAIN = MODERN | {"tied_embeddings": False, "norm_eps": 1e-5}


def _nemotron(pattern: str, **sizes: Any) -> GPTConfig:
    """A hybrid of Mamba-2, attention and MLPs, one a layer, as the letters of the pattern say."""
    return GPTConfig(
        **(_PLAIN | {"position_embedding": "none", "activation": "squared_relu", "gated": False}),
        vocab_size=131072,
        end_id=131072,
        num_layers=len(pattern),
        num_kv_heads=8,
        head_size=128,
        max_positions=8192,
        layer_branches=",".join(_LETTERS[letter] for letter in pattern),
        conv_kernel=4,
        conv_bias=True,
        mamba_num_heads=128,
        mamba_state_size=128,
        mamba_num_groups=8,
        **sizes,
    )


# The sizes of Nemotron-H 8B and of Nemotron Nano 2 9B.
NEMOTRON_H_8B = _nemotron(
    "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    hidden_size=4096,
    num_heads=32,
    ffn_size=21504,
    mamba_head_size=64,
)
NANO_2_9B = _nemotron(
    "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    hidden_size=4480,
    num_heads=40,
    ffn_size=15680,
    mamba_head_size=80,
)
# The sizes of DeepSeek-V2-Lite: latent attention, and of 64 experts a token goes through 6.
DEEPSEEK_V2_LITE = GPTConfig(
    **_PLAIN,
    vocab_size=102400,
    end_id=102400,
    num_layers=27,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_size=192,
    rope_head_size=64,
    value_head_size=128,
    kv_lora_rank=512,
    ffn_size=1408,
    dense_ffn_size=10944,
    dense_layers="0",
    num_experts=64,
    experts_per_token=6,
    normalized_experts=False,
    shared_expert_size=2816,
    shared_expert_gate=False,
    max_positions=8192,
)
# A quarter of the layers of Qwen3-Next 80B A3B, whose experts fit one GPU.
QWEN3_NEXT_12 = GPTConfig(
    **(_PLAIN | {"norm_eps": 1e-6}),
    vocab_size=151936,
    end_id=151936,
    num_layers=12,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=2,
    head_size=256,
    rotary_percentage=0.25,
    zero_centered_norm=True,
    qk_norm=True,
    attention_output_gate=True,
    layer_branches=",".join(
        f"{'attention' if layer % 4 == 3 else 'gated_delta'}/moe" for layer in range(12)
    ),
    conv_kernel=4,
    delta_num_heads=32,
    delta_num_key_heads=16,
    delta_key_head_size=128,
    delta_value_head_size=128,
    ffn_size=512,
    num_experts=512,
    experts_per_token=10,
    normalized_experts=True,
    shared_expert_size=512,
    max_positions=8192,
)

# The sizes of NeMo's GPT of 43 billion weights, but for its activation.
GPT_43B = replace(Shape(8192, 48, 64).config(), vocab_size=256000, end_id=256000)
GPT_175B = Shape(12288, 96, 96).config()  # of Brown et al. 2020

CONFIGS: dict[str, GPTConfig | T5Config] = {
    **{name: shape.config() for name, shape in SHAPES.items()},
    "1.3b-modern": modern(SHAPES["1.3b"].config()),
    "5b-modern": modern(SHAPES["5b"].config()),
    "8b-modern": LLAMA_8B,
    "30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "70b": LLAMA_70B,
    "t5-base": t5(768, 12, 12, 2048),
    "t5-3b": t5(2048, 24, 32, 5120),
}
# With states of rows, or latent vectors, in place of some keys and values.
HYBRIDS = {
    "nemotron-h-8b": NEMOTRON_H_8B,
    "nano-2-9b": NANO_2_9B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "qwen3-next-12": QWEN3_NEXT_12,
}
LARGE = ("70b",)  # whose weights need more than one GPU
DRAFTS = {"8b-modern": LLAMA_1B}  # draft models by the names of their models
# For trying a benchmark out where there is no GPU.
TINY: dict[str, GPTConfig | T5Config] = {
    "tiny": Shape(64, 2, 4).config(),
    "t5-tiny": t5(64, 2, 4, 128),
}


@dataclass(frozen=True)
class Case:
    """A request: rows, tokens in, and tokens out, of each row."""

    rows: int
    input: int
    output: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Case:
        """What a row of results was measured for."""
        return cls(row["rows"], row["input"], row["output"])

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The rows' ids, [rows, input]; no two rows are alike."""
        return [
            [2 + (37 * index + 1009 * row) % (vocab_size - 2) for index in range(self.input)]
            for row in range(self.rows)
        ]


USE_CASES = {
    "question answering": Case(1, 60, 20),
    "intent classification": Case(1, 225, 20),
    "translation": Case(1, 200, 200),
}
BATCHES = (Case(8, 200, 100), Case(32, 128, 64))
