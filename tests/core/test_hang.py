"""Who holds up whom, from beats made by hand."""

from dataclasses import replace

from rankscope.core.hang import STOPPED, Beat, compare_beats


def beat(rank, step, passes=1, phase="forward", count=9):
    return Beat(rank, count, 1e9, step, passes, phase, 1e9 - 60)


def compare(*beats, num_workers=None, own=0):
    """Compare beats of ranks that have all written since the earlier look."""
    now = {b.rank: b for b in beats}
    earlier = {rank: replace(b, count=b.count - 3) for rank, b in now.items()}
    return compare_beats(now[own], 125.0, earlier, now, num_workers or len(beats))


def test_the_rank_in_an_earlier_step_is_behind():
    report = compare(beat(0, 7), beat(1, 6, 2, "backward"), beat(2, 7))
    assert report.suspects == (1,)
    assert report.behind[0].rank == 1
    text = str(report)
    assert "step 7 has not ended for 125 s" in text
    assert "behind the others: rank 1, in the backward pass of step 6 since" in text


def test_within_a_step_the_number_of_passes_tells():
    micro = [beat(0, 7, 4, "backward"), beat(1, 7, 2, "backward"), beat(2, 7, 3, "forward")]
    assert compare(*micro).suspects == (1,)


def test_ranks_that_are_level_are_not_accused():
    report = compare(*(beat(rank, 7) for rank in range(3)))
    assert report.suspects == ()
    assert "all ranks are as far as this one" in str(report)


def test_a_rank_that_writes_no_more_is_silent_wherever_it_was():
    now = {rank: beat(rank, 7) for rank in range(3)}
    earlier = {0: beat(0, 7, count=6), 1: beat(1, 7, count=9), 2: beat(2, 7, count=6)}
    report = compare_beats(now[0], 125.0, earlier, now, 3)
    assert [b.rank for b in report.silent] == [1]
    assert report.behind == ()
    assert "dead or frozen, without a sign of life: rank 1" in str(report)


def test_a_rank_that_only_just_began_to_write_is_not_silent():
    now = {0: beat(0, 7), 1: beat(1, 7, count=1)}
    assert compare_beats(now[0], 125.0, {0: beat(0, 7, count=6)}, now, 2).suspects == ()


def test_a_rank_that_ended_early_is_named_and_one_that_ended_in_time_is_not():
    report = compare(beat(0, 7), beat(1, 5, 3, STOPPED), beat(2, 7, 1, STOPPED))
    assert report.suspects == (1,)
    assert "rank 1, not watched any more, after step 5" in str(report)


def test_a_rank_that_never_wrote_is_missing():
    report = compare(beat(0, 7), beat(2, 7), num_workers=4)
    assert report.missing == report.suspects == (1, 3)
    assert "never heard of: ranks [1, 3]" in str(report)


def test_a_rank_may_find_itself_behind():
    assert compare(beat(0, 6), beat(1, 7)).suspects == (0,)


def test_many_ranks_are_counted_not_listed():
    report = compare(beat(0, 7), *(beat(rank, 6) for rank in range(1, 12)))
    assert len(report.suspects) == 11
    assert "and 3 more" in str(report)


def test_recovery_is_told_in_one_sentence():
    report = replace(compare(beat(0, 7), beat(1, 6)), recovered=True)
    assert str(report) == "step 7 has ended after 125 s; training goes on"


def test_beats_survive_the_store():
    before = beat(3, 7, 2, "backward")
    assert Beat.from_bytes(3, before.to_bytes()) == before
