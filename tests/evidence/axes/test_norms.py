"""The norm of all gradients of a model that is cut over two axes, after clipping."""

import numpy as np
import pytest

from rankscope.evidence.axes.root import CLIPPED, NormOverMesh, Squares

LINES = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
"""The ranks along ``tp``; ranks 0 and 2, and 1 and 3, average their gradients."""
LIMIT, ROUNDING = 0.3, 1e-5


def squares_of(step: int) -> dict[int, dict[str, float]]:
    """Return squares of ranks' gradients: of their own, and of what both along tp hold alike."""
    random = np.random.default_rng(step)
    alike = random.uniform(1, 2, size=2)
    return {rank: {"": random.uniform(1, 2), "tp": alike[rank // 2]} for rank in range(4)}


def norm_of(squares: dict[int, dict[str, float]], times: float = 0.5) -> float:
    """Return the norm of the gradients, those that are held alike counted ``times`` on each."""
    return sum(each[""] + times * each["tp"] for each in squares.values()) ** 0.5


CLIPS = {
    "all": lambda squares: LIMIT / norm_of(squares),
    "twice": lambda squares: LIMIT / norm_of(squares, times=1),
    "never": lambda squares: 1.0,
}


def judge(how: str, steps: int = 2 * CLIPPED, **changed: float):
    law = NormOverMesh()
    wrong = None
    for step in range(steps):
        squares = squares_of(step)
        factor = CLIPS[how](squares)
        for rank in (3, 0, 2, 1):
            sums = {name: factor**2 * s for name, s in squares[rank].items()}
            if rank == 1:
                sums["tp"] *= changed.get("tp", 1.0)
            wrong = law.take(rank, step, Squares(rank % 2, 4, sums, ROUNDING), {"tp": LINES[rank]})
    return wrong


def test_a_norm_in_which_replicas_count_twice_is_found():
    wrong = judge("twice")
    assert (wrong.axis, wrong.alone, wrong.steps) == ("tp", False, 2 * CLIPPED)
    assert wrong.norm == pytest.approx(LIMIT)
    assert wrong.spread > 0.01


@pytest.mark.parametrize("how", ["all", "never"])
def test_a_right_norm_and_one_that_is_not_clipped_are_not(how):
    assert judge(how) is None


def test_a_norm_of_one_group_alone_is_found():
    law = NormOverMesh()
    for step in range(CLIPPED):
        squares = {r: {"": s[""]} for r, s in squares_of(step).items()}
        for rank in range(4):
            own = sum(squares[other][""] for other in (rank % 2, rank % 2 + 2))
            sums = {"": squares[rank][""] * LIMIT**2 / own}
            wrong = law.take(rank, step, Squares(rank % 2, 4, sums, ROUNDING), {"tp": LINES[rank]})
    assert wrong.alone
    assert wrong.norm == pytest.approx(LIMIT)
