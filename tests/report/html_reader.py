"""Reads a page as a browser would: what it would load, which scripts run, which figures show."""

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

LOADING = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction"}


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []  # addresses that a browser would follow or load
        self.tags: Counter[str] = Counter()
        self.scripts: list[str] = []  # those that run
        self.styles = ""
        self.figures: list[str] = []  # names of their places
        self.ids: list[str] = []
        self.text = ""  # what a reader sees
        self.policy = ""  # for the security of content
        self._data: dict[str, Any] = {}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.loads += [values[name] for name in values if name in LOADING]
        assert not [name for name in values if name.startswith("on")], "inline event handler"
        if "id" in values:
            self.ids.append(values["id"])
        if "data-figure" in values:
            self.figures.append(values["data-figure"])
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag == "script":
            self._inside = "json" if values.get("type") == "application/json" else "script"
        elif tag in {"style", "title"}:
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in {"script", "style", "title"}:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside == "json":
            self._data = json.loads(data)
        elif self._inside == "style":
            self.styles += data
        else:
            self.text += data

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)

    @property
    def specs(self) -> dict[str, Any]:
        """The figures' specifications, complete with their data, by name."""
        rows = {name: to_rows(columns) for name, columns in self._data["datasets"].items()}
        return {
            name: {**spec, "datasets": {key: rows[key] for key in data_names(spec)}}
            for name, spec in self._data["specs"].items()
        }

    @property
    def configs(self) -> dict[str, Any]:
        return dict(self._data["configs"])

    def digests(self) -> list[str]:
        hashed = [hashlib.sha256(script.encode()).digest() for script in self.scripts]
        return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashed]


def to_rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def data_names(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*(data_names(item) for item in node), set())
    if not isinstance(node, dict):
        return set()
    own = {node["data"]["name"]} if isinstance(node.get("data"), dict) else set()
    return own.union(*(data_names(item) for item in node.values()))
