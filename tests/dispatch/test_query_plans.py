"""The plans of the hot statements, on a large table and on one that was empty when they were made.

R-C3, R-C4: index and buffers of each, with the plan that a connection keeps (db.link.POINT_PLANS).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from run_support import Rows, new_job
from worker_support import Claimer, new_datasource

from db import link, session, statements
from dispatch.claims import DEEP_WINDOW, PRIORITIES, TRIES, WINDOW
from dispatch.finalization import WATERMARK_BASIS

FINISHED, WAITING, HELD = 100_000, 20_000, 200
CLAIMS, FINISH, LEASES, CANCEL, LINEAGE, KEYS = (
    statements.load(name) for name in ("claims", "finish", "leases", "cancel", "lineage", "keys")
)


class Table:
    """A control database with jobs that share two datasources, and the plans on it."""

    def __init__(self, rows: Rows, database: str) -> None:
        self.rows = rows
        self.database = database
        a, b = new_datasource(rows, "a"), new_datasource(rows, "b")
        rows("insert into concurrency_key (key, max) values ('shared', 8)")
        definition = {"text": "x" * 1000}
        self.jobs = [
            new_job(rows, f"job{n}", "allow", definition=definition, source_id=a, sink_id=b,
                    concurrency_key="shared" if n % 2 else None)
            for n in range(20)
        ]  # fmt: skip
        self.blocked = new_job(rows, "blocked", "queue", enabled=False)
        self.connection = session.connect("plans", planner=link.POINT_PLANS)
        self.prepared: dict[str, tuple[str, list[str]]] = {}

    def close(self) -> None:
        self.connection.close()

    def fill(self, finished: int = FINISHED, waiting: int = WAITING, held: int = HELD) -> None:
        """Finished, waiting and held runs over all jobs; a third waits first, and is blocked."""
        # Past the guards and without an ALTER TABLE, which would have the kept plans made anew.
        with psycopg.connect(self.database, autocommit=True) as connection:
            connection.execute("set session_replication_role = replica")
            for status, count in (("SUCCEEDED", finished), ("RUNNING", held), ("PENDING", waiting)):
                connection.execute(
                    """insert into job_run (id, job_id, job_name, root_run_id, max_attempts, status,
                         queue, priority, available_at, created_at, lease_token, lease_until,
                         heartbeat_at, executor, fence, started_at, job_snapshot,
                         datasources_resolved_at, finished_at)
                       select id, case when %(status)s = 'PENDING' and n %% 3 = 0 then %(blocked)s
                           else (%(jobs)s::uuid[])[1 + n %% 20] end, 'job', id, 3, %(status)s,
                         'runs', 0,
                         now() - interval '1 day' * case when n %% 3 = 0 then 2 else 1 end
                           + n * interval '1 ms', now(),
                         case when held then gen_random_uuid() end,
                         case when held then now() + interval '1 hour' + n * interval '1 s' end,
                         case when held then now() end, case when held then 'host:1:n:' || n end,
                         case when held then n end, case when held then now() end,
                         case when held then '{}'::jsonb end, case when held then now() end,
                         case when %(status)s = 'SUCCEEDED' then now() end
                       from (select n, gen_random_uuid() as id, %(status)s <> 'PENDING' as held
                             from generate_series(1, %(count)s) n) made""",
                    {
                        "status": status,
                        "count": count,
                        "jobs": self.jobs,
                        "blocked": self.blocked,
                    },
                )

    def one(self, query: str) -> Any:
        found = self.connection.execute(query).fetchone()  # type: ignore[call-overload]
        return found[0] if found and len(found) == 1 else found

    def prepare(self, name: str, statement: LiteralString) -> None:
        names: list[str] = []

        def number(found: re.Match[str]) -> str:
            if found[1] not in names:
                names.append(found[1])
            return f"${names.index(found[1]) + 1}"

        text = re.sub(r"%\((\w+)\)s", number, statement).replace("%%", "%")
        self.connection.execute(f"prepare {name} as {text}")  # type: ignore[call-overload]
        self.prepared[name] = (name, names)

    def explain(self, name: str, parameters: Mapping[str, Any]) -> Plan:
        """Execute what was prepared, undo it, and tell how it was done.

        Twice, since the first time also reads the catalog.
        """
        self._explain(name, parameters)
        return self._explain(name, parameters)

    def _explain(self, name: str, parameters: Mapping[str, Any]) -> Plan:
        prepared, names = self.prepared[name]
        call = sql.SQL("explain (analyze, buffers, format json) execute {}({})").format(
            sql.Identifier(prepared), sql.SQL(", ").join(sql.Literal(parameters[n]) for n in names)
        )
        # Not by psycopg: it forgets every prepared statement at a rollback.
        self.connection.pgconn.exec_(b"begin")
        found = self.connection.execute(call).fetchone()
        self.connection.pgconn.exec_(b"rollback")
        assert found is not None
        plan = found[0] if isinstance(found[0], list) else json.loads(found[0])
        return Plan(plan[0]["Plan"])


class Plan:
    """What was really executed of a plan."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.buffers = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
        self.nodes = [node for node in self._walk(root) if node.get("Actual Loops")]
        self.text = json.dumps(root, indent=1)

    def _walk(self, node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from self._walk(child)

    @property
    def scans(self) -> set[tuple[str, str]]:
        """Each table that was read, with the index by which it was."""
        return {
            (node["Relation Name"], node.get("Index Name") or node["Node Type"])
            for node in self.nodes
            if "Relation Name" in node and node["Node Type"] not in {"ModifyTable", "Update"}
        }

    def of(self, table: str) -> set[str]:
        return {index for name, index in self.scans if name == table}

    @property
    def removed(self) -> int:
        """How many rows were read and then left out."""
        return sum(
            node.get("Rows Removed by Filter", 0) * node["Actual Loops"]
            for node in self.nodes
            if node.get("Relation Name") == "job_run"
        )


def common(**others: Any) -> dict[str, Any]:
    return {
        "executor": "host:1:nonce:2", "token": uuid4(), "lease_seconds": 60.0,
        "handlers": ["report"], "key_versions": ["v1"], "notify": False, **others,
    }  # fmt: skip


def a_look(**others: Any) -> dict[str, Any]:
    look: dict[str, Any] = {
        "queue": "runs", "priorities": list(PRIORITIES),
        "after_available_at": ["-infinity"] * 10, "after_created_at": ["-infinity"] * 10,
        "after_id": [UUID(int=0)] * 10, "wide": False, "deep": False, "window": WINDOW,
        "tries": TRIES,
    }  # fmt: skip
    return common(**look | others)


def a_finish(run_id: UUID, token: UUID, **others: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "token": token, "actor": "host:1:nonce:2", "status": "SUCCEEDED",
        "error_code": None, "error_message": None, "warning": None, "delay": 0.0, "result": "1",
        "counters": None, "watermark": None, "watermark_type": None,
        "watermark_basis": list(WATERMARK_BASIS), "progress": None,
        "rows_processed": None, "in_transaction": False, **others,
    }  # fmt: skip


@pytest.fixture(params=["made while empty", "made after analyze", "made on old statistics"])
def table(request: pytest.FixtureRequest, rows: Rows, database: str) -> Iterator[Table]:
    """A large table, with plans that were made before it was filled, or after."""
    # Statistics change when the test says so, and not when the server finds the time.
    rows("alter table job_run set (autovacuum_enabled = off)")
    found = Table(rows, database)
    try:
        if request.param == "made while empty":
            rows("vacuum analyze job_run")
            prepare_all(found)
            warm_up(found)
            found.fill()
        else:
            found.fill()
            if request.param == "made after analyze":
                rows("vacuum analyze job_run")
            prepare_all(found)
        yield found
    finally:
        found.close()


def prepare_all(table: Table) -> None:
    for name, statement in {
        **CLAIMS, **FINISH, **LEASES, **CANCEL, **LINEAGE, **KEYS,
    }.items():  # fmt: skip
        table.prepare(name, statement)


def warm_up(table: Table) -> None:
    """Idle claimers and a first run: the plans that a connection keeps are made now."""
    for _ in range(6):
        table.explain("claim_next", a_look())
        table.explain("claim_next", a_look(wide=True))
        table.explain("claim_directed", common(run_id=uuid4()))
        table.explain("wait_for_edit", common(run_id=uuid4()))
        table.explain("renew", renewal(uuid4(), uuid4()))
        table.explain("finish", a_finish(uuid4(), uuid4()))
        table.explain("expired", {"limit": 100, "set_aside": []})
        table.explain("cancel", {"run_id": uuid4(), "actor": "x"})
        for name in LINEAGE:
            table.explain(name, {"run_id": uuid4()})
        table.explain("offer_freed", freed(table))


def renewal(run_id: UUID, token: UUID) -> dict[str, Any]:
    return {
        "run_id": run_id, "token": token, "lease_seconds": 60.0, "progress": '{"done": 1}',
        "rows_processed": 1,
    }  # fmt: skip


def freed(table: Table) -> dict[str, Any]:
    return {"job_id": table.jobs[0], "exclusive": True, "slot_key": "shared", "offered": None}


def held_run(table: Table) -> tuple[UUID, UUID]:
    found = table.one("select id, lease_token from job_run where status = 'RUNNING' limit 1")
    return found[0], found[1]


def check(plan: Plan, scans: Mapping[str, set[str]], buffers: int, removed: int = 0) -> None:
    for name, indexes in scans.items():
        assert plan.of(name) <= indexes, plan.text
    assert plan.buffers <= buffers, f"{plan.buffers} buffers: {plan.text}"
    assert plan.removed <= removed, plan.text


CLAIM_SCANS = {
    "job_run": {"job_run_pkey", "job_run_slot", "job_run_held_of_job"},
    "job": {"job_pkey"},
    "datasource": {"datasource_pkey"},
    "concurrency_key": {"concurrency_key_pkey"},
}


def test_every_hot_statement_reads_few_rows_by_its_index__R_C3__R_C4(table: Table) -> None:
    run_id, token = held_run(table)
    waiting = table.one(
        """select r.id from job_run r join job j on j.id = r.job_id
           where r.status = 'PENDING' and j.name = 'job0' limit 1"""
    )
    check(table.explain("claim_directed", common(run_id=waiting)), CLAIM_SCANS, 150)
    check(table.explain("wait_for_edit", common(run_id=waiting)), CLAIM_SCANS, 100)
    blocked = table.one(
        f"select id from job_run where status = 'PENDING' and job_id = '{table.blocked}' limit 1"  # noqa: S608
    )
    check(table.explain("claim_directed", common(run_id=blocked)), CLAIM_SCANS, 100)
    # A third of the waiting runs stands first and is blocked.
    near = {**CLAIM_SCANS, "job_run": {*CLAIM_SCANS["job_run"], "job_run_claim_order"}}
    check(table.explain("claim_next", a_look()), near, 150)
    past = table.one("select (now() - interval '36 hours')::text")
    check(table.explain("claim_next", a_look(after_available_at=[past] * 10)), near, 600)
    wide = table.explain("claim_next", a_look(wide=True))
    check(
        wide,
        {**CLAIM_SCANS, "job_run": {*CLAIM_SCANS["job_run"], "job_run_pending_of_job"}},
        2_500,
    )
    check(table.explain("renew", renewal(run_id, token)), {"job_run": {"job_run_pkey"}}, 60)
    report = {key: value for key, value in renewal(run_id, token).items() if "lease" not in key}
    check(table.explain("report", report), {"job_run": {"job_run_pkey"}}, 40)
    for ending in ({}, {"status": "RETRY_SCHEDULED", "error_code": "handler_error"}):
        plan = table.explain("finish", a_finish(run_id, token, **ending))
        check(plan, {"job_run": {"job_run_pkey"}, "job": {"job_pkey"}}, 150)
    marked = a_finish(run_id, token, watermark="5", watermark_type="bigint")
    check(table.explain("finish", marked), {"job_run": {"job_run_pkey"}, "job": {"job_pkey"}}, 150)
    check(
        table.explain("finish_by_token", {"run_id": run_id, "token": token, "actor": "host:1:n:5"}),
        {"job_run": {"job_run_pkey", "job_run_one_replacement"}},
        20,
        1,
    )
    check(
        table.explain("expired", {"limit": 100, "set_aside": []}),
        {"job_run": {"job_run_lease"}},
        20,
    )
    check(table.explain("lock_expired", {"run_id": run_id}), {"job_run": {"job_run_pkey"}}, 20, 1)
    check(
        table.explain("cancel", {"run_id": run_id, "actor": "x"}), {"job_run": {"job_run_pkey"}}, 80
    )
    for name in LINEAGE:
        check(
            table.explain(name, {"run_id": run_id}),
            {"job_run": {"job_run_pkey", "job_run_lineage", "job_run_one_replacement"},
             "run_alias": {"run_alias_pkey"}},
            30,
        )  # fmt: skip
    check(
        table.explain("offer_freed", freed(table)),
        {
            "job_run": {
                "job_run_pkey",
                "job_run_pending_of_job",
                "job_run_slot",
                "job_run_held_of_job",
            }
        },
        800,
    )
    check(
        table.explain("claim_by_token", {"executor": "host:1:n:5", "token": token}),
        {"job_run": {"job_run_lease", "job_run_held_of_job", "job_run_pkey"}},
        400,
        HELD,
    )


def test_a_rotation_looks_at_a_batch_of_the_history_at_a_time__R_X3(table: Table) -> None:
    # Nothing is sealed with another key, so that a statement would look for it to the end.
    near = table.one("select id from job_run order by id offset 60000 limit 1")
    for after in (None, near):
        asked = {"after": after, "batch": 200, "current": "v1"}
        check(table.explain("snapshot_versions", asked), {"job_run": {"job_run_pkey"}}, 500, 1)
        check(table.explain("runs_to_rewrap", asked), {"job_run": {"job_run_pkey"}}, 2_000, 201)


def test_a_deep_look_reads_each_waiting_run_once_at_most__R_C3(table: Table) -> None:
    plan = table.explain(
        "claim_next", a_look(wide=True, deep=True, window=DEEP_WINDOW, tries=DEEP_WINDOW)
    )
    assert plan.of("job_run") <= {
        "job_run_pkey", "job_run_slot", "job_run_held_of_job", "job_run_pending_of_job",
    }  # fmt: skip


def test_retention_looks_at_what_it_removes_alone__R_S3(table: Table) -> None:
    """Before all that ended stand the attempts of a lineage that lives on."""
    with psycopg.connect(table.database, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        root = held_run(table)[0]
        connection.execute(
            """insert into job_run (job_id, job_name, previous_run_id, root_run_id, max_attempts,
                 status, queue, priority, finished_at, error_code, lease_token, lease_until,
                 heartbeat_at, executor, fence, started_at, job_snapshot, datasources_resolved_at)
               select job_id, job_name, gen_random_uuid(), id, 3, 'RETRY_SCHEDULED', queue, 0,
                 now() - interval '200 days' + n * interval '1 s', 'snoozed', gen_random_uuid(),
                 now(), now(), executor, n, now(), '{}', now()
               from job_run, generate_series(1, 20000) n where id = %s""",
            (root,),
        )
        connection.execute(
            """update job_run set finished_at = now() - interval '100 days' + i * interval '1 s'
               from (select id, row_number() over () as i from job_run
                     where status = 'SUCCEEDED' limit 150) old where job_run.id = old.id"""
        )
    table.prepare("forget_runs", statements.load("retention")["forget_runs"])
    check(
        table.explain("forget_runs", {"seconds": 90 * 86_400, "batch": 100}),
        {"job_run": {"job_run_ended", "job_run_lineage"}},
        6_000,
    )


def test_a_family_is_looked_up_by_its_parent(table: Table) -> None:
    """Also where most runs are children, and their parents have many."""
    with psycopg.connect(table.database, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute(
            """update job_run r set parent_run_id = given.parent
               from (select c.id, parents.ids[1 + row_number() over () % 20] as parent
                     from job_run c, (select array_agg(id) as ids from (
                       select id from job_run where status = 'RUNNING' limit 20) p) parents
                     where c.status = 'SUCCEEDED') given
               where r.id = given.id"""
        )
        connection.execute("vacuum analyze job_run")
        asked = {"run_id": str(held_run(table)[0]), "names": ["job"]}
        statement = statements.load("children")["have_runs"]
        plan = connection.execute(f"explain {statement}", asked).fetchall()
    text = "\n".join(line for (line,) in plan)
    assert "job_run_children" in text
    assert "Seq Scan on job_run" not in text


def test_a_burst_onto_an_empty_table_costs_a_claim_no_more__R_C3(database: str, rows: Rows) -> None:
    """The cost of the first and of the last claims of a burst, by the rows and pages they touch."""
    rows("alter table job_run set (autovacuum_enabled = off)")
    table = Table(rows, database)
    try:
        rows("update job set concurrency_key = null")
        rows("vacuum analyze job_run")
        table.prepare("claim_next", CLAIMS["claim_next"])
        for _ in range(10):
            table.explain("claim_next", a_look())
        table.fill(finished=0, held=0)
        rows("update job set enabled = true")
        costs = []
        for _ in range(40):
            costs.append(table.explain("claim_next", a_look()).buffers)
            for _ in range(20):
                with table.connection.transaction():
                    literals = a_look()
                    name, names = table.prepared["claim_next"]
                    table.connection.execute(
                        sql.SQL("execute {}({})").format(
                            sql.Identifier(name),
                            sql.SQL(", ").join(sql.Literal(literals[n]) for n in names),
                        )
                    )
        assert max(costs) < 500, costs
        # Taken entries at the head are left behind by the index until a vacuum, a page at a time.
        assert sum(costs[-10:]) < 2 * sum(costs[:10]), costs
    finally:
        table.close()


def test_the_claims_of_a_held_horizon_are_cut_short_by_bounds__R_C3(
    database: str, rows: Rows
) -> None:
    """An idle transaction keeps every taken entry in the index: a bounded look steps over none."""
    rows("alter table job_run set (autovacuum_enabled = off)")
    table = Table(rows, database)
    claimer = Claimer()
    try:
        rows("update job set concurrency_key = null, enabled = true, overlap = 'allow'")
        with psycopg.connect(database) as idle:
            idle.execute("set transaction isolation level repeatable read")
            idle.execute("select count(*) from job_run")
            table.fill(finished=0, held=0, waiting=6_000)
            table.prepare("claim_next", CLAIMS["claim_next"])
            costs = []
            # Past the runs of the one job that stands first, so that both looks see all jobs.
            for count in (2_200, 2_000):
                for _ in range(count):
                    assert claimer.next() is not None
                bounds = claimer.claims._looks["runs"].bounds
                at = [bounds.get(priority) for priority in PRIORITIES]
                bounded = a_look(
                    after_available_at=[b[0].isoformat() if b else "-infinity" for b in at],
                    after_created_at=[b[1].isoformat() if b else "-infinity" for b in at],
                    after_id=[b[2] if b else UUID(int=0) for b in at],
                )
                looks = [table.explain("claim_next", look).buffers for look in (a_look(), bounded)]
                costs.append(looks)
        # Two thousand entries more that are dead and cannot go: the one steps over them.
        grown, bounded_grown = (costs[1][n] - costs[0][n] for n in (0, 1))
        assert bounded_grown < 20 < 50 < grown, costs
    finally:
        claimer.close()
        table.close()
