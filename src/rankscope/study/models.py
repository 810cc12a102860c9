"""The models of a study, each with its tokenizer and a label that says what it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import UsageError
from rankscope.study.base import BASE_STEPS, load_base
from rankscope.study.data import Record
from rankscope.study.pangu import build_pangu, load_published
from rankscope.study.quiet import quiet_transformers, reason
from rankscope.study.tokenizer import train_tokenizer

__all__ = ["PANGU", "TINY", "LoadedModel", "load_model", "quiet_transformers"]

TINY = "tiny"
PANGU = "pangu-1b"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model that is ready to be fine-tuned.

    Attributes:
        model: A transformers model in fp32, in training mode.
        tokenizer: Its transformers tokenizer, with an end and a padding token.
        label: What it is called wherever it is shown.
        num_parameters: Parameters, tied ones counted once.
    """

    model: nn.Module
    tokenizer: Any
    label: str
    num_parameters: int


def load_model(
    spec: str,
    *,
    weights: Path | None = None,
    seed: int = 0,
    tokenizer_records: Sequence[Record] = (),
    cache_dir: Path | None = None,
    base_steps: int = BASE_STEPS,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a model by name.

    Args:
        spec: ``"tiny"``, ``"pangu-1b"``, or a Hugging Face name or directory.
        weights: Directory with published weights and tokenizer, for ``pangu-1b`` only.
        seed: Decides random weights.
        tokenizer_records: Held-out records: the built-in tokenizer learns from them, and the tiny
            model's base training runs on them.
        cache_dir: Where base models are kept; the user's cache directory when None.
        base_steps: Steps of the tiny model's base training.
        device: Where to put the model.

    Raises:
        UsageError: There is no such model, or its files do not fit it.
        DataError: The built-in tokenizer has no records to learn from.
        MissingExtraError: ``transformers`` is not installed.
    """
    if weights is not None and spec != PANGU:
        raise UsageError(f"published weights can be given for {PANGU} only, the model is {spec!r}")
    with quiet_transformers():
        if spec == TINY:
            model, tokenizer = load_base(
                tokenizer_records, seed=seed, steps=base_steps, cache_dir=cache_dir
            )
            label = "tiny (built-in base)" if base_steps else "tiny (random weights)"
        elif spec == PANGU and weights is not None:
            model, tokenizer = load_published(weights)
            label = f"{PANGU} (weights from {weights.name})"
        elif spec == PANGU:
            tokenizer = train_tokenizer(tokenizer_records)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = build_pangu()
            label = f"{PANGU} (random weights)"
        else:
            model, tokenizer = _hugging_face(spec)
            label = spec
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer of {spec!r} has no end token: choose another model")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.to(device).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    return LoadedModel(model, tokenizer, label, count)


def _hugging_face(spec: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            spec, trust_remote_code=False, dtype=torch.float32
        )
    except Exception as error:  # the library raises what its backends raise
        raise UsageError(
            f"the model {spec!r} cannot be loaded ({reason(error)}): use {TINY}, {PANGU}, "
            "or a Hugging Face directory or name that needs no remote code"
        ) from error
    model.config.use_cache = False
    return model, tokenizer
