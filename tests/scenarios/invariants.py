"""What must hold of the rows that a fleet leaves, whatever was done to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, LiteralString

from scenarios import ledger
from scenarios.fleet import Fleet

STOP_SECONDS = 1.0
"""How long code may go on after its process was thawed, before it hears that it was fenced."""

# Each finds what must not be. The first column names it.
_NEVER: Mapping[str, LiteralString] = {
    "a run is still active": """
        select id, job_name, status, attempt from job_run where finished_at is null""",
    "an attempt has two replacements (R-R2)": """
        select previous_run_id, count(*) from job_run where previous_run_id is not null
        group by 1 having count(*) > 1""",
    "RETRY_SCHEDULED without its replacement (R-R1)": """
        select r.id, r.job_name from job_run r where r.status = 'RETRY_SCHEDULED'
          and not exists (select from job_run n where n.previous_run_id = r.id)""",
    "an attempt replaces one that is not RETRY_SCHEDULED": """
        select n.id, r.status from job_run n join job_run r on r.id = n.previous_run_id
        where r.status <> 'RETRY_SCHEDULED'""",
    "a lineage has two last attempts": """
        select r.root_run_id, count(*) from job_run r
        where not exists (select from job_run n where n.previous_run_id = r.id)
        group by 1 having count(*) > 1""",
    "a fence does not rise along its lineage (R-C6)": """
        select n.id, r.fence, n.fence from job_run n join job_run r on r.id = n.previous_run_id
        where n.fence <= r.fence""",
    "two runs share a fence (R-C6)": """
        select fence, count(*) from job_run where fence is not null
        group by 1 having count(*) > 1""",
    "an attempt began before the one that it replaces had ended (R-C7)": """
        select n.id, r.finished_at, n.started_at
        from job_run n join job_run r on r.id = n.previous_run_id
        where n.started_at < r.finished_at""",
    "two runs of a job that runs one at a time were held at once (R-T6)": """
        select a.id, b.id, a.job_name from job_run a join job_run b
          on b.job_id = a.job_id and b.id <> a.id and a.exclusive and b.exclusive
          and a.started_at <= b.started_at and b.started_at < a.finished_at""",
    "a concurrency slot was held twice at once (R-C8)": """
        select a.id, b.id, a.slot_key, a.slot_no from job_run a join job_run b
          on b.slot_key = a.slot_key and b.slot_no = a.slot_no and b.id <> a.id
          and a.started_at <= b.started_at and b.started_at < a.finished_at""",
    "an end has not exactly one audit record (R-X4)": """
        select r.id, r.status, count(e.id) from job_run r
        left join audit_event e on e.run_id = r.id and (
          e.action = 'run.finish' or e.action = 'run.cancel' and e.outcome = 'CANCELLED')
        where r.finished_at is not null
        group by r.id having count(e.id) <> 1""",
    "an audit record tells another end than the row (R-X4)": """
        select r.id, r.status, e.outcome from job_run r
        join audit_event e on e.run_id = r.id and e.action = 'run.finish'
        where e.outcome <> r.status and not (e.outcome = 'FAILED' and r.status = 'RETRY_SCHEDULED'
          and exists (select from audit_event a join job_run n on n.id = a.run_id
            where n.previous_run_id = r.id and a.action = 'run.retry'))""",
    "a trigger has not exactly one audit record (R-X4)": """
        select r.id, count(e.id) from job_run r
        left join audit_event e on e.run_id = r.id and e.action = 'run.trigger'
        where r.previous_run_id is null
        group by r.id having count(e.id) <> 1""",
    "a cancelled run was not asked to cancel, or the reverse (R-F4)": """
        select id, status, cancel_requested_at from job_run
        where (status = 'CANCELLED') <> (cancel_requested_at is not null)""",
    "a run gave up before its last attempt, though its policy retries": """
        select r.id, r.job_name, r.attempt, r.error_code from job_run r
        where r.status = 'FAILED' and r.attempt < r.max_attempts
          and r.error_code not in ('permanent', 'no_handler')
          and coalesce((r.job_snapshot->'definition'->'retry'->>'on_failure')::boolean, true)
          and coalesce(r.job_snapshot->'definition'->>'mode', '') <> 'complete'""",
    "an attempt passes its limit": """
        select id, attempt, max_attempts from job_run where attempt > max_attempts""",
    "a slot of a schedule has no run of its own (R-D1)": """
        select s.schedule_id, s.fire_at, s.run_id from schedule_slot s
        where s.outcome = 'run' and not exists (select from job_run r where r.id = s.run_id
          and r.schedule_id = s.schedule_id and r.scheduled_for = s.fire_at)""",
    "a schedule's run has no slot (R-D1)": """
        select r.id, r.scheduled_for from job_run r
        where r.schedule_id is not null and r.previous_run_id is null
          and not exists (select from schedule_slot s where s.schedule_id = r.schedule_id
            and s.fire_at = r.scheduled_for and s.run_id = r.id)""",
    "two runs of one slot (R-D1)": """
        select schedule_id, scheduled_for, count(*) from job_run
        where schedule_id is not null and previous_run_id is null
        group by 1, 2 having count(*) > 1""",
    "an idempotency key has more runs than its own (R-T5)": """
        select k.key, count(distinct r.root_run_id) from trigger_key k join job_run r
          on r.job_id = k.job_id and r.params->>'key' = k.key
        group by 1 having count(distinct r.root_run_id) > 1""",
    "a watermark moved backwards (R-F3)": """
        select job_id, before, after from scenario_watermark
        where before is not null and (after is null or after::numeric < before::numeric)""",
    "a run committed a watermark without success (R-F3)": """
        select id, status from job_run
        where committed_watermark is not null and status <> 'SUCCEEDED'""",
}

WATCH_WATERMARKS = """
create table scenario_watermark (
  seq bigint generated always as identity, job_id uuid, before text, after text);
