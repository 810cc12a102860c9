"""A loop with Accelerate and two micro-batches a step: FOLDER ddp|fsdp2."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, kind = Path(sys.argv[1]), sys.argv[2]
plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(folder / "model")
texts = [json.loads(line)["text"] for line in (folder / "text" / "train.jsonl").open()]


def collate(batch):
    inputs = tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=64)
    inputs.pop("token_type_ids", None)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return {**inputs, "labels": labels}


model = AutoModelForCausalLM.from_pretrained(folder / "model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=collate, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        losses.append(loss.detach())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        mean = accelerator.gather(torch.stack(losses)).mean()
        accelerator.print(f"loss {mean.item():.6f}")
        losses.clear()
