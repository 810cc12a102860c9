"""The built-in data: an instruction set that is made up by seed, so that nothing is downloaded.

Each record is drawn from one of some twenty kinds of task, from sums to short stories. The answers
follow from the questions by simple rules, so that a small model's loss falls within a minute, and
their lengths differ widely, as those of written answers do.
"""

import random
from collections.abc import Callable, Iterator
from typing import Final

NUM_RECORDS = 6000

Task = tuple[str, str, str]  # instruction, input, output


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS: Final = _words(
    "apple river stone lamp window garden boat kettle basket mountain pencil bridge candle forest "
    "blanket hammer island jacket ladder mirror needle orchard pebble quilt ribbon saddle teapot "
    "umbrella valley wagon anchor barrel compass drum engine feather goblet harbor inkwell jar"
)
ADJECTIVES: Final = _words(
    "quiet bright heavy gentle ancient narrow golden simple clever distant empty famous humble "
    "modern patient round silver tiny warm young"
)
OPPOSITES: Final = (
    ("hot", "cold"), ("tall", "short"), ("early", "late"), ("full", "empty"), ("hard", "soft"),
    ("light", "dark"), ("loud", "quiet"), ("new", "old"), ("open", "closed"), ("rich", "poor"),
    ("smooth", "rough"), ("strong", "weak"), ("wet", "dry"), ("wide", "narrow"), ("fast", "slow"),
)  # fmt: skip
NAMES: Final = _words("Ada Bruno Carla Dmitri Elif Farid Greta Hugo Ines Jonas Kira Leo Mina Noor")
PLACES: Final = _words("market harbor library station meadow workshop village museum bakery school")
DAYS: Final = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS: Final = _words(
    "January February March April May June July August September October November December"
)
KINDS: Final = {
    "fruits": _words("apple banana cherry grape lemon mango orange peach pear plum"),
    "colors": _words("red blue green yellow purple orange white black brown gray"),
    "animals": _words("cat dog horse rabbit tiger eagle salmon turtle whale fox"),
    "tools": _words("hammer saw drill wrench chisel pliers ruler file clamp shovel"),
    "instruments": _words("piano violin flute drum guitar harp trumpet cello oboe organ"),
}
UNITS: Final = (
    ("meters", "centimeters", 100), ("kilometers", "meters", 1000), ("hours", "minutes", 60),
    ("minutes", "seconds", 60), ("kilograms", "grams", 1000), ("weeks", "days", 7),
    ("days", "hours", 24), ("liters", "milliliters", 1000), ("dozens", "pieces", 12),
)  # fmt: skip
NUMBER_WORDS: Final = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
DISHES: Final = _words("soup salad stew pie omelette porridge curry pancakes")
GOODS: Final = _words("rice beans carrots onions potatoes lentils tomatoes mushrooms noodles eggs")


def _addition(rng: random.Random) -> Task:
    a = rng.randint(2, 99)
    b = rng.randint(2, 99)
    instruction = rng.choice(("Add the two numbers.", "What is the sum of these numbers?"))
    return instruction, f"{a} and {b}", f"The sum of {a} and {b} is {a + b}."


def _subtraction(rng: random.Random) -> Task:
    name = rng.choice(NAMES)
    thing = rng.choice(NOUNS)
    a = rng.randint(5, 60)
    b = rng.randint(1, a - 1)
    question = f"{name} has {a} {thing}s and gives away {b}. How many are left?"
    return question, "", f"{a} minus {b} is {a - b}, so {name} has {a - b} {thing}s left."


def _table(rng: random.Random) -> Task:
    base = rng.randint(2, 20)
    rows = rng.randint(3, 9)
    lines = [f"{row} x {base} = {row * base}" for row in range(1, rows + 1)]
    return f"Write the multiplication table of {base} up to {rows}.", "", "\n".join(lines)


