"""Reads what an offline run of Weights & Biases has left: protocol buffers in LevelDB's format.

After a header of 7 bytes, blocks of 32 KiB; in a block, pieces of checksum (4 bytes), length (2),
type (1: whole, 2: first, 3: middle, 4: last) and data; fewer than 7 bytes at its end are padding.
"""

import json
import struct
import time

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024


def records(path, seconds=60.0):
    """Return all records of the one run under a directory, once W&B's process has written all."""
    [file] = path.rglob("*.wandb")
    deadline = time.monotonic() + seconds
    while True:
        found = list(_parse(file.read_bytes()))
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.01)


def _parse(data):
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # not yet written
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def _items(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(path):
    """Return the rows of the run's history by name, without W&B's own."""
    rows = [_items(r.history.item) for r in records(path) if r.HasField("history")]
    rows = [{name: v for name, v in row.items() if not name.startswith("_")} for row in rows]
    return [row for row in rows if row]


def summary(path):
    merged = {}
    for record in records(path):
        if record.HasField("summary"):
            merged |= _items(record.summary.update)
    return merged


def alerts(path):
    found = [record.alert for record in records(path) if record.HasField("alert")]
    return [(alert.title, alert.text, alert.level) for alert in found]
