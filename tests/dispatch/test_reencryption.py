"""Rotation of keys over a history of any length: piece by piece, and nothing left out (R-X3)."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest
from run_support import Rows, finish, new_job
from worker_support import KEYRING, Claimer, new_datasource, new_run

from db.keyring import Keyring
from dispatch import reencryption

ROTATED = Keyring("v2", {"v1": KEYRING.key("v1"), "v2": bytes(range(1, 33))})


@pytest.fixture
def claimer(rows: Rows) -> Iterator[Claimer]:
    made = Claimer()
    yield made
    made.close()


def test_a_history_is_counted_and_rewrapped_piece_by_piece__R_X3(
    rows: Rows, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reencryption, "BATCH", 2)
    monkeypatch.setattr(reencryption, "COUNTED", 2)
    shop = new_datasource(rows, "shop")
    job = new_job(rows, "orders", "allow", source_id=shop, sink_id=shop)
    # The first and the last id that there can be are looked at too.
    ends = [UUID(int=0), UUID(int=2**128 - 1)]
    for run_id in [*ends, *(uuid4() for _ in range(4))]:
        assert claimer.directed(new_run(rows, job, id=run_id)) is not None
        finish(rows, run_id)
    held = new_run(rows, job)
    assert claimer.directed(held) is not None
    new_run(rows, job)
    assert reencryption.versions_in_use() == {"v1": {"datasources": 1, "snapshots": 14}}

    changed = [reencryption.reencrypt(ROTATED, actor="me", limit=1) for _ in range(3)]
    assert [(one.datasources, one.snapshots, one.complete) for one in changed] == [
        (1, 0, False),
        (0, 2, False),
        (0, 2, False),
    ]
    last = reencryption.reencrypt(ROTATED, actor="me")
    assert (last.datasources, last.snapshots, last.complete) == (0, 8, True)
    assert reencryption.versions_in_use() == {
        "v1": {"datasources": 0, "snapshots": 2},
        "v2": {"datasources": 1, "snapshots": 12},
    }
    assert rows("select id from job_run where source_snapshot->>'key_version' = 'v1'") == [
        {"id": held}
    ]