def _sort_words(rng: random.Random) -> Task:
    words = rng.sample(NOUNS, rng.randint(3, 7))
    instruction = rng.choice(
        ("Sort the words alphabetically.", "Put these words in order from A to Z.")
    )
    return instruction, ", ".join(words), ", ".join(sorted(words))


def _sort_numbers(rng: random.Random) -> Task:
    numbers = rng.sample(range(1, 100), rng.randint(3, 7))
    downward = rng.random() < 0.5
    instruction = (
        f"Sort the numbers from {'largest to smallest' if downward else 'smallest to largest'}."
    )
    answer = sorted(numbers, reverse=downward)
    return instruction, ", ".join(map(str, numbers)), ", ".join(map(str, answer))


def _reverse(rng: random.Random) -> Task:
    words = rng.sample(ADJECTIVES + NOUNS, rng.randint(3, 6))
    return "Write the words in reverse order.", " ".join(words), " ".join(reversed(words))


def _count_letters(rng: random.Random) -> Task:
    word = rng.choice(NOUNS + ADJECTIVES)
    letter = rng.choice(word)
    count = word.count(letter)
    times = "time" if count == 1 else "times"
    instruction = f"How often does the letter {letter} occur in the word?"
    return instruction, word, f"The letter {letter} occurs {NUMBER_WORDS[count]} {times} in {word}."


def _spell(rng: random.Random) -> Task:
    word = rng.choice(NOUNS)
    shout = rng.choice((False, True))
    spelled = "-".join(word.upper() if shout else word)
    return f"Spell the word {word} in {'capital' if shout else 'small'} letters.", "", spelled


def _compare(rng: random.Random) -> Task:
    a, b = rng.sample(range(1, 999), 2)
    larger = rng.choice((True, False))
    answer, rest = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
    word, relation = ("larger", "greater") if larger else ("smaller", "less")
    return (
        f"Which number is {word}?",
        f"{a} or {b}",
        f"{answer}, because it is {relation} than {rest}.",
    )


def _days(rng: random.Random) -> Task:
    start = rng.randrange(7)
    ahead = rng.randint(1, 20)
    end = DAYS[(start + ahead) % 7]
    question = f"If today is {DAYS[start]}, what day is it in {ahead} days?"
    return question, "", f"In {ahead} days it is {end}."


def _months(rng: random.Random) -> Task:
    start = rng.randrange(12)
    count = rng.randint(2, 8)
    following = [MONTHS[(start + offset) % 12] for offset in range(1, count + 1)]
    question = f"Name the {NUMBER_WORDS[count]} months that follow {MONTHS[start]}."
    return question, "", ", ".join(following) + "."


def _convert(rng: random.Random) -> Task:
    large, small, factor = rng.choice(UNITS)
    amount = rng.randint(2, 40)
    answer = f"{amount} {large} are {amount * factor} {small}."
    return f"Convert to {small}.", f"{amount} {large}", answer


def _sequence(rng: random.Random) -> Task:
    start = rng.randint(1, 40)
    step = rng.randint(1, 12)
    count = rng.randint(3, 10)
    given = [start + step * position for position in range(4)]
    answer = [start + step * position for position in range(4, 4 + count)]
    instruction = f"Continue the sequence with {NUMBER_WORDS[count]} more numbers."
    return instruction, ", ".join(map(str, given)), ", ".join(map(str, answer))


def _list(rng: random.Random) -> Task:
    kind = rng.choice(list(KINDS))
    count = rng.randint(3, 8)
    letters = rng.choice(("", " in alphabetical order"))
    theme = f" for {rng.choice(NAMES)}'s {rng.choice(PLACES)}"
    chosen = rng.sample(KINDS[kind], count)
    items = sorted(chosen) if letters else chosen
    lines = [f"{position}. {item}" for position, item in enumerate(items, start=1)]
    return f"List {NUMBER_WORDS[count]} {kind}{letters}{theme}.", "", "\n".join(lines)


