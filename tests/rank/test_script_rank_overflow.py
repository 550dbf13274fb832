"""Steps that DeepSpeed skips."""

from types import SimpleNamespace

from autotune.rank.script_rank import MOST_SKIPPED, Overflows


def test_a_step_in_which_the_count_rose_was_skipped() -> None:
    engine = SimpleNamespace(skipped_steps=7)  # of a checkpoint
    overflows, seen = Overflows(engine), []
    for count in (7, 8, 9, 9, 10):
        engine.skipped_steps = count
        seen.append(overflows.skipped())
    assert seen == [False, True, True, False, True]
    assert overflows.in_a_row == 1


def test_a_scale_may_be_looked_for_but_not_for_ever() -> None:
    engine = SimpleNamespace(skipped_steps=0, fp16_enabled=lambda: True)
    overflows = Overflows(engine)
    for count in range(1, 34):  # from 2^32, the first of them twice
        engine.skipped_steps = count
        assert overflows.skipped()
    assert not overflows.endless
    for count in range(34, MOST_SKIPPED + 1):
        engine.skipped_steps = count
        overflows.skipped()
    assert "skipped 40 steps in a row, since gradients overflow in fp16" in overflows.endless
    assert "Train in bf16" in overflows.endless
    engine.fp16_enabled = lambda: False
    assert "fp16" not in overflows.endless
    assert "Train in bf16" not in overflows.endless
    assert "since gradients are infinite or NaN" in overflows.endless


def test_an_engine_that_counts_none_skips_none() -> None:
    assert not Overflows(object()).skipped()
