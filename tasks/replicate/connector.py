"""The interface behind which every database and file format stands.

A connector is one object (see :class:`Connector`) that says what it can do, as data, and opens
two kinds of ends: a :class:`Source` that is read and a :class:`Sink` that is written. The modes
of replication are written once, on these ends; a connector knows its engine and nothing of modes.
A third party registers a connector under the entry point group ``claimcheck.connectors``, and
must pass the suite in ``tests/replicate/conformance.py``.

The duties of every end
- One end belongs to one run and is used by one thread, but for :meth:`End.stop`, which another
  thread calls: it must break a blocking call within a second, also when the server is frozen.
- Driver errors leave an end only as :class:`SourceError` or :class:`SinkError`, with the engine's
  own error code and main message, and with no row data, no URL and no password in them.
- A value arrives as it was or the run fails naming the column. Where an engine would round, cut,
  reinterpret or default a value without an error, the connector's :meth:`Sink.fit` must say so
  (a guard or a refusal). Sessions are set to UTC, UTF-8 and the engine's strictest mode.

Cells, the values of the row lane
``None``, ``bool``, ``int``, ``float``, ``str`` and ``bytes``, and nothing else. By kind:

=========== ================================================================================
BOOLEAN     ``bool``
INTEGER     ``int``
FLOAT       ``float``, also nan and inf
DECIMAL     ``str``: digits with an optional sign and point, no exponent; ``NaN``, ``Infinity``
TEXT        ``str``; where the engine has '' and NULL, they stay two values
BYTES       ``bytes``
DATE        ``str`` as ``2026-11-01``; what Python cannot hold stays text: ``infinity``,
            ``0044-03-15 BC``
TIME        ``str`` as ``23:59:59.123456``
TIMESTAMP   ``str`` as ``2026-11-01 23:59:59.123456``, a wall clock without a zone
TIMESTAMPTZ ``str`` as ``2026-11-01 23:59:59.123456+00``, always in UTC
INTERVAL    ``str`` in PostgreSQL's ``postgres`` style
UUID        ``str``, lower case with hyphens
JSON        ``str``, the document's text
OTHER       ``str``, the engine's own text (arrays, ranges, network addresses, enums)
=========== ================================================================================

A fraction of a second may end in zeros or leave them out; checksums take both as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from dispatch.context import HandlerFailure
from tasks.replicate.batch import Batch, Cell, Row, Side
from tasks.replicate.names import join_name
from tasks.replicate.shapes import (
    ATOMIC_WAYS,
    DEFAULT_LAG_SECONDS,
    DEFAULT_LAG_UNITS,
    MODES,
    Bound,
    Capabilities,
    Column,
    ColumnPlan,
    ColumnType,
    Counts,
    Fit,
    Guard,
    Kind,
    Lane,
    Load,
    Part,
    Problem,
    ReadRequest,
    Relation,
    TableName,
)

__all__ = [
    "ATOMIC_WAYS",
    "DEFAULT_LAG_SECONDS",
    "DEFAULT_LAG_UNITS",
    "MODES",
    "Batch",
    "Bound",
    "Capabilities",
    "Cell",
    "Column",
    "ColumnPlan",
    "ColumnType",
    "CommitUnknown",
    "Connector",
    "Counts",
    "End",
    "Fenced",
    "Fit",
    "Guard",
    "Kind",
    "Lane",
    "Load",
    "Part",
    "Problem",
    "ReadRequest",
    "Relation",
    "Row",
    "Side",
    "Sink",
    "SinkError",
    "Source",
    "SourceError",
    "TableName",
    "was_altered",
]


def was_altered(table: TableName | None) -> str:
    """What an end says where it finds the table to be another than it described, or gone.

    None is what a query reads.
    """
    what = "what the query reads" if table is None else join_name(table)
    return (
        f"{what} was altered or dropped while the run was at work, and what was planned for it no "
        "longer holds; run it again"
    )


class SourceError(HandlerFailure):
    """The source refused or broke; stored with the code ``source_error``."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message, code="source_error", permanent=permanent)


