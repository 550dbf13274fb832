from autotune.search.factors import Screen, is_first_order, kind_of
from tests.conftest import make_candidate

CANDIDATES = [make_candidate(stage, micro) for stage in (0, 1, 3) for micro in (1, 2, 4, 8, 16)]


def test_what_decides_much_is_first_order() -> None:
    assert is_first_order("zero_stage")
    assert is_first_order("offload_param")
    assert not is_first_order("reduce_bucket_size")
    assert not is_first_order("zero_optimization.stage3_prefetch_bucket_size")


def test_kinds_differ_in_first_order_knobs_only() -> None:
    assert kind_of(make_candidate(2, 4, overlap_comm=True)) == kind_of(make_candidate(2, 4, overlap_comm=False))
    assert kind_of(make_candidate(2, 4)) != kind_of(make_candidate(1, 4))


def test_levels_are_unseen_until_one_of_them_was_tried() -> None:
    screen = Screen(CANDIDATES)
    assert screen.unseen().all()
    screen.see(CANDIDATES.index(make_candidate(0, 1)))
    unseen = screen.unseen()
    assert not unseen[CANDIDATES.index(make_candidate(0, 1))]
    assert unseen[CANDIDATES.index(make_candidate(0, 16))], "a large micro-batch is another level"
    assert unseen[CANDIDATES.index(make_candidate(3, 1))]
    for candidate in (make_candidate(1, 4), make_candidate(3, 16)):
        screen.see(CANDIDATES.index(candidate))
    assert not screen.unseen().any()


def test_a_space_without_a_choice_has_its_levels_seen_by_the_first_trial() -> None:
    screen = Screen([make_candidate(2, 4, overlap_comm=overlap) for overlap in (True, False)])
    screen.see(0)
    assert not screen.unseen().any()
