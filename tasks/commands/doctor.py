"""``celery -A tasks doctor``: what is missing for runs to run, and how to mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Literal

import click
from rich.text import Text

from db import migrations, session, settings, statements
from db.failures import first_line
from db.keyring import Keyring
from dispatch import reencryption, watch
from dispatch.handlers import REPLICATE
from dispatch.redaction import redact
from dispatch.waiting import moment
from tasks import handlers, inspection
from tasks.commands import console, control
from tasks.commands.console import Output
from tasks.commands.failures import explain

OLDEST_SERVER = 140000
CLOCK_SECONDS = 5.0
LONG_TRANSACTION_SECONDS = 600.0
INSPECT_SECONDS = 1.0

Verdict = Literal["ok", "warning", "failed"]
_SQL = statements.load("database")
_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}


@dataclass(slots=True)
class Examination:
    """The checks so far; what one of them found, others may use."""

    checks: list[dict[str, str]] = field(default_factory=list)
    database: bool = False
    broker: bool = False
    keyring: Keyring | None = None

    def add(self, name: str, status: Verdict, message: str) -> None:
        self.checks.append({"name": name, "status": status, "message": redact(message)})

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """What goes wrong in the block is this check's finding, and never ends the others."""
        try:
            yield
        except SystemExit as error:
            self.add(name, "failed", str(error).removeprefix("claimcheck: "))
        except Exception as error:
            self.add(name, "failed", explain(error) or first_line(error))


@click.command()
@click.option(
    "--beat-here",
    is_flag=True,
    help="Only whether a beat of this host listens: the health check of its container.",
)
@click.pass_context
@console.command
def doctor(out: Output, ctx: click.Context, beat_here: bool) -> int:
    """Check servers, migration, keyring, handlers, beat and workers; exit 1 where one fails."""
    found = Examination()
    checks: tuple[tuple[str, Callable[[Examination], None]], ...] = (
        ("database", _database),
        ("listen", _listen),
        ("keyring", _keyring),
        ("broker", lambda found: _broker(found, ctx.obj.app)),
        ("handlers", _handlers),
        ("beat", _beat),
        ("workers", lambda found: _workers(found, ctx.obj.app)),
        ("runs", _runs),
        ("transaction", _transactions),
    )
    if beat_here:
        checks = (("database", _database), ("beat", _beat_here))
    with found.of("database"):
        control.require_state()
    # Without a state to look at, the other checks would make one.
    for name, check in checks if not found.checks else ():
        with found.of(name):
            check(found)
    failed = any(check["status"] == "failed" for check in found.checks)
    if out.as_json:
        out.document({"ok": not failed, "checks": found.checks})
    else:
        for finding in found.checks:
            style = _STYLES[finding["status"]]
            line = Text.assemble(
                (f"{finding['status']:<8}", style),
                (f"{finding['name']:<12}", "bold"),
                finding["message"],
            )
            out.results.print(line, soft_wrap=True)
    return 1 if failed else 0


def _database(found: Examination) -> None:
    endpoints = settings.services()
    with session.transaction() as connection:
        row = statements.row(connection, _SQL["server"])
        assert row is not None
        number = session.driver_connection(connection).info.server_version
    skew = (datetime.now(UTC) - row["now"]).total_seconds()
    stands = migrations.status(session.engine())
    if not stands.is_current and endpoints.embedded_database:
        control.require_database()
        stands = migrations.status(session.engine())
    where = "embedded" if endpoints.embedded_database else "given by DATABASE_URL"
    what = f"PostgreSQL {row['server_version']} ({where})"
    if number < OLDEST_SERVER:
        found.add("database", "failed", f"{what} is too old; use 14 or newer")
    elif row["is_standby"]:
        found.add("database", "failed", f"{what} is a standby; point DATABASE_URL at the primary")
    elif not stands.is_current:
        found.add(
            "database",
            "failed",
            f"{what} is at version {stands.current or 'none'}, this code needs {stands.head}: "
            "celery -A tasks db upgrade",
        )
    else:
        found.database = True
        found.add("database", "ok", f"{what}, version {stands.current}")
    if abs(skew) > CLOCK_SECONDS:
        found.add(
            "clock",
            "warning",
            f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the "
            "database's; nothing is decided by it, but log lines do not match",
        )


def _listen(found: Examination) -> None:
    """NOTIFY reaches a listener: a transaction-pooling proxy in between would swallow it."""
    if not found.database:
        return
    listener = session.connect_direct("claimcheck doctor")
    try:
        listener.execute("listen claimcheck_doctor")
        with session.connect("claimcheck doctor") as sender:
            sender.execute("select pg_notify('claimcheck_doctor', '')")
        heard = list(listener.notifies(timeout=2, stop_after=1))
    finally:
        listener.close()
    if not heard:
        found.add(
            "listen",
            "failed",
            "a notification did not arrive: behind a transaction pooler set DATABASE_DIRECT_URL to "
            "the server itself",
        )


def _keyring(found: Examination) -> None:
    found.keyring = control.open_keyring()
    message = f"{found.keyring.path}, current {found.keyring.current}"
    if not found.database:
        found.add("keyring", "ok", message)
        return
    missing = sorted(set(reencryption.versions_in_use()) - set(found.keyring.versions))
    if missing:
        found.add(
            "keyring",
            "failed",
            f"{found.keyring.path} lacks {', '.join(missing)}, which stored envelopes need; "
            "restore it, or set those credentials again: "
            "celery -A tasks apply FILE --replace-unreadable",
        )
    mismatches = reencryption.mismatches(found.keyring)
    for mismatch in mismatches:
        found.add("keyring", "failed", str(mismatch))
    if not missing and not mismatches:
        found.add("keyring", "ok", message)


