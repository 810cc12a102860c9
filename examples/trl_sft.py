"""TRL's SFTTrainer with one line for rankscope, marked by an arrow.

Healthy, on 2 workers:

    torchrun --nproc-per-node 2 examples/trl_sft.py
    rankscope report runs/trl

With another learning rate on rank 1, as when a host was left with an older configuration:

    torchrun --nproc-per-node 2 examples/trl_sft.py --other-rate --run-dir runs/trl-fault
    rankscope report runs/trl-fault
"""

import argparse
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from rankscope.integrations.transformers import RankscopeCallback

SPECIAL = ["<pad>", "<unk>", "<eos>"]


def make_texts(count: int = 2048) -> list[dict[str, str]]:
    """Return sums of two numbers as text: ``17 plus 25 is 42``, one to six of them in each."""
    generator = torch.Generator().manual_seed(0)

    def text() -> str:
        number = int(torch.randint(1, 7, (), generator=generator))
        pairs = torch.randint(50, (number, 2), generator=generator).tolist()
        return " and ".join(f"{a} plus {b} is {a + b}" for a, b in pairs)

    return [{"text": text()} for _ in range(count)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows the words of these texts."""
    words = [*SPECIAL, "plus", "is", "and", *map(str, range(100))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def main() -> None:
    """Fine-tune for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/trl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--other-rate", action="store_true")
    options = parser.parse_args()
    odd = options.other_rate and os.environ.get("RANK") == "1"

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
    )
    arguments = SFTConfig(
        output_dir=f"{options.run_dir}-model",
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=6e-3 if odd else 3e-3,
        lr_scheduler_type="constant",
        max_length=64,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(make_texts()),
        processing_class=tokenizer,
        callbacks=[RankscopeCallback(run_dir=options.run_dir)],  # <- the line
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
