"""A neighbour of the scripts: a tiny Llama that is made on the spot."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUM_TOKENS = 61


def make_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NUM_TOKENS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )
