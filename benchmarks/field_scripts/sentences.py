"""sentence-transformers' own trainer with a loss over pairs: FOLDER."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer

folder = Path(sys.argv[1])
rows = [json.loads(line) for line in (folder / "pairs" / "train.jsonl").open()]
data = Dataset.from_dict(
    {"anchor": [row["prompt"] for row in rows], "positive": [row["chosen"] for row in rows]}
)
words = Transformer(str(folder / "model"))
pooling = Pooling(words.get_word_embedding_dimension())
model = SentenceTransformer(modules=[words, pooling], device="cpu")
arguments = SentenceTransformerTrainingArguments(
    str(folder / "output"),
    max_steps=32,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
loss = MultipleNegativesRankingLoss(model)
SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss).train()
