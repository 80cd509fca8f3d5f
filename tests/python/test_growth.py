"""The judgement of the soak, on series whose truth is known."""

import random

import pytest
from growth import judge

COUNT = 300
LEVEL = 100.0
FLOOR = 1.0


def noisy(deviation, seed, shape=lambda share: 0.0):
    """A level with noise, and with what `shape` adds to it from 0 to 1 of the time."""
    chance = random.Random(seed)
    return [LEVEL + chance.gauss(0, deviation) + shape(n / COUNT) for n in range(COUNT)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_flat_and_a_slow_leak_under_it_is_not(seed):
    assert judge(noisy(2.0, seed), FLOOR).is_flat
    # Twice what noise of this size can be forgiven for.
    assert not judge(noisy(2.0, seed, lambda share: 8 * share), FLOOR).is_flat


def test_a_leak_without_noise_is_seen_from_what_is_allowed_on():
    assert judge(noisy(0, 0, lambda share: 1.9 * share), FLOOR).is_flat
    assert not judge(noisy(0, 0, lambda share: 2.3 * share), FLOOR).is_flat
    grown = judge(noisy(0, 0, lambda share: 10 * share), FLOOR).grown
    assert grown == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("at", [0.35, 0.5, 0.65])
def test_a_step_that_stays_is_growth_and_one_back_is_none(at):
    up = judge(noisy(0.3, 1, lambda share: 10.0 * (share > at)), FLOOR)
    assert not up.is_flat
    assert up.grown == pytest.approx(10, abs=1)
    assert judge(noisy(0.3, 1, lambda share: -10.0 * (share > at)), FLOOR).is_flat


def test_many_small_steps_are_growth():
    assert not judge(noisy(0.3, 2, lambda share: float(int(share * 6))), FLOOR).is_flat


@pytest.mark.parametrize("teeth", [20, 33, 60])
def test_a_saw_is_flat_and_one_that_climbs_is_not(teeth):
    saw = lambda share: 20 * (share * teeth % 1)  # noqa: E731
    assert judge(noisy(0.2, 3, saw), FLOOR).is_flat
    assert not judge(noisy(0.2, 3, lambda share: saw(share) + 12 * share), FLOOR).is_flat


def test_peaks_are_flat_and_steady_growth_between_them_is_not():
    peaks = lambda share: 500.0 * (int(share * COUNT) % 10 == 0)  # noqa: E731
    assert judge(noisy(0.2, 4, peaks), FLOOR).is_flat
    assert not judge(noisy(0.2, 4, lambda share: peaks(share) + 4 * share), FLOOR).is_flat


def test_few_things_have_the_floor():
    assert judge([10.0] * 150 + [12.0] * 150, floor=2).is_flat
    assert not judge([10.0] * 150 + [13.0] * 150, floor=2).is_flat
    assert not judge([0.0] * 150 + [3.0] * 150, floor=2).is_flat


def test_too_few_values_are_no_judgement():
    with pytest.raises(ValueError, match="14 values are too few to judge: 15 are needed"):
        judge([1.0] * 14, FLOOR)