def _odd_one(rng: random.Random) -> Task:
    kind, other = rng.sample(list(KINDS), 2)
    stranger = rng.choice([item for item in KINDS[other] if item not in KINDS[kind]])
    items = [*rng.sample(KINDS[kind], 3), stranger]
    rng.shuffle(items)
    answer = f"{stranger.capitalize()} does not belong, because the others are {kind}."
    return "Which word does not belong with the others?", ", ".join(items), answer


def _opposite(rng: random.Random) -> Task:
    first, second = rng.choice(OPPOSITES)
    word, answer = (first, second) if rng.random() < 0.5 else (second, first)
    thing = rng.choice(NOUNS)
    return "Replace the adjective by its opposite.", f"a {word} {thing}", f"a {answer} {thing}"


def _sentence(rng: random.Random) -> Task:
    thing = rng.choice(NOUNS)
    how = rng.choice(ADJECTIVES)
    place = rng.choice(PLACES)
    name = rng.choice(NAMES)
    answer = f"{name} found a {how} {thing} near the {place}."
    return "Write a sentence with these words.", f"{name}, {how}, {thing}, {place}", answer


def _rewrite(rng: random.Random) -> Task:
    name = rng.choice(NAMES)
    thing = rng.choice(NOUNS)
    place = rng.choice(PLACES)
    verb, past = rng.choice(
        (("carries", "carried"), ("paints", "painted"), ("repairs", "repaired"))
    )
    sentence = f"{name} {{}} the {thing} in the {place}."
    return "Rewrite the sentence in the past tense.", sentence.format(verb), sentence.format(past)


def _recipe(rng: random.Random) -> Task:
    dish = rng.choice(DISHES)
    goods = rng.sample(GOODS, rng.randint(2, 6))
    minutes = 5 * rng.randint(2, 12)
    steps = [f"Wash the {goods[0]} and cut them into small pieces."]
    steps += [f"Add the {item} and stir slowly for two minutes." for item in goods[1:]]
    steps += [f"Cook everything for {minutes} minutes.", f"Serve the {dish} while it is warm."]
    lines = [f"Step {number}: {step}" for number, step in enumerate(steps, start=1)]
    instruction = f"Describe how to cook a {dish} in {minutes} minutes with these ingredients."
    return instruction, ", ".join(goods), "\n".join(lines)


def _story(rng: random.Random) -> Task:
    hero, friend = rng.sample(NAMES, 2)
    thing = rng.choice(NOUNS)
    how = rng.choice(ADJECTIVES)
    place = rng.choice(PLACES)
    middle = [
        f"The {thing} was {how}, and {hero} had never seen one like it.",
        f"{hero} asked {friend}, who had lived near the {place} for years.",
        f"{friend} looked at the {thing} for a long time and then smiled.",
        f'"Keep it safe," said {friend}, "because it belongs to all of us."',
        f"On the next {rng.choice(DAYS)} the two of them came back together.",
        f"They asked everybody at the {place}, but nobody had lost a {thing}.",
    ]
    count = rng.randint(1, len(middle))
    story = [f"One morning {hero} found a {thing} at the {place}.", *middle[:count]]
    story.append(f"Since that day {hero} and {friend} have been friends.")
    length = "short" if count < 3 else "long"
    return f"Tell a {length} story about {hero}, {friend} and a {how} {thing}.", "", " ".join(story)


TASKS: Final[tuple[Callable[[random.Random], Task], ...]] = (
    _addition, _subtraction, _table, _sort_words, _sort_numbers, _reverse, _count_letters, _spell,
    _compare, _days, _months, _convert, _sequence, _list, _odd_one, _opposite, _sentence, _rewrite,
    _recipe, _story,
)  # fmt: skip


def generate(seed: int, count: int = NUM_RECORDS) -> Iterator[dict[str, str]]:
    """Yield distinct records with the keys ``instruction``, ``input`` and ``output``."""
    rng = random.Random(seed)
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        instruction, given, output = rng.choice(TASKS)(rng)
        if (instruction, given) not in seen:
            seen.add((instruction, given))
            yield {"instruction": instruction, "input": given, "output": output}
