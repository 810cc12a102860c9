"""Whether the numbers of a sentence hold together, as a reader with a pocket calculator sees it."""

import re
from collections.abc import Callable, Iterator

NUMBER = r"([+−-]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"
_APART = re.compile(
    r"(?:[Rr]anks?|[Ss]teps?|groups?|calls?|micro-batch) \d[\d,]*"
    r"(?:(?:–|, | and | to )\d[\d,]*)*"
    r"|\w+(?:\.\w+)*\.\d+(?:\.\w+)*|\b[a-z_]+\d\w*|95 %|\(\d+(?:, \d+)+\)|float\d+|from 0\b"
)
"""Numbers that name something, or that a convention fixes."""


def value(text: str) -> float:
    """Return the number that is printed."""
    return float(text.replace(",", "").replace("−", "-"))


def step_of(text: str) -> float:
    """Return one unit of the last digit that is printed."""
    digits, _, exponent = text.replace(",", "").partition("e")
    _, _, decimals = digits.partition(".")
    return 10.0 ** (int(exponent or 0) - len(decimals))


def divides(part: str, whole: str, ratio: str) -> bool:
    """Return whether ``part / whole`` is ``ratio``, to the digits that this has."""
    exact = value(part) / value(whole)
    return abs(exact - value(ratio)) <= 0.5001 * step_of(ratio)


def in_order(*texts: str) -> bool:
    """Return whether the numbers do not fall."""
    values = [value(text) for text in texts]
    return values == sorted(values)


def costs(fixed: str, read: str, share: str) -> bool:
    """Return whether two costs in milliseconds are so many per cent of a second."""
    return divides(str(value(fixed) + value(read)), "10", share)


def tenfold(large: str, small: str) -> bool:
    """Return whether one share is ten times the other, to the digits that this has."""
    return divides(large, "10", small)


def spreads(text: str, low: str, high: str) -> bool:
    """Return whether a ratio lies between its interval's ends."""
    return in_order(low, text, high)


def within(text: str, low: str, high: str) -> bool:
    """Return whether a ratio lies in the band that the sentence gives for it."""
    return in_order(low, text, high) and divides("1", high, low)


Rule = tuple[str, Callable[..., bool], tuple[int, ...]]
RULES: tuple[Rule, ...] = (
    (rf"loss std of {NUMBER}; the observed one, {NUMBER}, is {NUMBER} times", divides, (2, 1, 3)),
    (rf"{NUMBER} times .*\(95 % interval {NUMBER} to {NUMBER}\)", spreads, (1, 2, 3)),
    (rf"is {NUMBER} times that.* within the {NUMBER} to {NUMBER} that", within, (1, 2, 3)),
    (rf"about {NUMBER} \S+ \(95 % interval {NUMBER} to {NUMBER}\)", spreads, (1, 2, 3)),
    (rf"{NUMBER} \| (?:mean over steps; )?{NUMBER} × the {NUMBER} that", divides, (1, 3, 2)),
    (rf"differ by {NUMBER}\D* \(std over workers, {NUMBER} from", in_order, (1, 2)),
    (rf"{NUMBER} of the {NUMBER} samples drawn", in_order, (1, 2)),
    (rf"global batch of {NUMBER} \D*held {NUMBER} different", in_order, (2, 1)),
    (rf"samples: {NUMBER} \| of {NUMBER} drawn, {NUMBER} times each", divides, (2, 1, 3)),
    (rf"the work of {NUMBER} workers?, not (?:of )?{NUMBER}", in_order, (1, 2)),
    (rf"{NUMBER} times as much .*\(up to {NUMBER} times in one step\)", in_order, (1, 2)),
    (rf"off by {NUMBER} of its norm, where rounding gives {NUMBER} at most", in_order, (2, 1)),
    (
        rf"{NUMBER} ms in every step .* {NUMBER} ms to read .* {NUMBER}% of one of 1 ",
        costs,
        (1, 2, 3),
    ),
    (rf"both are {NUMBER}% of a step of 100 ms, and {NUMBER}% of one", tenfold, (1, 2)),
)
"""What a sentence looks like, what must hold between its numbers, and which of them it takes."""

UNRELATED = (
    r"Averaged loss",
    r"averaged loss went from",
    r"Not yet checked",
    r"no more than \d+ batch",
    r"loss × |norm × |error|direction",
    r"draws so far",
    r"raises a finding of that kind|would show anything like it",
    r"ready .* later than the typical worker's",
    r"is multiplied by",
    r"what the optimizer gets is|were multiplied by|was divided",
    r"of its norm, in [\d,]+ audited steps",
    r"departs from the plan",
    r"draw the batches of the steps from",
    r"resemble each other",
    r"Watching took",
    r"Mean cosine",
    r" workers · ",
    r"the plan has",
    r"label tokens since step",
    r"numbers of micro-batches",
    r"relative difference",
    r"gradients are scaled by",
)
"""Sentences whose numbers measure different things: nothing follows from one for the other."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text."""
    yield from (part for part in re.split(r"(?<=[.:;]) (?=[A-Z])", text) if part)


def numbers_in(sentence: str) -> list[str]:
    """Return a sentence's numbers, but for those that name a rank, a step or a parameter."""
    return re.findall(rf"(?<![\w.]){NUMBER}", _APART.sub("", sentence))


def faults_of(text: str) -> list[str]:
    """Return what a text's numbers contradict, and its sentences that no rule knows."""
    faults = []
    for sentence in sentences(text):
        known = any(re.search(pattern, sentence) for pattern in UNRELATED)
        for pattern, holds, order in RULES:
            found = re.search(pattern, sentence)
            if found:
                known = True
                if not holds(*(found[place] for place in order)):
                    faults.append(f"these numbers do not hold together: {sentence}")
        if not known and len(numbers_in(sentence)) > 1:
            faults.append(f"no rule says how these numbers belong together: {sentence}")
    return faults
