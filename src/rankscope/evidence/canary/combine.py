"""What sets apart the workers whose canary differs, in words.

A worker's program is plain JSON, see :mod:`rankscope.evidence.canary.program`. A fact counts only
if all other workers have one value, and those that differ have other ones; where no majority
agrees, any difference counts.

Legend of shapes: W workers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from rankscope.bus.canary import CanaryCause, judge, results_in
from rankscope.bus.messages import Columns, Combiner, Messages
from rankscope.bus.replicas import StateDifference, StateKind, name_values
from rankscope.bus.words import count, name_modules
from rankscope.evidence.canary import READ
from rankscope.stats.arrays import MISSING_INT, digest_of


class ComparedPrograms(Combiner):
    """Compares the programs of all workers in a step whose canary differs."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return what sets the differing workers apart, as differences."""
        results = results_in(columns)
        if results is None or (columns["canary_program"] == MISSING_INT).any():
            return {}
        verdict = judge(results)
        if verdict.verdict is CanaryCause.DATA:
            return {}
        programs_W = [names[NAMES] for names in messages.named]
        return {"differences": compare_programs(programs_W, verdict.ranks)}


make_combiner = ComparedPrograms


Program = Mapping[str, Any]

NAMES = "canary"
"""Key of a worker's program among the names of its message."""

MOST_NAMED = 3
"""Differences of one kind that are named; the rest is counted."""

_MISSING = "none"
_LONGEST = 90  # of an operation in words


class _Operation(NamedTuple):
    module: str
    call: str
    result: str
    line: str


def compare_programs(
    programs_W: Sequence[Program], odd: Sequence[int]
) -> tuple[StateDifference, ...]:
    """Return what sets the workers ``odd`` apart from the others, at most a few of each kind."""

    def keep(values_W: Sequence[Any]) -> bool:
        return sets_apart(values_W, odd)

    modules_W = [_modules(program) for program in programs_W]
    found = list(_module_differences(modules_W, keep))
    read = list(_module_differences(modules_W, keep, read=True))
    if any(_operation_differences(programs_W, _vary)):
        found += read
        read = []  # else they changed nothing of the forward pass
    return (
        *_limited(StateKind.MODULE, found),
        *_limited(StateKind.OPERATION, _operation_differences(programs_W, keep)),
        *_limited(StateKind.HELD, _state_differences(programs_W, keep)),
        *_limited(StateKind.SETTING, _setting_differences(programs_W, keep)),
        *_limited(StateKind.HOOK, (*_hook_differences(modules_W, keep), *read)),
    )


def sets_apart(values_W: Sequence[Any], odd: Sequence[int]) -> bool:
    """Return whether a value sets workers apart from all others, which agree with each other."""
    others = [value for rank, value in enumerate(values_W) if rank not in odd]
    if not others:
        return any(value != values_W[0] for value in values_W)
    agree = all(value == others[0] for value in others)
    return agree and all(values_W[rank] != others[0] for rank in odd)


_Found = tuple[str, Sequence[Any]]
_Keep = Callable[[Sequence[Any]], bool]


def _vary(values_W: Sequence[Any]) -> bool:
    return any(value != values_W[0] for value in values_W)


def _limited(kind: StateKind, found: Iterable[_Found]) -> Iterator[StateDifference]:
    named = list(found)
    if len(named) > MOST_NAMED:
        words, values_W = named[MOST_NAMED - 1]
        more = count(len(named) - MOST_NAMED, "other difference")
        named[MOST_NAMED - 1 :] = [(f"{words}, {more}", values_W)]
    for words, values_W in named:
        digests_W = [digest_of(repr(value).encode()) for value in values_W]
        none_W = np.zeros(len(values_W), bool)
        yield StateDifference(kind, words, np.array(digests_W, np.int64), none_W)


def _modules(program: Program) -> dict[str, dict[str, str]]:
    texts = program["texts"]
    parsed: dict[int, dict[str, str]] = {}
    for number in program["modules"].values():
        if number not in parsed:
            parsed[number] = json.loads(texts[number])
    return {name: parsed[number] for name, number in program["modules"].items()}


