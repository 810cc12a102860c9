"""The tokenizer of the built-in models: a byte-level BPE, learned from the study's own text.

It covers every text, because each byte is a token. The fixed parts of the prompt templates are one
token each: they are the same in every sample and carry no information, and leaving out some thirty
tokens per sample makes the steps of a small model visibly cheaper.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rankscope.errors import DataError, MissingExtraError
from rankscope.study.prompts import FIXED_TEXTS, prompt

if TYPE_CHECKING:
    from rankscope.study.data import Record

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCAB_SIZE = 2048
"""Tokens that are learned at most; short texts give fewer. The fixed texts come on top."""

MAX_RECORDS = 4096
"""Records that the merges are learned from; more text would change them little."""


def train_tokenizer(records: Sequence["Record"], vocab_size: int = VOCAB_SIZE) -> Any:
    """Learn a tokenizer; the same records give the same tokenizer.

    Args:
        records: Where the text comes from; only the first ``MAX_RECORDS`` are read.
        vocab_size: Largest number of learned tokens, specials and single bytes included.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``, so that it is saved into checkpoints.

    Raises:
        DataError: There are no records.
        MissingExtraError: ``transformers`` or ``tokenizers`` is not installed.
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