create function scenario_watermark() returns trigger language plpgsql as $$
begin
  insert into scenario_watermark (job_id, before, after)
    values (new.id, old.watermark, new.watermark);
  return null;
end $$;
create trigger scenario_watermark after update on job for each row
  when (old.watermark is distinct from new.watermark) execute function scenario_watermark();
"""

# The log of every fence that a transaction of the sink passed, with the transaction's own number.
WATCH_FENCES = """
create table scenario_fence (seq bigint generated always as identity, scope text, fence bigint);
create function scenario_fence() returns trigger language plpgsql as $$
begin
  insert into scenario_fence (scope, fence) values (new.scope, new.fence);
  return null;
end $$;
create trigger scenario_fence after insert or update on claimcheck_fence
  for each row when (new.fence >= 0) execute function scenario_fence();
"""

_STALE_SINK = """
select scope, fence, since from (
  select scope, fence,
    max(fence) over (partition by scope order by pg_xact_commit_timestamp(xmin), seq
      rows between unbounded preceding and 1 preceding) as since
  from scenario_fence) found
where fence < since
"""
_STALE_LEDGER = """
select root_run_id, fence, since from (
  select root_run_id, fence,
    max(fence) over (partition by root_run_id order by pg_xact_commit_timestamp(xmin), seq
      rows between unbounded preceding and 1 preceding) as since
  from entry) found
where fence < since
"""


@dataclass
class Accepted:
    """What the callers were told: the ids of runs, by what was asked for."""

    runs: list[str] = field(default_factory=list)
    rolled_back: list[str] = field(default_factory=list)
    by_key: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    cancelled: list[str] = field(default_factory=list)
    chains: list[list[str]] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    """What ``get`` returned or raised, by the run's id."""


