"""How often alerts are told."""

from __future__ import annotations

from ampscope.capture.record.alerts import RateLimit


def test_a_few_at_once_then_one_in_an_interval_with_the_number_of_those_between() -> None:
    now = [0.0]
    limit = RateLimit(2, 60.0, lambda: now[0])
    assert [limit.admits() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 59.0
    assert limit.admits() is None
    now[0] = 60.0
    assert [limit.admits() for _ in range(2)] == [4, None]
    now[0] = 200.0
    assert limit.admits() == 1