class SinkError(HandlerFailure):
    """The sink refused or broke; stored with the code ``sink_error``."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message, code="sink_error", permanent=permanent)


class Fenced(HandlerFailure):
    """A newer attempt of this job has written to the sink: this one may not (R-F5)."""

    def __init__(self, mine: int, found: int) -> None:
        super().__init__(
            f"a newer attempt (fence {found}) has written to the sink; this one ({mine}) stops. "
            "Where the control database was restored from a backup, its fences are too low: "
            "celery -A tasks db bump-fence",
            code="sink_error",
            permanent=True,
        )


class CommitUnknown(SinkError):
    """The connection broke while the sink committed; :meth:`Sink.settle` finds out the end."""


class End(ABC):
    """What a source and a sink share."""

    dialect: ClassVar[str] = ""
    """Two ends with one dialect read each other's types, expressions and checksums."""
    lanes: ClassVar[tuple[Lane, ...]] = (Lane.ROWS,)
    """The lanes it knows, the fastest first."""

    @abstractmethod
    def stop(self) -> None:
        """Break whatever blocks, from another thread, within a second; may be called repeatedly.

        A :meth:`Sink.write` whose batches come slowly ends at the next one. Both ends of a run are
        stopped at once, each in a thread of its own.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; never raises, never blocks for long."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Source(End):
    """An open source. Order of calls: describe, [bound], snapshot, [split], read..., close."""

    reads_ahead: ClassVar[bool] = False
    """Whether ``read`` is worked off in a thread of its own, ahead of the sink."""
    guarded_lanes: frozenset[Lane] = frozenset()
    """Lanes besides ROWS in which ``read`` applies the guards of the plan by itself."""

    @abstractmethod
    def describe(self, request: ReadRequest) -> Relation:
        """The columns of the table or query in their order, the key and an estimate of rows.

        Raises SourceError (permanent) where the table, a named column or a right is missing.
        """

    def reads(self, request: ReadRequest) -> frozenset[Any]:
        """The tables behind the request, as values that equal a sink's :meth:`Sink.writes` where
        they are one and the same, whatever the two URLs look like; empty where not known."""
        return frozenset()

    def tables(self) -> list[TableName]:
        """All tables a pattern may match, by name; views, system and Claimcheck's own left out."""
        raise SourceError("this connector cannot list tables", permanent=True)

    def bound(self, request: ReadRequest, column: Column, lag: float | None) -> Bound:
        """The next read's lower bound; called before :meth:`snapshot`.

        ``lag`` is in seconds for times and in units for numbers; None is the connector's own
        default. Raises SourceError (permanent) where nothing safe can be said: never guesses.
        """
        raise SourceError("this connector has no incremental reads", permanent=True)

    def snapshot(self) -> None:
        """Begin to see one state of the data, kept until close, by all later calls."""

    def split(self, request: ReadRequest, parts: int) -> list[Part]:
        """At most ``parts`` shares that together are the request, each row in exactly one."""
        return [Part(0)]

    def join(self, request: ReadRequest, part: Part) -> None:
        """In another process: see the state of the source whose :meth:`split` made ``part``.

        What stands in the way of reading it shows here, as far as it can: the sink is still whole.
        """

    @abstractmethod
    def read(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        """The rows in batches, each column in the request's order; memory stays bounded."""

    @abstractmethod
    def count(self, request: ReadRequest) -> int:
        """Rows of the request, in the snapshot."""

    def checksum(self, request: ReadRequest) -> Any:
        """A checksum of the request's rows, in the snapshot, in the dialect's own form.

        Only asked where both ends have one dialect; otherwise cells are compared.
        """
        raise NotImplementedError


class Sink(End):
    """An open sink. ``describe``, ``fit`` and ``refusals`` change nothing."""

    @abstractmethod
    def describe(self, table: TableName) -> Relation | None:
        """The target table, or None where it does not exist. After :meth:`create` the new one."""

    def writes(self, relation: Relation) -> Any:
        """The target, as a value that equals one of :meth:`Source.reads` where it is the same."""
        return None

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        """Whether and how values of ``source`` (of an end of that dialect) are stored unchanged."""
        from tasks.replicate.fits import fit

        return fit(source.type, sink.type)

    def orders(self, source: Column, sink: Column) -> bool:
        """Whether a watermark sorts in ``sink`` as it does in ``source``, so that the newest of
        several staged rows with one key can be told."""
        from tasks.replicate.fits import ordered

        return ordered(source.type, sink.type)

    @abstractmethod
    def refusals(self, load: Load) -> list[str]:
        """All that would make this load fail or do harm, each with the way out: rights, foreign
        keys, triggers, a missing key, a way that does not suit the table. Changes nothing."""

    def create(
        self, table: TableName, columns: Sequence[Column], key: Sequence[str], dialect: str
    ) -> None:
        """Make the target for a source's columns (of an end of ``dialect``); commits by itself.

        A target that :meth:`describe` found blank has these columns from then on.
        """
        raise SinkError("this connector cannot create tables", permanent=True)

    def uncreate(self, table: TableName) -> None:
        """Take back the table that this end has made, because its run failed with nothing
        committed. Leaves one that has rows by now (looked at where nobody can add any), and one
        that it cannot remove, or not soon; never raises."""

    def altered(self, load: Load) -> bool:
        """Whether the target is no longer what the load was planned for.

        Asked at the beginning of a transaction that changes it. An engine that can holds the
        table from then on, so that nobody alters it before the end.
        """
        now = self.describe(load.table)
        return now is None or any(
            (found := now.column(plan.sink.name)) is None
            or (found.type, found.generated, found.detail)
            != (plan.sink.type, plan.sink.generated, plan.sink.detail)
            for plan in load.columns + load.computed
        )

    # The fence and the transactions that change the target

    @abstractmethod
    def begin(self, load: Load) -> None:
        """Begin a transaction that will change the target, and pass the fence (R-F5).

        ``claimcheck_fence`` (made where it is missing, beside the target) has one row for each
        ``(scope, step)``. Step 0 records ``load.fence`` in its row if no higher number stands
        there. A later step share-locks the row of step 0, goes on only if no higher number stands
        there, and records the fence in a row of its own. Raises Fenced otherwise. A sink that is
        not transactional keeps its record as well as it can. Where it raises, ``rollback`` follows.

        Two jobs may have one target: see ``tasks.replicate.connectors.turns``.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit; raises CommitUnknown where the connection broke meanwhile.

        A sink in which nothing is held since ``begin`` passes the fence here once more.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Undo the open transaction, if any; never raises."""

    def settle(self, load: Load) -> bool:
        """After CommitUnknown: whether it committed.

        With a connection of its own, locks the fence's row of ``load.step`` (so that the lost
        transaction has ended) and reads it. Afterwards the sink can be used again.
        """
        raise SinkError("the sink broke while it committed; its content is not known")

    # What happens inside

    @abstractmethod
    def truncate(self, load: Load) -> None:
        """Empty the target, inside begin and commit."""

    def stage(self, load: Load) -> None:
        """Make this run's empty staging table (in its own transaction), and remove staging that
        runs of the same scope with a lower fence left behind."""
        raise SinkError("this connector has no staging", permanent=True)

    @abstractmethod
    def write(self, load: Load, batches: Iterable[Batch], *, staging: bool) -> int:
        """Store the batches of ``load.lane`` and return the rows stored.

        Into the target inside begin and commit; into staging in a transaction of its own.
        Errors raised by ``batches`` itself pass through unchanged.
        """

    def publish(self, load: Load) -> Counts:
        """Bring the staged rows to the target as ``load.how`` says, inside begin and commit.

        ``merge`` inserts or updates by key and leaves equal rows alone; ``delete`` and
        ``truncate`` empty and fill; ``diff`` changes only what differs; ``rename`` swaps tables.
        """
        raise SinkError("this connector has no staging", permanent=True)

    def unstage(self, load: Load) -> str | None:
        """Drop this run's staging table; never raises, and waits for others a few seconds at most.

        Returns its name where it is left for a later run's :meth:`stage` to remove.
        """
        return None

    def finish(self, load: Load, *, analyze: bool) -> list[str]:
        """After the last commit: move sequences of loaded identity columns on, and analyze.

        Returns warnings; a failure here does not undo the load.
        """
        return []

    # Verification, inside the last transaction where there is one

    @abstractmethod
    def count(self, load: Load) -> int:
        """Rows of the target; in mode ``incremental`` only those whose key is staged."""

    @abstractmethod
    def scan(self, load: Load) -> Iterator[Batch]:
        """The same rows as cells, the sink columns of ``load.columns`` in order (ROWS lane)."""

    def shown(self, load: Load, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The source's cells, with each text in the form in which :meth:`scan` would hand out the
        value that the target makes of it: only for kinds that cells have no one form for."""
        return batches

    def checksum(self, load: Load) -> Any:
        """A checksum of the same rows; equal to the source's when all arrived."""
        raise NotImplementedError


class Connector(ABC):
    """One kind of datasource. Stateless; its module imports no driver before an end is opened."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def missing(self) -> str | None:
        """The name of a driver module that is not installed, or None."""
        return None

    @abstractmethod
    def check_config(self, config: Mapping[str, Any]) -> list[Problem]:
        """What is wrong with a configuration, without connecting and without echoing it."""

    @abstractmethod
    def test(self, config: Mapping[str, Any]) -> str:
        """Connect, within ten seconds, and tell the product and version; errors as SourceError."""

    @abstractmethod
    def source(self, config: Mapping[str, Any], *, name: str = "") -> Source:
        """Open a source; connects within ten seconds. ``name`` is shown in the engine's session
        list where it has one (``cc/SCOPE/FENCE``)."""

    @abstractmethod
    def sink(self, config: Mapping[str, Any], *, name: str = "") -> Sink:
        """Open a sink, likewise."""
