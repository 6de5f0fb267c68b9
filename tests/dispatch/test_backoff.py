"""Pauses double up to a bound, and end with the wait (R-R7)."""

from __future__ import annotations

import random
import time

import pytest

from dispatch.backoff import Backoff


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


def test_pauses_double_until_the_wait_is_over__R_R7(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    backoff = Backoff(10.0, first=0.5)
    ends = []
    while backoff.pause():
        ends.append(clock.now)
    assert ends == [0.5, 1.5, 3.5, 5.5, 7.5, 9.5]


def test_two_that_wait_for_each_other_part__R_R7(clock: Clock) -> None:
    pauses = set()
    for _ in range(50):
        began = clock.now
        assert Backoff(10.0, first=0.5).pause()
        pauses.add(clock.now - began)
    assert 0.25 <= min(pauses) < 0.3 < 0.45 < max(pauses) <= 0.5
