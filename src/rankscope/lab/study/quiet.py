"""Libraries without the notices that our users cannot act on."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from rankscope.errors import MissingExtraError

_LONGEST_REASON = 200


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence the loggers of these names, even for critical errors."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def quiet_hub() -> AbstractContextManager[None]:
    """Silence the download library, which reports each attempt to reach an absent network."""
    return quiet("huggingface_hub")


def quiet_deepspeed() -> None:
    """Make DeepSpeed, which transformers imports where it is installed, run on the CPU."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and notices of transformers, and of the library it downloads with."""
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingExtraError("rankscope study", "study") from error
    quiet_deepspeed()
    library: Any = transformers_logging  # its functions have no types
    level = library.get_verbosity()
    bars = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        with quiet_hub():
            yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


@contextmanager
def _without_deepspeed() -> Iterator[None]:
    """Let importing DeepSpeed fail, unless it has been imported already."""
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # type: ignore[assignment] # what Python reads as "not there"
    try:
        yield
    finally:
        sys.modules.pop("deepspeed", None)


def save_checkpoint(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model that nothing wraps, and its tokenizer, as Hugging Face's libraries read them.

    transformers looks whether DeepSpeed has wrapped a model by importing DeepSpeed, where it is
    installed; that takes seconds of every process that saves one.
    """
    with _without_deepspeed():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def reason(error: BaseException) -> str:
    """Return why a library failed, in part of a line: the first sentences of its message."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= _LONGEST_REASON:
        return text.rstrip(".")
    cut = text[:_LONGEST_REASON]
    sentence, dot, _ = cut.rpartition(". ")
    return sentence if dot else cut.rpartition(" ")[0] + " …"
