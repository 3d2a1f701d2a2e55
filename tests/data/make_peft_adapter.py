"""Make peft_llama/: a tiny Llama, an adapter that peft trained for it, and the logits of both.

Nothing is trained: the adapter's values are random. Needs peft (0.21.2 wrote what is shipped) and
transformers. Run it from the checkout: python -m tests.data.make_peft_adapter
"""

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

TARGET = Path(__file__).with_name("peft_llama")


def main() -> None:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(TARGET / "base")
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        rank_pattern={"layers.1.mlp.up_proj": 6},
        alpha_pattern={"down_proj": 3},
        use_dora=True,
        modules_to_save=["norm"],
        trainable_token_indices=[5, 2],
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, settings)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(TARGET / "adapter")
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        logits = adapted.eval()(tokens).logits
    np.savez(TARGET / "reference.npz", tokens=tokens.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()