def breaches(fleet: Fleet, accepted: Accepted) -> list[str]:
    """Everything that does not hold, in words; nothing must be active any more."""
    found: list[str] = []

    def add(what: str, rows: Iterable[Mapping[str, Any]]) -> None:
        found.extend(f"{what}: {_shown(row)}" for row in list(rows)[:5])

    for what, query in _NEVER.items():
        add(what, fleet.rows(query))
    add("a stale attempt wrote to the ledger (R-F5)", fleet.rows(_STALE_LEDGER, database="ledger"))
    if fleet.rows("select to_regclass('scenario_fence') as there", database="sink")[0]["there"]:
        add("a stale attempt wrote to the sink (R-F5)", fleet.rows(_STALE_SINK, database="sink"))
    found += _of_callers(fleet, accepted)
    found += _of_effects(fleet)
    found += _of_slots(fleet)
    found += _of_traces(fleet)
    found += _of_logs(fleet)
    return found


def _shown(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items())


def _of_callers(fleet: Fleet, accepted: Accepted) -> list[str]:
    """Every id that a caller was given leads to one lineage; a rolled back one to none (R-T2)."""
    known = {
        str(row["id"]): str(row["root"])
        for row in fleet.rows(
            """select id, root_run_id as root from job_run
               union all select a.id, r.root_run_id from run_alias a
                 join job_run r on r.id = a.run_id"""
        )
    }
    found = [f"an accepted run is lost (R-T1): {run}" for run in accepted.runs if run not in known]
    found += [
        f"a rolled back run is there (R-T2): {run}" for run in accepted.rolled_back if run in known
    ]
    for (job, key), runs in accepted.by_key.items():
        roots = {known.get(run, "lost") for run in runs}
        if len(roots) > 1:
            found.append(f"one key, several runs (R-T5): {job} {key} {roots}")
    ends = {
        str(row["root"]): row["status"]
        for row in fleet.rows(
            """select r.root_run_id as root, r.status from job_run r
               where not exists (select from job_run n where n.previous_run_id = r.id)"""
        )
    }
    for chain in accepted.chains:
        for before, after in pairwise(chain):
            end = ends.get(known.get(before, ""))
            if (after in known) != (end == "SUCCEEDED"):
                is_there = "is there" if after in known else "is missing"
                found.append(f"step {after} of a chain {is_there}, after {before} ended as {end}")
    found += _of_results(fleet, accepted, known, ends)
    for run in accepted.cancelled:
        if ends.get(known.get(run, "")) != "CANCELLED":
            end = ends.get(known.get(run, ""))
            found.append(f"an accepted cancel did not win (R-F4): {run} ended as {end}")
    return found


def _of_results(
    fleet: Fleet, accepted: Accepted, known: Mapping[str, str], ends: Mapping[str, str]
) -> list[str]:
    """What a caller's ``get`` told is how the run's lineage stands in the end.

    A FAILED run may have been retried by hand since.
    """
    results = {
        str(row["root"]): row["result"]
        for row in fleet.rows(
            "select root_run_id as root, result from job_run where status = 'SUCCEEDED'"
        )
    }
    found = []
    for run, told in accepted.results:
        root = known.get(run, "")
        if told == "TaskRevokedError":
            right = ends.get(root) == "CANCELLED"
        elif isinstance(told, str):
            right = told == "TimeoutError" or told == "RunFailed"
        else:
            right = told == results.get(root)
        if not right:
            found.append(f"get of {run} told {told}, and it ended as {ends.get(root)}")
    return found


def _of_effects(fleet: Fleet) -> list[str]:
    """A success had its effect in that very attempt, and nothing came after it in its lineage."""
    effects = {
        (str(row["run_id"]), row["fence"])
        for row in fleet.rows(
            "select run_id, fence from entry where what = 'effect'", database="ledger"
        )
    }
    last: dict[str, int] = {
        str(row["root"]): row["fence"]
        for row in fleet.rows(
            "select root_run_id as root, max(fence) as fence from entry group by 1",
            database="ledger",
        )
    }
    found = []
    for row in fleet.rows(
        """select id, root_run_id, fence, attempt, result from job_run
           where status = 'SUCCEEDED' and job_snapshot->>'handler' in ('work', 'deaf')"""
    ):
        told = {"run": str(row["id"]), "attempt": row["attempt"], "fence": row["fence"]}
        if (str(row["id"]), row["fence"]) not in effects:
            found.append(f"a success without its effect (R-F1): {row['id']}")
        if row["result"] != told:
            found.append(f"a success with another attempt's result: {row['id']} {row['result']}")
        if last.get(str(row["root_run_id"])) != row["fence"]:
            found.append(f"something ran after a success of its lineage: {row['root_run_id']}")
    return found