def _broker(found: Examination, app: Any) -> None:
    endpoints = settings.services()
    where = "embedded" if endpoints.embedded_redis else "given by REDIS_URL"
    try:
        with app.connection_for_read() as connection:
            info = connection.default_channel.client.info("server")
    except Exception as error:
        found.add("broker", "failed", f"REDIS_URL: Redis does not answer: {first_line(error)}")
        return
    found.broker = True
    product = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version")
    old = tuple(int(part) for part in str(info.get("redis_version", "0.0")).split(".")[:2]) < (6, 2)
    if old:
        found.add("broker", "failed", f"{product} {version} is too old; use 6.2 or newer")
    else:
        found.add("broker", "ok", f"{product} {version} ({where})")


def _handlers(found: Examination) -> None:
    known = handlers.load()
    own = [name for name in known if name != REPLICATE]
    message = f"{', '.join(own)}" if own else "the built-in replication"
    if found.database:
        with session.transaction() as connection:
            needed = statements.rows(connection, _SQL["handlers_of_jobs"])
        lacking = [row["handler"] for row in needed if row["handler"] not in known]
        if lacking:
            found.add(
                "handlers",
                "warning",
                f"jobs need {', '.join(lacking)}, not known here: name their modules in "
                "CLAIMCHECK_HANDLERS of the workers",
            )
            return
    found.add("handlers", "ok", message)


def _beat(found: Examination) -> None:
    if not found.database:
        return
    with session.transaction() as connection:
        row = statements.row(connection, _SQL["beats"], {"name": watch.APPLICATION_NAME})
    beats = row["beats"] if row else 0
    if beats:
        found.add("beat", "ok", f"{beats} seen")
    else:
        found.add(
            "beat",
            "failed",
            "none is running: schedules, delays, retries and recovery wait for one; start it with: "
            "celery -A tasks beat",
        )


def _beat_here(found: Examination) -> None:
    if not found.database:
        return
    with session.transaction() as connection:
        row = statements.row(connection, _SQL["beats"], {"name": watch.APPLICATION_NAME})
    if row and row["beats_here"]:
        found.add("beat", "ok", f"{row['beats_here']} on this host")
    else:
        found.add("beat", "failed", "none listens on this host")


def _workers(found: Examination, app: Any) -> None:
    if not found.broker:
        return
    queues = app.control.inspect(timeout=INSPECT_SECONDS).active_queues() or {}
    if not queues:
        found.add("workers", "failed", "none answers; start one with: celery -A tasks worker")
        return
    served = sorted({queue["name"] for named in queues.values() for queue in named})
    found.add(
        "workers", "ok", f"{len(queues)} ({', '.join(sorted(queues))}) on {', '.join(served)}"
    )
    if not found.database:
        return
    with session.transaction() as connection:
        waiting = statements.rows(connection, _SQL["waiting"])
    takers = inspection.ask(app) if waiting else []
    for queue, group in groupby(waiting, lambda row: str(row["queue"])):
        rows = list(group)
        if queue not in served:
            found.add(
                "queue",
                "failed",
                f"{_standing(rows)} in {queue}, which no worker takes from: "
                f"celery -A tasks worker -Q {queue}",
            )
            continue
        serving = [taker for taker in takers if queue in taker.queues]
        for row in rows:
            if not any(t.handlers is None or row["handler"] in t.handlers for t in serving):
                found.add(
                    "handlers",
                    "failed",
                    f"{_standing([row])} in {queue} for the handler {row['handler']}, which no "
                    "worker of that queue knows: name its module in CLAIMCHECK_HANDLERS of one",
                )


def _standing(rows: Sequence[Mapping[str, Any]]) -> str:
    """``3 runs wait since 2026-11-01 08:00:00 +0100``"""
    count = counted(sum(row["runs"] for row in rows), "run waits", "runs wait")
    return f"{count} since {moment(min(row['since'] for row in rows))}"


def _transactions(found: Examination) -> None:
    if not found.database:
        return
    asked = {"seconds": LONG_TRANSACTION_SECONDS}
    with session.transaction() as connection:
        rows = statements.rows(connection, _SQL["long_transactions"], asked)
    for row in rows:
        found.add(
            "transaction",
            "warning",
            f"one of the role {row['role']} is open since {moment(row['since'])} (process "
            f"{row['pid']}, {row['application'] or 'unnamed'}): while it is, dead rows of job_run "
            "stay and claims get slower. Where it is forgotten, end it with: "
            f"select pg_terminate_backend({row['pid']})",
        )


def _runs(found: Examination) -> None:
    if not found.database:
        return
    with session.transaction() as connection:
        row = statements.row(connection, _SQL["health"])
    assert row is not None
    beat = "is a beat running? celery -A tasks beat"
    troubles = {
        "expired_leases": (
            f"run whose lease ran out over a minute ago is not recovered: {beat}",
            f"runs whose lease ran out over a minute ago are not recovered: {beat}",
        ),
        "overdue_schedules": (
            f"schedule is due for over a minute: {beat}",
            f"schedules are due for over a minute: {beat}",
        ),
        "failing_schedules": (
            "schedule cannot be fired; see the beat's log, and: celery -A tasks schedule list",
            "schedules cannot be fired; see the beat's log, and: celery -A tasks schedule list",
        ),
    }
    fine = True
    for key, trouble in troubles.items():
        if row[key]:
            fine = False
            found.add("runs", "warning", counted(row[key], *trouble))
    if fine:
        found.add("runs", "ok", f"{row['running']:,} running, none without an owner")


def counted(count: int, one: str, many: str) -> str:
    """``1 run waits``, ``1,200 runs wait``"""
    return f"{count:,} {one if count == 1 else many}"
