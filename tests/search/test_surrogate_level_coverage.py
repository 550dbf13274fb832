from autotune.problem.knobs import FIRST_ORDER
from autotune.search.surrogate import FirstOrderGroups, LevelCoverage, first_order_key
from tests.conftest import make_candidate

CANDIDATES = [make_candidate(stage, micro) for stage in (0, 1, 3) for micro in (1, 2, 4, 8, 16)]


def test_what_decides_much_is_first_order() -> None:
    assert {"zero_stage", "offload_param"} <= {*FIRST_ORDER}
    assert {"reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"}.isdisjoint(FIRST_ORDER)


def test_kinds_differ_in_first_order_knobs_only() -> None:
    assert first_order_key(make_candidate(2, 4, overlap_comm=True)) == first_order_key(
        make_candidate(2, 4, overlap_comm=False)
    )
    assert first_order_key(make_candidate(2, 4)) != first_order_key(make_candidate(1, 4))


def test_levels_are_unseen_until_one_of_them_was_tried() -> None:
    coverage = LevelCoverage(CANDIDATES)
    assert coverage.uncovered().all()
    coverage.mark(CANDIDATES.index(make_candidate(0, 1)))
    unseen = coverage.uncovered()
    assert not unseen[CANDIDATES.index(make_candidate(0, 1))]
    assert unseen[CANDIDATES.index(make_candidate(0, 16))], "a large micro-batch is another level"
    assert unseen[CANDIDATES.index(make_candidate(3, 1))]
    for candidate in (make_candidate(1, 4), make_candidate(3, 16)):
        coverage.mark(CANDIDATES.index(candidate))
    assert not coverage.uncovered().any()


def test_a_space_without_a_choice_has_its_levels_seen_by_the_first_trial() -> None:
    coverage = LevelCoverage([make_candidate(2, 4, overlap_comm=overlap) for overlap in (True, False)])
    coverage.mark(0)
    assert not coverage.uncovered().any()


def test_what_second_order_knobs_may_gain_is_what_they_have_gained() -> None:
    candidates = [make_candidate(stage, 1, overlap_comm=overlap) for stage in (1, 2, 3) for overlap in (True, False)]
    groups = FirstOrderGroups(candidates)
    before = groups.reach
    groups.note(0, 1.0)
    assert groups.measured.tolist() == [True, True, False, False, False, False]
    assert groups.reach == before, "nothing was turned yet"
    for at, speed in ((1, 1.0), (2, 2.0), (3, 2.0), (4, 1.5), (5, 1.5)):
        groups.note(at, speed)
    assert groups.reach < 0.5 * before, "it was turned three times in vain"
    assert groups.ceiling[2] > groups.ceiling[4] > groups.ceiling[0] > 1.0
