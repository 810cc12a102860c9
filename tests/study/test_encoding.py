import pytest
import torch

from rankscope.errors import DataError
from rankscope.lab.study.data import Record, prompt
from rankscope.lab.study.encoding import encode


class Bytes:
    """A tokenizer that is easy to check by hand: one token per byte, from 10 on."""

    eos_token_id: int | None = 2
    pad_token_id: int | None = 0
    bos_token_id: int | None = None

    def __call__(self, texts, *, add_special_tokens=True, **_):
        if isinstance(texts, list):
            return {"input_ids": [self(t, add_special_tokens=False)["input_ids"] for t in texts]}
        bos = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": bos + [10 + byte for byte in texts.encode()]}


RECORDS = [Record(5, "Say it.", "", "yes"), Record(7, "Say it.", "now", "certainly")]


def _ids(text):
    return [10 + byte for byte in text.encode()]


def test_prompt_response_and_end_token():
    encoded = encode(RECORDS, Bytes(), 1000)
    texts = [[*_ids(prompt(record) + record.output), 2] for record in RECORDS]
    assert encoded.indices.tolist() == [record.index for record in RECORDS]
    assert encoded.prompt_lengths.tolist() == [len(prompt(record)) for record in RECORDS]
    assert encoded.tokens.tolist() == [*texts[0], *texts[1]]
    assert encoded.lengths.tolist() == [len(text) for text in texts]
    assert encoded.truncated == encoded.skipped_truncated == 0


def test_maximum_length():
    head = len(prompt(RECORDS[0]))
    full = head + len("yes") + 1
    for max_length, kept, truncated in ((full, 1, 0), (full - 1, 1, 1), (head + 1, 1, 1)):
        encoded = encode(RECORDS[:1], Bytes(), max_length)
        assert (len(encoded), encoded.truncated) == (kept, truncated)
        assert encoded.lengths.tolist() == [min(full, max_length)]
    # The second record has the longer prompt and keeps no label token.
    encoded = encode(RECORDS, Bytes(), head + 1)
    assert (encoded.indices.tolist(), encoded.skipped_truncated) == ([5], 1)
    with pytest.raises(DataError, match=f"within {head} tokens"):
        encode(RECORDS[:1], Bytes(), head)


def test_collate_pads_on_the_right_and_labels_the_response_only():
    encoded = encode(RECORDS, Bytes(), 1000)
    inputs, indices = encoded.collate([1, 0])
    assert indices == [7, 5]
    length = max(encoded.lengths)
    for row, record in enumerate((RECORDS[1], RECORDS[0])):
        text, answer = [*_ids(prompt(record) + record.output), 2], [*_ids(record.output), 2]
        fill = int(length - len(text))
        labels = [-100] * len(prompt(record)) + answer + [-100] * fill
        assert inputs["input_ids"][row].tolist() == text + [0] * fill
        assert inputs["attention_mask"][row].tolist() == [1] * len(text) + [0] * fill
        assert inputs["labels"][row].tolist() == labels
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int64}
