"""The built-in model, a tiny Llama-like one, trained for a moment; and its tokenizer.

Fine-tuning starts from a model that already follows the format. The training ends when the
gradients of single batches are mostly noise, as they are in a real fine-tuning job: their mean
cosine is then near 0, not near 1 as in the first steps from random weights.

The tokenizer is a byte-level BPE, learned from the study's own text. It covers every text, because
each byte is a token. The fixed parts of the prompt templates are one token each: they are the same
in every sample and carry no information, and leaving out some thirty tokens per sample makes the
steps of a small model visibly cheaper.
"""

import hashlib
import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import DataError, MissingExtraError, UsageError
from rankscope.files import cache_root
from rankscope.lab.study.data import FIXED_TEXTS, Record, content_digest, prompt
from rankscope.lab.study.encoding import EncodedSet, encode
from rankscope.lab.study.quiet import save_checkpoint

CODE_VERSION = 1  # raised when a change gives other base models: old entries are then left alone

BASE_STEPS = 240

PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
VOCAB_SIZE = 2048  # tokens that are learned at most, beside the fixed texts

MAX_RECORDS = 4096  # records that the merges are learned from; more text would change them little


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """Size and training of the tiny model; part of the cache's key.

    ``vocab_size`` tokens are learned at most; samples longer than ``train_length`` are cut in the
    base training, and the model reads ``positions``. The learning rate of AdamW warms up and decays
    to a tenth.
    """

    hidden: int = 96
    layers: int = 3
    heads: int = 2
    intermediate: int = 256
    vocab_size: int = VOCAB_SIZE
    positions: int = 1024
    train_length: int = 256
    batch_size: int = 8
    learning_rate: float = 3e-3


def cache_key(records: Sequence[Record], seed: int, steps: int, config: BaseConfig) -> str:
    """Return the name under which a base model is cached: a digest of all that decides it."""
    facts = {"version": CODE_VERSION, "seed": seed, "steps": steps, **asdict(config)}
    text = content_digest(records) + json.dumps(facts, sort_keys=True)
    return "tiny-" + hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def load_base(
    records: Sequence[Record],
    *,
    seed: int,
    steps: int = BASE_STEPS,
    config: BaseConfig | None = None,
    cache_dir: Path | None = None,
) -> tuple[nn.Module, Any]:
    """Return the base model and its tokenizer from the cache; train them first if need be.

    Two processes that train at the same time both write, each a directory of its own; the first one
    to finish gives it its final name, and the other reads that one. The seed decides the initial
    weights and the order of the records; 0 steps leave the weights random.
    """
    config = config or BaseConfig()
    root = cache_dir or cache_root()
    entry = root / cache_key(records, seed, steps, config)
    cached = _read(entry)
    if cached is not None:
        return cached
    tokenizer = train_tokenizer(records, config.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, tokenizer)
        train(model, encode(records, tokenizer, config.train_length), steps, seed, config)
    _write(entry, model, tokenizer)
    cached = _read(entry)
    assert cached is not None, f"{entry} was just written"
    return cached


def train_tokenizer(records: Sequence[Record], vocab_size: int = VOCAB_SIZE) -> Any:
    """Learn a ``PreTrainedTokenizerFast``; the same records give the same tokenizer.

    Only the first ``MAX_RECORDS`` are read; DataError if there are none. ``vocab_size`` is the
    largest number of learned tokens, specials and single bytes included.
    """
    if not records:
        raise DataError(
            "the built-in tokenizer learns from at least one record, but none is left for it: "
            "give a data set with more records"
        )
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtraError("rankscope study", "study") from error
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (prompt(record) + record.output for record in records[:MAX_RECORDS])
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in FIXED_TEXTS])
    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    return fast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        split_special_tokens=True,  # "</s>" inside a record is text, not the end of a response
        clean_up_tokenization_spaces=False,
    )


def build(config: BaseConfig, tokenizer: Any) -> nn.Module:
    """Return the tiny model with random weights from torch's current generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.positions,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model: nn.Module = LlamaForCausalLM(llama)
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the same bits on machines with any number of cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@one_thread()
def train(
    model: nn.Module, samples: EncodedSet, steps: int, seed: int, config: BaseConfig
) -> list[float]:
    """Train in place with AdamW; return the loss of each step, in nats per label token."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    batches = _batches(samples, config.batch_size, random.Random(seed))
    losses = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step, steps)
        inputs, _ = samples.collate(next(batches))
        loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _schedule(step: int, steps: int) -> float:
    """Return the learning rate's factor: a short warm-up, then half a cosine down to 0.1."""
    warm_up = min(1.0, (step + 1) / min(20, max(steps // 5, 1)))
    return warm_up * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / steps)))


def _batches(samples: EncodedSet, size: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield batches of positions forever; a batch holds neighbours in length, to pad little."""
    lengths = samples.lengths
    while True:
        order = list(range(len(samples)))
        rng.shuffle(order)
        order.sort(key=lambda position: int(lengths[position]) // 24)
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        rng.shuffle(batches)
        yield from batches


def _read(entry: Path) -> tuple[nn.Module, Any] | None:
    """Return the cached model; None without one, or when it cannot be read."""
    if not entry.is_dir():
        return None
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(entry, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(entry, local_files_only=True)
    except Exception:  # a damaged entry may fail in any way; it is made anew
        return None
    return model, tokenizer


def _write(entry: Path, model: Any, tokenizer: Any) -> None:
    """Put a model into the cache in one move; an entry that can be read stays."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        try:
            save_checkpoint(model, tokenizer, fresh)
            if entry.is_dir() and _read(entry) is None:
                shutil.rmtree(entry, ignore_errors=True)
            if not entry.exists():
                try:
                    fresh.rename(entry)
                except OSError:
                    if not entry.is_dir():  # not a race that another process has won
                        raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"the base model cannot be cached in {entry.parent} ({error.strerror}): free space "
            "there, or set XDG_CACHE_HOME to a directory that can be written"
        ) from error
