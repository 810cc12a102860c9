"""An ordinary script with Transformers' ``Trainer``; its settings are all on the command line."""

import json
import sys
from pathlib import Path

import torch
from plain_training import digest
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def parse(words=None):
    """Return the settings of a command line; None: of this process's own."""
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)[0]


def make_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def make_data():
    """Return sequences of 6 to 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 25, (48,), generator=generator).tolist()
    return [torch.randint(3, 61, (length,), generator=generator) for length in lengths]


def collate(rows):
    """Pad a batch on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padding = ids == 0
    labels = ids.masked_fill(padding, -100)
    return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": labels}


def make_trainer(settings, kind=Trainer):
    return kind(make_model(), settings, train_dataset=make_data(), data_collator=collate)


def main():
    torch.set_num_threads(1)
    settings = parse()
    trainer = make_trainer(settings)
    trainer.train()
    output = Path(settings.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    seen = {"argv": sys.argv[1:], "digest": digest(trainer.model)}
    (output / f"seen {settings.process_index}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
