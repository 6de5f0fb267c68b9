"""What travels between the ends of a replication, and what they say of themselves: data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

TableName = tuple[str, ...]
"""A table's name in parts, outermost first, each literal: ``("public", "My Orders")``."""

MODES = ("complete", "complete-atomic", "incremental")
ATOMIC_WAYS = ("delete", "diff", "truncate", "rename")
DEFAULT_LAG_SECONDS = 300
"""Of time watermarks, where no safe bound is known and the job sets no ``lag``."""
DEFAULT_LAG_UNITS = 10_000
"""Of numeric watermarks, likewise."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a definition or a configuration, and the way out; holds no value of it.

    ``key`` is where it stands (``source.table``); empty where that is no one key.
    """

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class Kind(StrEnum):
    """What a column's values are, whatever an engine calls its type."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    DECIMAL = "decimal"
    FLOAT = "float"
    TEXT = "text"
    BYTES = "bytes"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    INTERVAL = "interval"
    UUID = "uuid"
    JSON = "json"
    OTHER = "other"


MOMENTS = frozenset({Kind.DATE, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})


class Lane(StrEnum):
    """How data travels between the ends.

    ROWS carries lists of rows of cells; every end must know it. The others carry bytes:
    COPY_BINARY and COPY_TEXT as PostgreSQL's COPY writes them, COPY_CSV as its ``FORMAT csv``
    does by default (comma, double quotes doubled, NULL is an empty unquoted field and '' is
    ``""``, no header, UTF-8, true and false as ``t`` and ``f``, bytes as ``\\x`` and hexadecimal).
    """

    ROWS = "rows"
    COPY_BINARY = "copy-binary"
    COPY_TEXT = "copy-text"
    COPY_CSV = "copy-csv"


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type: its kind, the limits that matter when values move, and the engine's name for it."""

    kind: Kind
    name: str
    """As the engine prints it with its modifiers, for example ``character varying(20)``."""
    bits: int | None = None
    """Of INTEGER (8 to 64) and FLOAT (32, 64); None is unlimited."""
    unsigned: bool = False
    precision: int | None = None
    """Digits of DECIMAL in all; digits of a fraction of a second of times. None is unlimited."""
    scale: int | None = None
    """Digits of DECIMAL after the point; None is unlimited."""
    length: int | None = None
    """Characters of TEXT, octets of BYTES; None is unlimited."""
    loose: bool = False
    """The engine does not bind values to the type (SQLite's affinities, the text of a CSV file),
    so that any cell may come; a sink of another engine then guards each value."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a relation."""

    name: str
    type: ColumnType
    nullable: bool = True
    has_default: bool = False
    generated: bool = False
    """Computed by the engine; cannot be written."""
    expression: str | None = None
    """Of a generated column, as the engine prints it; None where the engine does not tell it."""
    identity: bool = False
    """Numbered by the engine from a sequence, which a load must move on."""
    detail: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What only ends of the same dialect need to know about it; must be picklable."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table, view, query result or file as its end describes it."""

    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    """The primary key, or else a unique key whose columns are all NOT NULL; empty without one."""
    rows: int | None = None
    """An estimate for progress of what the request asks for; None is unknown."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What only the connector itself needs to remember about it; must be picklable."""
    hint: str = ""
    """What to look at where its columns are not those that were expected."""
    named: bool = True
    """Whether its columns have names of their own; those of a sink that have none are paired with
    the source's by their order."""
    blank: ColumnType | None = None
    """Of an end that knows no column before it has a row, such as an empty file: the type of
    whatever columns it is given. None of any other."""
    size: int | None = None
    """Bytes that hold the rows, as the sizes of its batches count them: progress is told by them
    where ``rows`` is unknown. None is unknown."""

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class Guard:
    """A check of one column's cells in the row lane, by name, so that it can cross to a process.

    The names are those of ``tasks.replicate.guards.GUARDS``.
    """

    name: str
    argument: int | None = None
    second: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether values of a source column can be stored unchanged in a sink column, and how.

    ``refusal`` says why not, and what to do. ``lanes`` are those in which it is right.
    ``read_as`` is an expression template for the source's own SQL (``{}`` stands for the column),
    only ever set by a sink for a source of the same dialect. ``packed`` takes its place in
    COPY_BINARY, where that needs another: one of bytes, which are handed on as they are. Where they
    are said to be ``poisons``, a value that the sink could not hold becomes one that it refuses.
    ``guards`` check cells where the engine itself would change one silently; they restrict the
    lanes to ROWS and to those in which the source applies guards itself
    (:attr:`Source.guarded_lanes`).
    """

    lanes: frozenset[Lane] = frozenset({Lane.ROWS})
    read_as: str | None = None
    guards: tuple[Guard, ...] = ()
    refusal: str | None = None
    poisons: bool = False
    packed: str | None = None


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """One column's way from the source to the sink."""

    source: Column
    sink: Column
    read_as: str | None = None
    guards: tuple[Guard, ...] = ()
    poisons: bool = False
    packed: str | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read. The planner fills ``columns``; a request without them asks for all.

    ``since`` is the inclusive lower bound of ``watermark``, as text: rows at or above it are
    read, and so are rows whose watermark is NULL, which would otherwise never arrive.
    """

    table: TableName | None = None
    query: str | None = None
    where: str | None = None
    columns: tuple[ColumnPlan, ...] = ()
    watermark: str | None = None
    since: str | None = None
    fetch_size: int = 1000
    """Rows of one batch in the row lane; never rows held in memory beyond that."""

    @property
    def is_conditional(self) -> bool:
        """Whether rows of the table or query may be left out."""
        return self.where is not None or (self.watermark is not None and self.since is not None)

    def planned(self, columns: Sequence[ColumnPlan]) -> ReadRequest:
        return replace(self, columns=tuple(columns))


@dataclass(frozen=True, slots=True)
class Part:
    """A share of a request, read by one reader. ``bounds`` is the source's own and picklable."""

    number: int
    bounds: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound of the next incremental read, decided before this read's snapshot (R-F3)."""

    value: str | None
    """As text; None keeps the old one."""
    type: str
    """The PostgreSQL type by which the control database compares it: ``timestamptz``,
    ``timestamp``, ``date``, ``bigint``, ``numeric``, ``xid8`` or ``text``."""
    warning: str | None = None
    """Stated with the run where the bound rests on a lag and not on knowledge."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What publishing staged rows changed in the target."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """One run's task at the sink; picklable, so that parts can cross to other processes."""

    table: TableName
    columns: tuple[ColumnPlan, ...]
    mode: str
    lane: Lane
    run_id: str
    scope: str
    """The fence's scope: the job's id (R-F5)."""
    fence: int
    step: int = 0
    """Which of the run's transactions: 0 is the first, which records the fence number; a later one
    has a number of its own, so that a commit of unknown outcome can be told from the others."""
    key: tuple[str, ...] = ()
    """Sink columns by which ``merge`` and ``diff`` find rows."""
    watermark: str | None = None
    """The sink column that tells which of several staged rows with one key is the newest."""
    how: str = ""
    """How staged rows reach the target: ``merge`` or one of ATOMIC_WAYS; empty without staging."""
    staging_schema: str | None = None
    verified: bool = False
    """Whether the target is read again before the end."""
    relation: Relation | None = None
    """The target as described when the run was planned."""
    computed: tuple[ColumnPlan, ...] = ()
    """Columns that both ends compute: a checksum compares them, nothing writes them."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a connector can do, as data: commands and docs print it, ``apply`` checks against it."""

    title: str
    source_modes: frozenset[str] = frozenset()
    """Modes in which it can be read; empty where it is no source."""
    sink_modes: frozenset[str] = frozenset()
    atomic: tuple[str, ...] = ()
    """Ways of ``complete-atomic`` at the sink, the default first."""
    queries: bool = False
    """``query`` and ``where`` as source."""
    parallel_source: bool = False
    parallel_sink: bool = False
    watermark: str = "none"
    """``safe`` (a bound that misses nothing), ``lag`` (a stated lag) or ``none``."""
    transactional: bool = False
    """As sink: the fence and the change commit together (R-F5)."""
    staging_schema: bool = False
    """As sink: rows may be staged in a schema of their own."""
    create: bool = False
    analyze: bool = False
    patterns: bool = False
    """``tables`` as source: it can list its tables."""
    cancel: str = ""
    """How a blocking call is broken, for the docs."""
    tested: str = "untested"
    """The versions that the project's tests run against, for the docs."""
    extra: str | None = None
    """The optional dependency it needs: ``pip install 'celery-claimcheck[EXTRA]'``."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keys of a datasource's configuration, each with one line on it."""
    secrets: frozenset[str] = frozenset({"url"})
    """Those of them that may carry a password."""