def _module_differences(
    modules_W: Sequence[Mapping[str, Mapping[str, str]]], keep: _Keep, *, read: bool = False
) -> Iterator[_Found]:
    """Yield differences of mode, class, code and attributes; modules that share one together.

    Or, with ``read``, of values that their code reads.
    """
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys(name for modules in modules_W for name in modules):
        parts_W = [modules.get(name, {}) for modules in modules_W]
        if all(part == parts_W[0] for part in parts_W):
            continue
        for fact in dict.fromkeys(fact for part in parts_W for fact in part):
            values_W = tuple(part.get(fact, "absent") for part in parts_W)
            if fact != "hooks" and keep(values_W):
                if fact.startswith(READ) == read:
                    alike.setdefault((fact, values_W), []).append(name)
                if fact == "class":  # code and attributes follow from it
                    break
    order = {"mode": 0, "class": 1}
    for (fact, values_W), names in sorted(alike.items(), key=lambda one: order.get(one[0][0], 2)):
        everyone = list(dict.fromkeys(name for modules in modules_W for name in modules))
        named = name_modules(names, everyone)
        shown = [v.rpartition(".")[2] for v in values_W] if fact == "class" else values_W
        yield f"{_fact(fact)} of {named} ({name_values(shown)})", values_W


def _fact(fact: str) -> str:
    if fact.startswith("."):
        return f'"{fact[1:]}"'
    if fact.startswith(READ):
        return f'"{fact.removeprefix(READ)}" in forward'
    words = {"compiled": "compilation", "code": "the code of forward", "frozen": "what is frozen"}
    return words.get(fact, f"the {fact}")


def _hook_differences(
    modules_W: Sequence[Mapping[str, Mapping[str, str]]], keep: _Keep
) -> Iterator[_Found]:
    for name in dict.fromkeys(name for modules in modules_W for name in modules):
        values_W = [modules.get(name, {}).get("hooks", "") for modules in modules_W]
        if keep(values_W):
            words = [value or _MISSING for value in values_W]
            yield f"hooks of {name or 'the model'} ({name_values(words)})", values_W


def _operation_differences(programs_W: Sequence[Program], keep: _Keep) -> Iterator[_Found]:
    """Yield the first operation that differs, unless something computed before it differs.

    A result that is a number, or has another shape, follows from data; what comes after it may.
    """
    operations_W = []
    for program in programs_W:
        named = [program["texts"][number] for number in program["operations"]]
        operations_W.append([_Operation(*named[at : at + 4]) for at in range(0, len(named), 4)])
    all_constants_W = [_constants(program) for program in programs_W]
    end = _MISSING_OPERATION
    for at, row_W in enumerate(zip_longest(*operations_W, fillvalue=end)):
        calls_W = [(one.module, one.call) for one in row_W]
        if any(call != calls_W[0] for call in calls_W):
            if keep(calls_W):
                where = next(one for one in row_W if one is not end)
                yield f"an operation{_at(where)} ({name_values(_call_words(row_W))})", calls_W
            break
        constants_W = [constants.get(at) for constants in all_constants_W]
        if any(one != constants_W[0] for one in constants_W):
            if keep(constants_W):
                yield f"a constant{_at(row_W[0])}", constants_W
            break
        if any(one.result != row_W[0].result for one in row_W):
            return
    draws_W = [program.get("draws", {}) for program in programs_W]
    for name in dict.fromkeys(name for draws in draws_W for name in draws):
        values_W = [draws.get(name) for draws in draws_W]
        if keep(values_W):
            words = [_MISSING if value is None else "some" for value in values_W]
            shown = f" ({name_values(words)})" if len(set(words)) > 1 else ""
            yield f"random numbers drawn by {name}{shown}", values_W


_MISSING_OPERATION = _Operation("", _MISSING, "", "")


def _call_words(row_W: Sequence[_Operation]) -> list[str]:
    """Return each worker's operation: its name alone where names differ."""
    names = [one.call.partition("(")[0] for one in row_W]
    if len(set(names)) == len({one.call for one in row_W}):
        return names
    return [c if len(c) <= _LONGEST else f"{c[:_LONGEST]}…" for c in (one.call for one in row_W)]


def _at(operation: _Operation) -> str:
    module = f" in {operation.module}" if operation.module else ""
    return f"{module}, {operation.line}" if operation.line else module


def _constants(program: Program) -> dict[int, list[int]]:
    """Return the digests of the constants of each operation that reads some, by its place."""
    digests = program["digests"][len(program["state"]) :]
    constants: dict[int, list[int]] = {}
    for at, digest in zip(program["constants"], digests, strict=False):
        constants.setdefault(at, []).append(digest)
    return constants


def _state_differences(programs_W: Sequence[Program], keep: _Keep) -> Iterator[_Found]:
    states_W = [dict(zip(one["state"], one["digests"], strict=False)) for one in programs_W]
    for name in states_W[0]:
        values_W = [state.get(name) for state in states_W]
        if keep(values_W):
            yield name, values_W


def _setting_differences(programs_W: Sequence[Program], keep: _Keep) -> Iterator[_Found]:
    for name in dict.fromkeys(name for program in programs_W for name in program["settings"]):
        values_W = [program["settings"].get(name, _MISSING) for program in programs_W]
        if keep(values_W):
            yield f"{name.replace('_', ' ')} ({name_values(values_W)})", values_W
