"""Restore or recompute, by numbers."""

import pytest

from spolia.tiers import Planner


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def planner_at(tokens_per_s: float) -> tuple[Planner, FakeClock]:
    clock = FakeClock()
    planner = Planner(clock)
    for _ in range(20):
        planner.note_step(256, 256 / tokens_per_s)
    return planner, clock


@pytest.mark.parametrize("mb_per_s", [10, 20, 40, 100, 500, 2_000])
def test_what_is_much_sooner_than_computing_is_only_read(mb_per_s):
    planner, _ = planner_at(1_000)
    num_bytes = 4_000 * 23_040
    is_much_sooner = num_bytes / (mb_per_s * 1e6) <= 0.3 * 4.0
    assert planner.is_worth("disk", 4_000, num_bytes, mb_per_s * 1e6) == is_much_sooner


def test_what_is_read_before_one_step_is_over_is_only_read():
    """Both ends cannot meet any sooner."""
    planner, _ = planner_at(1_000)
    planner.step_tokens = 256
    bytes_per_s = 23_040 * 1_000 / 0.5  # reading takes half of computing
    assert planner.is_worth("disk", 500, 500 * 23_040, bytes_per_s)
    assert not planner.is_worth("disk", 600, 600 * 23_040, bytes_per_s)
    assert not planner.is_worth("disk", 100, 100 * 23_040, 23_040 * 900)


@pytest.mark.parametrize(("mb_per_s", "is_worth"), [(0.5, False), (1, False), (1.2, True), (20, True), (2_000, True)])
def test_both_ends_are_worth_while_unless_reading_would_not_be_felt(mb_per_s, is_worth):
    planner, _ = planner_at(1_000)
    assert planner.is_worth_meeting(4_000, 4_000 * 23_040, mb_per_s * 1e6) == is_worth
    assert Planner(FakeClock()).is_worth_meeting(4_000, 4_000 * 23_040, 1.0)
    assert planner.is_worth_meeting(4_000, 4_000 * 23_040, None)


def test_what_is_not_known_is_tried():
    assert Planner(FakeClock()).is_worth("disk", 100, 1 << 30, 1.0)
    planner, _ = planner_at(1_000)
    assert planner.is_worth("disk", 100, 1 << 30, None)


def test_a_tier_that_was_too_slow_is_tried_again_after_a_while():
    planner, clock = planner_at(1_000)
    assert not planner.is_worth("disk", 100, 1 << 30, 1.0)
    clock.now_s += 29
    assert not planner.is_worth("disk", 100, 1 << 30, 1.0)
    clock.now_s += 2
    assert planner.is_worth("disk", 100, 1 << 30, 1.0)
    assert not planner.is_worth("disk", 100, 1 << 30, 1.0)


def test_a_run_may_take_as_long_as_computing_it():
    planner, _ = planner_at(500)
    assert planner.wait_s(1_000) == pytest.approx(2.0)
    assert planner.wait_s(1) == pytest.approx(0.1)


def test_a_tier_that_was_never_read_may_take_a_tenth_of_computing_all():
    planner, _ = planner_at(500)
    assert planner.first_wait_s(2_000) == pytest.approx(0.4)
    assert planner.first_wait_s(16) == pytest.approx(0.03)
    assert Planner(FakeClock()).first_wait_s(2_000) == pytest.approx(2.0)


def test_generating_answers_does_not_look_like_computing_prompts():
    planner, _ = planner_at(1_000)
    planner.note_step(1, 0.005)
    assert planner.wait_s(1_000) == pytest.approx(1.0)
