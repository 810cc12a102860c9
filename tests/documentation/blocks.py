"""The code blocks of all pages: where each one stands, and what kind of thing it is."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ALL = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
PAGES = sorted(path for path in _ALL if path.name != "CHANGELOG.md")
PROGRAMS = ("rankscope", "torchrun", "make", "pip", "python", "python3", "duckdb")
SHELLS = ("sh", "bash", "console", "shell")
_ENVIRONMENT = re.compile(r"^([A-Z_]+=\S+ +)+")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^`\n]*)$")


@dataclass(frozen=True)
class Block:
    page: str  # from the project's root
    line: int  # at which its fence opens
    language: str  # what the fence says
    code: str  # without the indentation of the fence

    @property
    def first(self) -> str:
        """Its first line that is not empty: what tables call it by."""
        return next((line for line in self.code.splitlines() if line.strip()), "").strip()

    @property
    def kind(self) -> str:
        """``python``, ``commands``, a data language, ``text`` (declared so), or ``unknown``."""
        if self.language in SHELLS:
            return "commands"
        if not self.language:
            known = program(_ENVIRONMENT.sub("", self.first).split(maxsplit=1)[0]) in PROGRAMS
            return "commands" if known else "unknown"
        return self.language

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    page: str
    text: str  # without comment and environment

    @property
    def words(self) -> list[str]:
        words = shlex.split(self.text)
        if program(words[0]) in ("python", "python3") and words[1:3] == ["-m", "rankscope"]:
            words = ["rankscope", *words[3:]]
        return [program(words[0]), *words[1:]]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def program(word: str) -> str:
    return word.removeprefix("$ ").rsplit("/", 1)[-1]


def blocks() -> list[Block]:
    return [block for page in PAGES for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    name, opened, lines = page.relative_to(ROOT).as_posix(), None, []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, lines = (number, fence), []
        elif opened is not None and fence and not fence["language"]:
            start, begin = opened
            yield Block(name, start, begin["language"].split(" ")[0], "\n".join(lines))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened[1]["indent"]))
    assert opened is None, f"{name}: a block is not closed"


def commands() -> list[Command]:
    found = [block for block in blocks() if block.kind == "commands"]
    return [Command(block.page, text) for block in found for text in _command_lines(block.code)]


def _command_lines(code: str) -> Iterator[str]:
    for line in code.replace("\\\n", " ").splitlines():
        text = re.sub(r"(^|\s+)#.*$", "", line.removeprefix("$ ")).strip()
        text = _ENVIRONMENT.sub("", text)
        if text:
            yield " ".join(text.split())
