"""Pauses double up to a bound, and end with the wait (R-R7)."""

from __future__ import annotations

import time

import pytest

from dispatch.backoff import Backoff


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pauses_double_until_the_wait_is_over__R_R7(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    backoff = Backoff(10.0, first=0.5)
    ends = []
    while backoff.pause():
        ends.append(clock.now)
    assert ends == [0.5, 1.5, 3.5, 5.5, 7.5, 9.5]
