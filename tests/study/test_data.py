import json
import os
from pathlib import Path

import pytest
import torch

from rankscope.errors import DataError
from rankscope.lab.study.builtin import generate
from rankscope.lab.study.config import Setting, StudyConfig
from rankscope.lab.study.data import Record, load_records, prompt
from rankscope.lab.study.encoding import encode
from rankscope.verdict.coverage import checks_of, missing_steps

BESIDE = Path(__file__).parents[3] / "shared" / "data" / "alpaca_data.json"
REAL = Path(os.environ.get("RANKSCOPE_ALPACA", BESIDE))


def _rows(count):
    return [{"instruction": f"Do {i}.", "input": "", "output": f"Done {i}."} for i in range(count)]


def _write(path, rows):
    path.write_text(json.dumps(rows))
    return str(path)


def _indices(records):
    return [record.index for record in records]


@pytest.mark.parametrize(
    ("total", "limit", "selected", "first_held"),
    [(1000, None, 900, 900), (1000, 744, 744, 900), (1000, 745, 671, 671), (7, None, 6, 6)],
)
def test_split(tmp_path, total, limit, selected, first_held):
    loaded = load_records(_write(tmp_path / "d.json", _rows(total)), limit=limit)
    end = total if limit is None or total - limit >= 256 else min(limit, total)
    assert _indices(loaded.records) == list(range(selected))
    assert _indices(loaded.held_out) == list(range(first_held, end))


def test_real_format(tmp_path):
    path = REAL
    if not path.is_file():  # a generated file of its format and quirks
        rows = list(generate(7, 5000))
        for index in (40, 900, 3000):
            rows[index]["output"] = ""
        path = Path(_write(tmp_path / "alpaca_data.json", rows))
    loaded = load_records(str(path), limit=1000)
    rows = json.loads(path.read_text())
    assert loaded.total == len(rows)
    assert len(loaded.records) + loaded.skipped_empty == 1000
    assert loaded.skipped_empty == sum(not row["output"].strip() for row in rows[:1000])
    assert all(record.output == rows[record.index]["output"] for record in loaded.records)
    assert 256 < len(loaded.held_out) <= 2048
    assert min(_indices(loaded.held_out)) >= 1000


def test_blank_outputs_are_skipped_and_keep_the_others_indices(tmp_path):
    rows = _rows(20)
    rows[1]["output"] = ""
    rows[5]["output"] = " \n"
    loaded = load_records(_write(tmp_path / "d.json", rows))
    assert loaded.skipped_empty == 2
    assert _indices(loaded.records) == [i for i in range(18) if i not in (1, 5)]


def test_lines_and_lists_hold_the_same_records(tmp_path):
    rows = [*_rows(9), {"instruction": "naïve\u2028", "input": "é\n", "output": "ü", "text": "x"}]
    lines = tmp_path / "d.jsonl"
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    lines.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    expected = load_records(_write(tmp_path / "d.json", rows))
    assert load_records(str(lines)).records == expected.records
    assert load_records(str(lines)).held_out == expected.held_out
    assert load_records(str(lines)).digest == expected.digest


GOOD = '{"instruction": "a", "input": "", "output": "b"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b"[\n" + GOOD.encode() + b",\n{oops}\n]", "d.json, line 3: not valid JSON"),
        ("d.json", b"[" * 200_000, "JSON that cannot be read"),
        ("d.json", GOOD.replace('""', "7").join("[]").encode(), "'input' must be a string"),
        ("d.json", GOOD.replace('""', '"\\ud800"').join("[]").encode(), "surrogate"),
        ("d.jsonl", f"{GOOD}\n\n{GOOD[:-1]}\n".encode(), "d.jsonl, line 3: not valid JSON"),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_records(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_set_by_name(monkeypatch):
    import datasets  # a second, for all who collect tests

    rows = _rows(40)

    def load_dataset(name, split):
        assert (name, split) == ("someone/instructions", "train")
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_records("someone/instructions")
    assert loaded.name == "someone/instructions"
    assert loaded.records[5] == Record(5, "Do 5.", "", "Done 5.")


def test_the_default_steps_complete_every_check():
    config = StudyConfig()
    checks = checks_of(config.workers, {})
    assert missing_steps(checks, config.steps) == 0
    assert missing_steps(checks, config.steps - 1) == 1


def test_seeds_of_the_settings():
    assert {Setting.S1_1.seed_of(rank, 5) for rank in range(8)} == {5}
    odd, *others = (Setting.S1_2.seed_of(rank, 5) for rank in range(8))
    assert odd != 5
    assert set(others) == {5}
    assert len({Setting.S1_3.seed_of(rank, 5) for rank in range(1024)}) == 1024


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
