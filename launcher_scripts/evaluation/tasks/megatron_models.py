"""The only door to Megatron-LM core: a GPT that it saved, run by its own model on the CPU.

The model is built of what the training said, with the layers that need no other package, and gets
its tensors by name. No code of the checkpoint runs, and nothing of it is unpickled here.

The only door to NeMo: a GPT in a `.nemo` file, restored and run by NeMo's own model.

NeMo runs whatever code a checkpoint names, so it is for files that are trusted. It needs
nemo_toolkit in the Python that runs this (docs/nemo-toolkit.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.task import (
    NoReferenceError,
    Reference,
    TaskModel,
    TorchReference,
    reject_tuned,
)

# The core's fields that decide what a GPT computes; those of the training are left.
FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "gated_linear_unit",
    "bias_activation_fusion",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "softmax_scale",
    "softmax_type",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "window_size",
    "window_attn_skip_freq",
)
# Of a mixture of experts, besides.
EXPERT_FIELDS = (
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_enable_expert_bias",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
# GPTModel's own, beside its configuration.
MODEL_FIELDS = (
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "seq_len_interpolation_factor",
    "share_embeddings_and_output_weights",
)
# What GPTModel asks of its configuration although it has no such fields.
YARN_FIELDS = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
# What the CPU needs, without a part in what is computed.
UNFUSED = {
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "moe_token_dispatcher_type": "allgather",
}
# What Llama 3.1's scaling of rotary positions is in the core, besides its factor.
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
# Parts of names: as Transformer Engine's layers have them, and as those here.
_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    (".mlp.experts.experts.", ".mlp.experts.local_experts."),
)
TABLE = "embedding.word_embeddings.weight"


class CoreModel(TorchReference):
    """Computes logits."""

    def __init__(
        self, options: Mapping[str, Any], tensors: Iterable[tuple[str, NDArray[np.float32]]]
    ) -> None:
        """Raises NoReferenceError without the core, and where it does not compute the model;
        ConfigError for what it refuses.

        options: the fields of the core's configuration and model
        tensors: by the names that the core has saved them under, layers and experts apart
        """
        try:
            import megatron.core
            import torch
        except ImportError as error:
            raise NoReferenceError(
                problem(f"the reference needs the package {error.name}")
            ) from error
        if reasons := core_unsupported_reasons(options):
            raise NoReferenceError(f"the core alone does not compute it: {', '.join(reasons)}")
        self._torch = torch
        self.name = f"Megatron-LM core {megatron.core.__version__}, float32"
        state = {_local_name(name): values for name, values in tensors}
        if options.get("layernorm_zero_centered_gamma"):
            state = {
                name: values + 1 if name.endswith("norm.weight") else values
                for name, values in state.items()
            }
        with _on_cpu():
            self._model = _build(options, len(state[TABLE])).eval()
            self._model.load_state_dict(
                {name: torch.from_numpy(values) for name, values in state.items()}, strict=False
            )
        lacking = sorted(
            name
            for name, values in self._model.state_dict().items()
            if name not in state and isinstance(values, torch.Tensor)
        )
        if lacking:
            raise ConfigError(problem("the core's model has other tensors", got=lacking[:3]))

    def logits(self, ids: Sequence[int], _decoder_ids: Sequence[int] = ()) -> NDArray[np.float32]:
        """float32 [tokens, vocab] at every position of the prompt."""
        torch = self._torch
        tokens = torch.tensor([list(ids)])
        with _on_cpu(), torch.no_grad():
            result = self._model(tokens, torch.arange(len(ids))[None], None)[0]
        logits: NDArray[np.float32] = result.float().numpy()
        return logits


def core_unsupported_reasons(options: Mapping[str, Any]) -> list[str]:
    """Return the changes of a tool outside of the core's own model."""
    changed = [
        f"{name} {options[name]}"
        for name, default in SCALING.items()
        if options.get(name) not in (None, default)
    ]
    return changed + (["a class of Gemma"] if "Gemma" in str(options.get("_target_")) else [])


def _local_name(name: str) -> str:
    for core_name, local_name in _NAMES:
        name = name.replace(core_name, local_name)
    return name


def _build(options: Mapping[str, Any], vocab_size: int) -> Any:
    """The core's model, its weights of any value."""
    import torch.nn.functional as F
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    activations = {
        "gelu": F.gelu,
        "openai_gelu": F.gelu,
        "silu": F.silu,
        "relu": F.relu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }
    experts = options.get("num_moe_experts") or options.get(
        "num_experts"
    )  # the second is Megatron-LM's
    names = FIELDS + (EXPERT_FIELDS if experts else ())
    fields = {name: options[name] for name in names if options.get(name) is not None}
    name = str(options.get("activation_func") or "gelu")
    if name == "openai_gelu":
        # The fused kernel's form. Elsewhere the fused kernels differ by the order of sums alone.
        name, fields["bias_activation_fusion"] = "gelu", True
    elif name != "gelu":
        fields["bias_activation_fusion"] = False
    config = TransformerConfig(
        **fields, **UNFUSED, num_moe_experts=experts or None, activation_func=activations[name]
    )
    for name in YARN_FIELDS:
        if name in options:
            setattr(config, name, options[name])
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    more = {name: options[name] for name in MODEL_FIELDS if options.get(name) is not None}
    length = int(options.get("max_position_embeddings") or options.get("seq_length") or 0)
    # Megatron-LM's models have the core's factor, whatever its arguments say.
    if options.get("scale_factor") is not None:
        more["rope_scaling_factor"] = options["scale_factor"]
    return GPTModel(config, spec, vocab_size=vocab_size, max_sequence_length=length, **more)


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """A group of one process, and stand-ins for what the core asks of CUDA.

    What the core raises becomes a ConfigError.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    ones = torch.ones
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with (
            mock.patch.object(torch, "ones", lambda *sizes, **more: ones(*sizes, **_host(more))),
            mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
            mock.patch.object(torch.cuda, "synchronize", lambda: None),
            mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
            # A name that exists with Transformer Engine alone.
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        ):
            yield
    except Exception as error:  # the core raises everything there is
        message = f"the core cannot compute the model: {type(error).__name__}: {error}"
        raise ConfigError(message) from error
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _host(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "device": "cpu"} if "device" in options else options


class NemoReference(Reference, TaskModel):
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
