"""Instruction data in Alpaca's format: read, checked, and split into study and held-out records.

A record's identity is its index in the file, from 0. The held-out records are those that the
built-in base model is trained on beforehand; they never take part in the study itself.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.errors import DataError, MissingExtraError
from rankscope.files import read_file
from rankscope.lab.study.builtin import generate
from rankscope.lab.study.quiet import quiet_hub, reason

BUILTIN = "builtin"
KEYS = ("instruction", "input", "output")
MAX_HELD_OUT = 2048
MIN_BEYOND = 256  # with fewer records beyond the limit, the held-out ones are of the selected ones

INSTRUCTION_HEAD = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
INSTRUCTION_HEAD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
INPUT_HEAD = "\n\n### Input:\n"
RESPONSE_HEAD = "\n\n### Response:"

FIXED_TEXTS = (INSTRUCTION_HEAD, INSTRUCTION_HEAD_WITH_INPUT, INPUT_HEAD, RESPONSE_HEAD)
"""The parts of the templates that do not depend on the record."""


@dataclass(frozen=True, slots=True)
class Record:
    """An instruction with its answer; ``input`` is often empty, ``output`` never blank.

    ``index`` is the position in the file, from 0: the identity of the sample.
    """

    index: int
    instruction: str
    input: str
    output: str


def prompt(record: Record) -> str:
    """Return everything that a model sees before the response begins.

    A record with an input is shown as instruction, input and response; a record whose input is
    empty leaves the input section out. The response follows the last heading directly. Placeholders
    such as ``<noinput>`` that some data sets hold are inputs like any other.

    >>> prompt(Record(0, "Add them.", "1, 2", "3")).splitlines()[-4:]
    ['### Input:', '1, 2', '', '### Response:']
    """
    if record.input.strip():
        head = INSTRUCTION_HEAD_WITH_INPUT + record.instruction + INPUT_HEAD + record.input
    else:
        head = INSTRUCTION_HEAD + record.instruction
    return head + RESPONSE_HEAD


@dataclass(frozen=True, slots=True)
class RecordSet:
    """The records of a study, and those ``held_out`` that the base model is trained on.

    ``digest`` is a hex digest of the content of ``records``, indices included; ``skipped_empty``
    are left out because their output is blank; ``total`` counts the file's, blank ones included.
    """

    records: tuple[Record, ...]
    held_out: tuple[Record, ...]
    name: str
    digest: str
    skipped_empty: int
    total: int


def load_records(
    source: str | None,
    *,
    seed: int = 0,  # decides the content of the built-in data; files do not depend on it
    limit: int | None = None,  # use only the first so many records
) -> RecordSet:
    """Read a data set and split it into the records below the limit and the held-out ones.

    ``source`` is None or ``"builtin"`` for the built-in data, the path of a ``.json`` file (a list)
    or ``.jsonl`` file (a record per line), or the name of a Hugging Face data set.

    Held out is up to a tenth of the file, at most 2,048 records, from its end. Where fewer than 256
    lie beyond the limit, they are the last tenth of the selected records instead.
    """
    name, rows = _open(source, seed)
    everything = [_record(index, row, name) for index, row in enumerate(rows)]
    end, held = _split(len(everything), limit)
    filled = [record for record in everything if record.output.strip()]
    records = tuple(record for record in filled if record.index < end)
    if not records:
        raise DataError(
            f"{name}: none of its {len(everything)} records can be used, expected at least one "
            "with an answer in 'output': choose other data or a higher limit"
        )
    return RecordSet(
        records=records,
        held_out=tuple(record for record in filled if record.index in held),
        name=name,
        digest=content_digest(records),
        skipped_empty=end - len(records),
        total=len(everything),
    )


def content_digest(records: Iterable[Record]) -> str:
    """Return a hex digest of indices and texts, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        fields = (record.index, record.instruction, record.input, record.output)
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()


def _split(total: int, limit: int | None) -> tuple[int, range]:
    """Return where the selected records end, and the indices of the held-out ones."""
    cut = total if limit is None else min(limit, total)
    beyond = total - cut
    if beyond >= MIN_BEYOND:
        return cut, range(total - min(MAX_HELD_OUT, total // 10, beyond), total)
    share = min(MAX_HELD_OUT, max(cut // 10, 1)) if cut > 1 else 0
    return cut - share, range(cut - share, cut)


def _open(source: str | None, seed: int) -> tuple[str, Iterable[object]]:
    if source is None or source == BUILTIN:
        return f"built-in data (seed {seed})", generate(seed)
    path = Path(source).expanduser()
    if path.suffix == ".jsonl":
        return path.name, _read_lines(path)
    if path.suffix == ".json":
        return path.name, _read_list(path)
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError(
            f"expected a .json or .jsonl file, a data set name or 'builtin' as data, got {source}"
        )
    return source, _read_dataset(source)


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"there is no data file {path}: check the path") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text: save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror}") from None


def _parse(text: str, path: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        hint = "correct that line"
        if error.msg == "Extra data" and first_line == 1:
            hint = "one list is expected; for a record per line, end the file's name in .jsonl"
        raise DataError(f"{path}, line {line}: not valid JSON ({error.msg}): {hint}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: JSON that cannot be read ({error}): correct the file") from None


def _read_list(path: Path) -> list[object]:
    rows = _parse(_read_text(path), path)
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: expected a list of records, got a JSON {_json_type(rows)}: "
            "put the records between [ and ]"
        )
    return rows


def _read_lines(path: Path) -> Iterator[object]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield _parse(line.strip(), path, number)


def _read_dataset(name: str) -> Iterable[object]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("a data set by name", "study") from error
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with quiet_hub():
            loaded: Iterable[object] = datasets.load_dataset(name, split="train")
    except Exception as error:  # the library raises what its backends raise
        raise DataError(
            f"the data set {name!r} cannot be loaded from Hugging Face ({reason(error)}): "
            "check its name and the network, or give a .json or .jsonl file"
        ) from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    return loaded


def _record(index: int, row: object, name: str) -> Record:
    where = f"{name}, record {index} (counted from 0)"
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected an object with the keys {', '.join(KEYS)}, "
            f"got a JSON {_json_type(row)}: correct or remove it"
        )
    texts = [_text(row, key, where) for key in KEYS]
    return Record(index, *texts)


def _text(row: dict[str, object], key: str, where: str) -> str:
    if key not in row:
        found = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{where}: the key {key!r} is missing (found: {found}): add it, or remove the record"
        )
    value = row[key]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} must be a string, got a JSON {_json_type(value)}: correct it"
        )
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise DataError(f"{where}: {key!r} holds half of a surrogate pair: correct it")
    return value


def _json_type(value: object) -> str:
    names = {bool: "boolean", str: "string", list: "list", dict: "object", type(None): "null"}
    return names.get(type(value), "number")