def _of_slots(fleet: Fleet) -> list[str]:
    """Of a schedule of every N seconds each slot is settled, or counted in one that says so."""
    found = []
    for row in fleet.rows(
        """select s.name, s.every_seconds, s.anchor_at, s.next_fire_at, t.fire_at, t.reason,
             lead(t.fire_at) over (partition by s.id order by t.fire_at) as following
           from job_schedule s join schedule_slot t on t.schedule_id = s.id
           where s.every_seconds is not null"""
    ):
        following = row["following"] or row["next_fire_at"]
        if following is None:
            continue  # the last slot of a disabled schedule
        passed = round((following - row["fire_at"]).total_seconds() / row["every_seconds"])
        if passed < 1:
            found.append(f"a schedule's slots overlap (R-D1): {_shown(row)}")
    return found


def _of_traces(fleet: Fleet) -> list[str]:
    """Code of an attempt had stopped when the next one of its lineage or its job began (R-L3).

    Where its process was frozen it may go on for a moment after that, to hear that it was fenced.
    Code that heeds nothing is stopped with its process, and so not in a pool of threads.
    """
    parents = {started.pid for member in fleet.members.values() for started in member.starts}
    frozen: dict[int, list[float]] = defaultdict(list)
    for event in fleet.events:
        for pid in event.get("thawed", ()):
            frozen[pid].append(event["at"])
    one_at_a_time = {
        row["name"] for row in fleet.rows("select name from job where overlap <> 'allow'")
    }
    groups: dict[str, list[ledger.Stretch]] = defaultdict(list)
    for stretch in ledger.stretches(fleet.trace):
        if stretch.job == "deaf" and stretch.pid in parents:
            continue
        groups[stretch.job if stretch.job in one_at_a_time else stretch.root].append(stretch)
    found = []
    for group in groups.values():
        group.sort(key=lambda stretch: stretch.fence)
        for before, after in pairwise(group):
            late = before.last - after.first
            thawed = [at for at in frozen[before.pid] if at >= before.first]
            allowed = max((at + STOP_SECONDS - after.first for at in thawed), default=0.0)
            if late > max(0.0, allowed):
                found.append(
                    f"code of run {before.run} ({before.job}, fence {before.fence}) ran on for "
                    f"{late:.2f} s after fence {after.fence} had begun (R-L3)"
                )
    return found


_ALARMS = re.compile(
    r"deadlock detected|the sweep's part|cannot be recovered|the heartbeat failed|check constraint"
    r"|the beat's (sweep|statement) failed|could not be started|Task was destroyed"
)
# What Celery says of a broker that is away, or of a child that was killed.
_EXPECTED = re.compile(
    r"^redis\.|^kombu\.exceptions\.OperationalError|WorkerLostError|^Connection\w*Error"
    r"|^BrokenPipeError|^billiard\.einfo|^OSError|^TimeoutError: timed out"
    r"|^celery\.exceptions\.WorkerShutdown"
    # Celery's own slip in closing a consumer whose connection broke; it goes on.
    r"|^AttributeError: 'NoneType' object has no attribute 'connection_errors'"
)


def _of_logs(fleet: Fleet) -> list[str]:
    """No error that the design rules out and no unforeseen traceback, in any process's log."""
    found = []
    for log in sorted(fleet.folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        found += [f"{log.name}: {line}"[:400] for line in lines if _ALARMS.search(line)]
        for number, line in enumerate(lines):
            if not line.startswith("Traceback"):
                continue
            before = lines[number - 1] if number else ""
            error = next(
                (text for text in lines[number + 1 :] if text and not text.startswith(" ")), ""
            )
            if "the run failed" not in before and not _EXPECTED.search(error):
                found.append(f"{log.name}:{number}: {before} ... {error}"[:600])
    return found[:20]
