"""Every version applied up from the base on a populated database ends at the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import conninfo
from sqlalchemy import Engine, text

from alembic import command
from db import migrations, session
from db.models import Base

POPULATIONS = Path(__file__).parent / "populations"


@pytest.fixture
def engine(empty_database: str) -> Iterator[Engine]:
    made = sqlalchemy.create_engine(
        "postgresql+psycopg://", connect_args=conninfo.conninfo_to_dict(empty_database)
    )
    yield made
    made.dispose()


def versions() -> list[str]:
    scripts = ScriptDirectory(str(migrations.SCRIPTS))
    return [script.revision for script in reversed(list(scripts.walk_revisions()))]


def differences(engine: Engine) -> list[object]:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        return list(compare_metadata(context, Base.metadata))


def untold(engine: Engine) -> list[str]:
    """What the models do not tell: the functions and triggers, as the server holds them."""
    with engine.connect() as connection:
        found = connection.execute(
            text(
                """select pg_get_functiondef(p.oid) from pg_proc p
                   where p.pronamespace = current_schema()::regnamespace
                   union all
                   select pg_get_triggerdef(t.oid) from pg_trigger t where not t.tgisinternal
                   order by 1"""
            )
        )
        return list(found.scalars())


@pytest.mark.parametrize("version", versions())
def test_upgrade_from_each_version_on_a_populated_database(engine: Engine, version: str) -> None:
    migrations.upgrade(engine, version)
    with engine.begin() as connection:
        driver = connection.connection.driver_connection
        driver.execute((POPULATIONS / f"{version}.sql").read_text())
        before = connection.execute(
            text("select id, status, job_name from job_run order by id")
        ).all()
    assert len(before) >= 7  # each state once

    assert migrations.upgrade(engine).is_current

    with engine.connect() as connection:
        after = connection.execute(
            text("select id, status, job_name from job_run order by id")
        ).all()
    assert after == before
    assert differences(engine) == []


def step_back(engine: Engine, version: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations.SCRIPTS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, version)
    assert migrations.status(engine).current == version


@pytest.mark.parametrize("version", versions()[:-1])
def test_a_step_back_and_up_again_ends_at_the_models(engine: Engine, version: str) -> None:
    migrations.upgrade(engine)
    newest = untold(engine)
    step_back(engine, version)
    # What a step forward makes it would not make twice.
    assert migrations.upgrade(engine).is_current
    assert differences(engine) == []
    assert untold(engine) == newest


def test_a_lost_step_of_a_chain_is_still_told_of__R_X4(engine: Engine) -> None:
    def outcomes() -> list[str]:
        with engine.connect() as connection:
            return list(
                connection.execute(text("select outcome from audit_event order by id")).scalars()
            )

    migrations.upgrade(engine, "0003")
    with engine.begin() as connection:
        for action, outcome in (("run.trigger", "refused"), ("run.trigger", "created")):
            connection.execute(
                text(
                    """insert into audit_event (actor, action, subject_type, subject, outcome)
                       values ('chain', :action, 'run', 'load', :outcome)"""
                ),
                {"action": action, "outcome": outcome},
            )
    migrations.upgrade(engine)
    assert outcomes() == ["lost", "created"]
    step_back(engine, "0003")
    assert outcomes() == ["refused", "created"]


def test_a_model_that_drifts_from_the_migrations_is_seen(engine: Engine) -> None:
    migrations.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("alter table job_run drop column triggered_by"))
        connection.execute(text("drop index job_run_lease"))
    assert len(differences(engine)) == 2


def test_an_empty_database_is_refused_with_the_way_out(engine: Engine) -> None:
    with pytest.raises(migrations.MigrationMissing, match=r"DATABASE_URL.*db upgrade"):
        migrations.require_current(engine)
    migrations.upgrade(engine)
    migrations.require_current(engine)


def test_upgrading_again_changes_nothing(engine: Engine) -> None:
    first = migrations.upgrade(engine)
    assert migrations.upgrade(engine) == first


def test_the_newest_version_is_the_one_that_alembic_finds() -> None:
    assert migrations.head() == versions()[-1]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_upgrade_outlasts_the_deadlines_of_other_statements(
    empty_database: str,
    configure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
) -> None:
    monkeypatch.setattr(session, "STATEMENT_SECONDS", 0.3)
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setitem(session._SESSION, "statement_timeout", 300)
    monkeypatch.setitem(session._SESSION, "lock_timeout", 100)
    apply = command.upgrade

    def take_long(config: Config, revision: str) -> None:
        connection = config.attributes["connection"]
        assert connection.scalar(text("select current_setting('lock_timeout')")) == "100ms"
        connection.execute(text("select pg_sleep(1)"))
        apply(config, revision)

    monkeypatch.setattr(command, "upgrade", take_long)
    configure(DATABASE_URL=empty_database, REDIS_URL="redis://127.0.0.1:1/0")
    session.dispose()
    try:
        engine = session.engine()
        with ThreadPoolExecutor(processes) as pool:
            found = [pool.submit(migrations.upgrade, engine) for _ in range(processes)]
        # The second waited for the first all the while, and found it done.
        assert [one.result().is_current for one in found] == [True] * processes
    finally:
        session.dispose()
