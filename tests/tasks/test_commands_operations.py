"""The nouns db, keyring, audit, doctor and prune; and real processes of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands_support import Cli, end
from commands_support import cli as cli
from support.processes import ROOT
from support.waiting import until

from db.envelopes import open_envelope
from db.keyring import Keyring

# db


def test_the_version_is_shown_and_an_upgrade_is_asked_for(
    cli: Cli, rows: Callable[..., Any]
) -> None:
    found = cli("db", "status", "--json").done().json
    assert found["is_current"] is True
    assert found["current"] == found["head"]
    assert cli("db", "upgrade", "--json").done().json == {
        "from": found["head"], "to": found["head"],
    }  # fmt: skip
    rows("drop table alembic_version")
    stands = cli("db", "status", "--json").failed()
    assert (stands.json["current"], stands.json["is_current"]) == (None, False)
    for words in (["run", "list"], ["job", "list"], ["apply", "-"], ["keyring", "status"]):
        answer = cli(*words, "--json", stdin="").failed()
        assert "celery -A tasks db upgrade" in answer.json["error"]


def test_after_a_restore_the_fence_moves_past_what_sinks_saw__R_F5(
    cli: Cli, rows: Callable[..., Any]
) -> None:
    rows("select nextval('fence_seq') from generate_series(1, 41)")
    found = cli("db", "bump-fence", "--by", "1000", "--json").done().json
    assert found == {"next_fence": 1042}
    assert rows("select nextval('fence_seq') as next") == [{"next": 1042}]
    assert rows("select detail->>'fence' as fence from audit_event where action = 'db.bump-fence'"
                ) == [{"fence": "1041"}]  # fmt: skip


# keyring


def test_a_key_is_rotated_without_losing_a_secret__R_X3(
    cli: Cli, rows: Callable[..., Any], environment: dict[str, str]
) -> None:
    url = "postgresql://app:hunter2-s3cret@127.0.0.1:1/x"
    cli("datasource", "add", "shop", "--connector", "postgresql", "--url-env", "U", U=url).done()
    cli("keyring", "add").done()
    before = rows("select envelope from datasource where name = 'shop'")[0]["envelope"]
    status = cli("keyring", "status", "--json").done().json
    assert (status["current"], status["versions"], status["free"]) == ("v1", ["v1", "v2"], ["v2"])
    cli("keyring", "use", "v2").done()
    assert "is needed by 1 datasources" in cli("keyring", "rm", "v1").failed().stderr
    done = cli("keyring", "reencrypt", "--json").done().json
    assert (done["datasources"], done["complete"], done["free"]) == (1, True, ["v1"])
    after = rows("select envelope from datasource where name = 'shop'")[0]["envelope"]
    assert {key for key in after if after[key] != before[key]} == {"key_version", "wrapped_key"}
    again = cli("keyring", "reencrypt", "--json").done().json
    assert (again["datasources"], again["snapshots"]) == (0, 0)
    cli("keyring", "rm", "v1").done()
    keyring = Keyring.load(environment["CLAIMCHECK_KEYRING_FILE"])
    assert keyring.versions == ("v2",)
    (shop,) = rows("select id, envelope from datasource where name = 'shop'")
    assert open_envelope(keyring, shop["id"], shop["envelope"], name="shop") == {"url": url}
    events = rows("select detail from audit_event where action = 'keyring.reencrypt'")
    assert len(events) == 1


@pytest.fixture
def snapshots(cli: Cli, rows: Callable[..., Any]) -> Callable[[str], str]:
    """``snapshots("SUCCEEDED")`` makes a run with a source snapshot, ended so or still held."""
    url = "postgresql://app:hunter2-s3cret@127.0.0.1:1/x"
    cli("datasource", "add", "shop", "--connector", "postgresql", "--url-env", "U", U=url).done()
    cli("job", "add", "report", "--handler", "report", "--overlap", "allow").done()

    def make(status: str) -> str:
        run = str(cli("run", "trigger", "report", "--json").done().json["id"])
        rows(
            "update job_run r set status = 'RUNNING', lease_token = gen_random_uuid(), "
            "lease_until = clock_timestamp() + interval '1 minute', "
            "heartbeat_at = clock_timestamp(), executor = 'e', fence = nextval('fence_seq'), "
            "started_at = clock_timestamp(), job_snapshot = '{}', "
            "datasources_resolved_at = clock_timestamp(), source_snapshot = d.envelope, "
            "source_datasource_id = d.id from datasource d where d.name = 'shop' and r.id = %s",
            run,
        )
        if status != "RUNNING":
            end(rows, run, status)
        return run

    return make


def test_snapshots_are_rewrapped_too_but_not_what_a_claim_holds__R_X3(
    cli: Cli, rows: Callable[..., Any], snapshots: Callable[[str], str]
) -> None:
    ended, held = snapshots("SUCCEEDED"), snapshots("RUNNING")
    cli("keyring", "add", "--use").done()
    first = cli("keyring", "reencrypt", "--limit", "1", "--json").done().json
    assert (first["datasources"], first["snapshots"], first["complete"]) == (1, 0, False)
    second = cli("keyring", "reencrypt", "--json").done().json
    assert (second["datasources"], second["snapshots"], second["complete"]) == (0, 1, False)
    assert second["remaining"] == {"v1": {"datasources": 0, "snapshots": 1}}
    assert second["free"] == []
    assert "snapshots of runs" in cli("keyring", "rm", "v1").failed().stderr
    versions = {
        str(row["id"]): row["version"]
        for row in rows("select id, source_snapshot->>'key_version' as version from job_run")
    }
    assert versions == {ended: "v2", held: "v1"}
    end(rows, held, "FAILED")
    assert cli("keyring", "reencrypt", "--json").done().json["free"] == ["v1"]
    cli("keyring", "rm", "v1").done()


def test_rows_that_another_transaction_holds_are_passed_over__R_X3(
    cli: Cli, database: str, snapshots: Callable[[str], str]
) -> None:
    snapshots("SUCCEEDED")
    cli("keyring", "add", "--use").done()
    with psycopg.connect(database) as claiming:
        claiming.execute("select from datasource where name = 'shop' for share")
        done = cli("keyring", "reencrypt", "--json").done().json
    assert (done["datasources"], done["snapshots"]) == (0, 1)
    assert done["remaining"] == {"v1": {"datasources": 1, "snapshots": 0}}


def test_an_envelope_without_its_key_is_reported_and_stops_nothing__R_X3(
    cli: Cli, environment: dict[str, str], snapshots: Callable[[str], str]
) -> None:
    snapshots("SUCCEEDED")
    Path(environment["CLAIMCHECK_KEYRING_FILE"]).unlink()
    cli("keyring", "init", "--force").done()
    cli("keyring", "add", "--use").done()
    done = cli("keyring", "reencrypt", "--json").failed()
    assert len(done.json["unreadable"]) == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert cli("keyring", "status", "--json").failed().json["missing"] == []


def test_another_key_of_the_same_version_is_told_apart__R_X3(
    cli: Cli, environment: dict[str, str], snapshots: Callable[[str], str]
) -> None:
    path = Path(environment["CLAIMCHECK_KEYRING_FILE"])
    right = path.read_bytes()
    path.unlink()
    refused = cli("keyring", "init").failed().stderr
    assert "holds 1 datasource that a fresh key does not open: copy the keyring file" in refused
    assert not path.exists()
    assert "copy the file from a host that has it" in cli("keyring", "status").failed().stderr
    cli("keyring", "init", "--force").done()
    doctor = cli("doctor", "--json").failed()
    check = {check["name"]: check for check in doctor.json["checks"]}["keyring"]
    assert check["status"] == "failed"
    assert f"the key v1 of {path} is another one than the v1 that sealed shop" in check["message"]
    assert "--replace-unreadable" in check["message"]
    status = cli("keyring", "status", "--json").failed()
    (use,) = status.json["use"]
    assert (use["readable"], use["sealed_with_another_key"]) == (False, ["shop"])
    assert "ANOTHER KEY" in cli("keyring", "status").failed().stdout
    assert "hunter2" not in doctor.stdout + status.stdout + status.stderr
    path.write_bytes(right)
    (use,) = cli("keyring", "status", "--json").done().json["use"]
    assert (use["readable"], use["sealed_with_another_key"]) == (True, [])


def test_a_keyring_can_be_made_where_no_database_can_be_asked(
    cli: Cli,
    configure: Callable[..., Any],
    environment: dict[str, str],
    empty_database: str,
    tmp_path: Path,
) -> None:
    from db import session

    path = tmp_path / "new" / "keyring.json"
    away = {**environment, "CLAIMCHECK_KEYRING_FILE": str(path)}
    configure(**{**away, "DATABASE_URL": "postgresql://app:hunter2@127.0.0.1:1/x"})
    session.dispose()
    answer = cli("keyring", "init").done()
    assert "the control database does not answer" in answer.stderr
    assert "hunter2" not in answer.stderr
    path.unlink()
    configure(**{**away, "DATABASE_URL": empty_database})
    session.dispose()
    assert "does not answer" not in cli("keyring", "init").done().stderr
    path.unlink()
    configure(**{**away, "DATABASE_URL": None, "CLAIMCHECK_HOME": str(tmp_path / "none")})
    session.dispose()
    assert "does not answer" not in cli("keyring", "init").done().stderr
    assert path.exists()
    assert not (tmp_path / "none").exists()


def test_a_missing_key_is_reported__R_X3(
    cli: Cli, environment: dict[str, str], snapshots: Callable[[str], str]
) -> None:
    snapshots("SUCCEEDED")
    path = Path(environment["CLAIMCHECK_KEYRING_FILE"])
    content = json.loads(path.read_text())
    content["keys"] = {"v7": "A" * 43 + "="}
    content["current"] = "v7"
    path.write_text(json.dumps(content))
    status = cli("keyring", "status", "--json").failed()
    assert status.json["missing"] == ["v1"]
    doctor = cli("doctor", "--json").failed().json
    assert "lacks v1" in {check["name"]: check for check in doctor["checks"]}["keyring"]["message"]


@pytest.mark.parametrize(
    "words",
    [("run", "list"), ("job", "list"), ("keyring", "status"), ("db", "status"), ("doctor",)],
)
def test_a_command_that_reads_makes_no_new_database(
    cli: Cli, configure: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    home = tmp_path / "wrong-folder"
    configure(DATABASE_URL=None, CLAIMCHECK_HOME=home, CLAIMCHECK_KEYRING_FILE=None)
    answer = cli(*words).failed()
    said = answer.stdout + answer.stderr
    assert f"there is no embedded database in {home}" in said
    assert "CLAIMCHECK_HOME" in said
    assert not home.exists()


def test_an_existing_keyring_is_never_overwritten(cli: Cli, environment: dict[str, str]) -> None:
    path = Path(environment["CLAIMCHECK_KEYRING_FILE"])
    before = path.read_bytes()
    assert "is not overwritten" in cli("keyring", "init", "--json").failed().json["error"]
    assert path.read_bytes() == before


# audit, prune, doctor


def test_the_audit_is_listed_newest_first_and_filtered__R_X4(cli: Cli) -> None:
    cli("job", "add", "a", "--handler", "x").done()
    cli("job", "add", "b", "--handler", "x").done()
    run = cli("run", "trigger", "a", "--json").json["id"]
    cli("run", "cancel", run).done()
    found = cli("audit", "list", "--json").done().json
    assert [(event["action"], event["subject"]) for event in found] == [
        ("run.cancel", "a"), ("run.trigger", "a"), ("job.add", "b"), ("job.add", "a"),
    ]  # fmt: skip
    assert all(event["actor"].startswith("cli:") for event in found)

    def actions(*words: str) -> list[str]:
        return [event["action"] for event in cli("audit", "list", "--json", *words).done().json]

    assert actions("--action", "run.") == ["run.cancel", "run.trigger"]
    assert actions("--action", "run.cancel") == ["run.cancel"]
    assert actions("--subject", "b") == ["job.add"]
    assert actions("--run", run) == ["run.cancel", "run.trigger"]
    assert actions("-n", "1") == ["run.cancel"]
    assert actions("--since", "2200-01-01") == []
    assert "job.add" in cli("audit", "list").done().stdout


def test_pruning_removes_only_what_has_ended_long_ago__R_S3(
    cli: Cli, rows: Callable[..., Any]
) -> None:
    cli("job", "add", "a", "--handler", "x").done()
    ended, waiting = (cli("run", "trigger", "a", "--json").json["id"] for _ in range(2))
    end(rows, ended, "SUCCEEDED")
    assert cli("prune", "--json").done().json == {"removed": 0}
    # Finished runs never change, so the clock of retention is what moves.
    assert cli("prune", "--days", "0.0000000001", "--json").done().json == {"removed": 1}
    assert [run["id"] for run in cli("run", "list", "--json").json] == [waiting]


def test_the_doctor_tells_what_is_missing_and_how_to_mend_it(cli: Cli) -> None:
    answer = cli("doctor", "--json").failed()
    found = {check["name"]: check for check in answer.json["checks"]}
    assert answer.json["ok"] is False
    assert {name: found[name]["status"] for name in ("database", "keyring", "broker", "runs")} == {
        "database": "ok", "keyring": "ok", "broker": "ok", "runs": "ok",
    }  # fmt: skip
    assert "celery -A tasks beat" in found["beat"]["message"]
    assert "celery -A tasks worker" in found["workers"]["message"]
    assert "none is running" in cli("doctor").failed().stdout


def test_the_doctor_tells_which_runs_no_worker_can_take(
    cli: Cli, rows: Callable[..., Any], worker: Any
) -> None:
    for handler in ("noop", "nobody-knows-it"):
        cli("job", "add", handler, "--handler", handler, "--overlap", "allow").done()
    with worker(pool="solo"):
        for words in (["nobody-knows-it"], ["nobody-knows-it"], ["noop", "--queue", "slow"]):
            cli("run", "trigger", *words).done()
        rows("update job_run set available_at = now() - interval '2 minutes'")
        (since,) = {row["at"] for row in rows("select available_at as at from job_run")}

        def findings() -> dict[str, str]:
            checks = cli("doctor", "--json").failed().json["checks"]
            return {found["name"]: found["message"] for found in checks
                    if found["status"] == "failed"}  # fmt: skip

        until("the worker answers", lambda: "workers" not in findings(), 30)
        found = findings()
    at = since.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    assert found["queue"] == (
        f"1 run waits since {at} in slow, which no worker takes from: "
        "celery -A tasks worker -Q slow"
    )
    assert found["handlers"] == (
        f"2 runs wait since {at} in runs for the handler nobody-knows-it, which no worker of that "
        "queue knows: name its module in CLAIMCHECK_HANDLERS of one"
    )


def test_the_doctor_names_a_transaction_that_keeps_dead_rows(
    cli: Cli, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.commands import doctor

    def named() -> list[str]:
        checks = cli("doctor", "--json").failed().json["checks"]
        return [found["message"] for found in checks if found["name"] == "transaction"]

    with psycopg.connect(database, application_name="a report") as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select count(*) from job_run")
        pid = connection.info.backend_pid
        assert named() == []
        monkeypatch.setattr(doctor, "LONG_TRANSACTION_SECONDS", 0.0)
        (message,) = named()
        assert f"(process {pid}, a report)" in message
        assert message.endswith(f"select pg_terminate_backend({pid})")
    with psycopg.connect(database, application_name="harmless") as connection:
        connection.execute("select 1")
        assert named() == []


def test_the_doctor_survives_what_it_finds(
    cli: Cli, configure: Callable[..., Any], environment: dict[str, str]
) -> None:
    from db import session

    configure(**{
        **environment,
        "DATABASE_URL": "postgresql://app:hunter2@127.0.0.1:1/x",
        "REDIS_URL": "redis://:hunter2@127.0.0.1:1/0",
        "CLAIMCHECK_KEYRING_FILE": "/nowhere/keyring.json",
    })  # fmt: skip
    session.dispose()
    answer = cli("doctor", "--json").failed()
    assert "hunter2" not in answer.stdout + answer.stderr
    found = {check["name"]: check["message"] for check in answer.json["checks"]}
    assert "DATABASE_URL" in found["database"]
    assert "CLAIMCHECK_KEYRING_FILE" in found["keyring"]


# Real processes


def celery(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {key: value for key, value in os.environ.items() if not key.startswith("CLAIMCHECK_")}
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tasks", *words],
        cwd=ROOT, env={**given, **environ}, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_the_commands_stand_beside_celerys_own(environment: dict[str, str]) -> None:
    shown = celery("--help", **environment)
    for noun in (
        "db",
        "datasource",
        "job",
        "run",
        "schedule",
        "keyring",
        "apply",
        "doctor",
        "worker",
    ):
        assert f"\n  {noun} " in shown.stdout, noun


def test_a_process_prints_one_document_and_exits_with_its_status(
    environment: dict[str, str],
) -> None:
    added = celery("job", "add", "a", "--handler", "x", "--json", **environment)
    assert (added.returncode, json.loads(added.stdout)["name"]) == (0, "a")
    refused = celery("run", "trigger", "b", "--json", **environment)
    assert refused.returncode == 1
    assert "no job is named 'b'" in json.loads(refused.stdout)["error"]
    assert "Traceback" not in refused.stderr
    assert celery("run", "trigger", **environment).returncode == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"DATABASE_URL": "postgresql://app:hunter2@127.0.0.1:1/x"}, "DATABASE_URL"),
        ({"DATABASE_URL": "mysql://app:hunter2@127.0.0.1/x"}, "DATABASE_URL"),
        ({"CLAIMCHECK_LEASE_SECONDS": "soon"}, "CLAIMCHECK_LEASE_SECONDS"),
    ],
)
def test_an_unusable_setting_is_one_message_and_exit_1(
    environment: dict[str, str], change: dict[str, str], says: str
) -> None:
    answer = celery("run", "list", **{**environment, **change})
    assert answer.returncode == 1
    assert says in answer.stderr
    assert "Traceback" not in answer.stderr + answer.stdout
    assert "hunter2" not in answer.stderr + answer.stdout


def test_a_reader_that_has_seen_enough_is_no_fault(environment: dict[str, str]) -> None:
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m celery -A tasks audit list --json "
         "| true; echo ${PIPESTATUS[0]}"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert "Traceback" not in ended.stderr
