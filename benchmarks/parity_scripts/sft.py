"""TRL's SFTTrainer: prompts and completions of uneven lengths, made up here."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--folder", type=Path, required=True)
chosen = parser.parse_args()
torch.set_num_threads(1)

words = ["<pad>", "<unk>", "<eos>", *(f"w{number}" for number in range(60))]
plain = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
plain.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
)
draw = torch.Generator().manual_seed(0)


def text(least: int, most: int) -> str:
    length = int(torch.randint(least, most, (), generator=draw))
    return " ".join(words[3 + int(at)] for at in torch.randint(60, (length,), generator=draw))


rows = [{"prompt": text(3, 9), "completion": " " + text(3, 20)} for _ in range(400)]
torch.manual_seed(0)
SFTTrainer(
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    ),
    args=SFTConfig(
        str(chosen.folder),
        max_steps=20,
        per_device_train_batch_size=chosen.batch,
        gradient_accumulation_steps=chosen.accumulate,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        max_length=64,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
).train()
