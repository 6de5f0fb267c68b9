"""From the staging table to the target, inside the transaction that shows it to readers."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.replicate.connector import ColumnPlan, Counts, Load
from tasks.replicate.connectors import keys
from tasks.replicate.connectors.sqlite.session import Session, identifier

STAGE = "claimcheck_stage"

_STAGE = "create temp table {name} ({columns})"
_INDEX = "create index temp.{name} on {stage} ({columns})"
_UNSTAGE = "drop table if exists {stage}"
_EMPTY = "delete from {target}"
# What writes says ABORT, because a table may be declared to ignore or replace what conflicts.
_FILL = "insert or abort into {target} ({columns}) select {columns} from {stage}"
_NULL_KEYS = "select count(*) from {stage} where {nulls}"
_DOUBLED = """
select count(*) from (
  select 1 from {stage} group by {exact_key} having count(*) > 1
) claimcheck_doubled
"""
# Of staged rows with one key the newest stays: by the watermark, then by its arrival.
_DOUBLES = """
delete from {stage} where rowid in (
  select number from (
    select rowid as number, row_number() over (partition by {exact_key} order by {newest}) as place
    from {stage}
  ) where place > 1
)
"""
_STAGED = "select count(*) from {stage}"
_CHANGE = """
update or abort {target} as t set {assigned} from {stage} as s where {matched} and ({differs})
"""
_ADD = """
insert or abort into {target} ({columns})
select {columns} from {stage} as s
where not exists (select 1 from {target} as t where {matched})
"""
_REMOVE = """
delete from {target} as t where not exists (select 1 from {stage} as s where {matched})
"""
_ALL = "select {wanted} from {target} as t"
_ALL_STAGED = """
select {wanted} from {target} as t
where exists (select 1 from {stage} as s where {matched})
"""


class Publication:
    """The statements of one load; every name in them is quoted."""

    def __init__(self, session: Session, load: Load) -> None:
        self._session = session
        self._load = load
        keyed = load.how in ("merge", "diff")
        key = [plan for plan in load.columns if plan.sink.name in load.key] if keyed else []
        # An untyped key takes 1 and 1.0 for one, and is brought to the source's form as well.
        self._rest = [plan for plan in load.columns if plan not in key or _untyped(plan)]
        self._key = key
        self._collations = _collations(load)
        self._parts = {
            "target": identifier("main", load.table[-1]),
            "stage": identifier("temp", STAGE),
            "columns": ", ".join(_name(plan) for plan in load.columns),
            "exact_key": ", ".join(f"{_name(plan)} collate binary" for plan in key),
            "nulls": " or ".join(f"{_name(plan)} is null" for plan in key),
            "newest": self._newest(),
            "matched": " and ".join(self._match(plan) for plan in key),
            "differs": " or ".join(_difference(plan) for plan in self._rest),
            "assigned": _each(self._rest, "{0} = s.{0}", ", "),
        }

    def _newest(self) -> str:
        by_watermark = f"{identifier(self._load.watermark)} desc, " if self._load.watermark else ""
        return f"{by_watermark}rowid desc"

    def _match(self, plan: ColumnPlan) -> str:
        """Equal to the letter, found through the index whatever its collation.

        Two keys that a collation takes for one are not merged: the index refuses the second.
        """
        name, collation = _name(plan), self._collation(plan)
        exact = f"t.{name} collate binary = s.{name}"
        if collation == identifier("BINARY"):
            return exact
        return f"t.{name} collate {collation} = s.{name} and {exact}"

    def _collation(self, plan: ColumnPlan) -> str:
        return identifier(self._collations.get(plan.sink.name, "BINARY"))

    def _run(self, statement: str) -> int:
        return self._session.execute(statement.format(**self._parts)).rowcount

    def _count(self, statement: str) -> int:
        return int(self._session.execute(statement.format(**self._parts)).fetchone()[0])

    # Staging

    def stage(self) -> None:
        """An empty table in this connection's own temporary file, which vanishes with it.

        The columns have the target's affinities, so that what is staged is compared as it would
        be stored.
        """
        self.unstage()
        columns = ", ".join(f"{_name(plan)} {_affinity(plan)}" for plan in self._load.columns)
        self._session.execute(_STAGE.format(name=identifier(STAGE), columns=columns))
        if self._key:
            parts = ", ".join(
                f"{_name(plan)} collate {self._collation(plan)}" for plan in self._key
            )
            name, stage = identifier(f"{STAGE}_key"), identifier(STAGE)
            self._session.execute(_INDEX.format(name=name, stage=stage, columns=parts))

    def unstage(self) -> None:
        self._run(_UNSTAGE)

    # Publishing

    def publish(self) -> Counts:
        if self._load.how == "delete":
            deleted = self.empty()
            return Counts(inserted=self._run(_FILL), deleted=deleted)
        self._single()
        deleted = self._run(_REMOVE) if self._load.how == "diff" else 0
        staged = self._count(_STAGED)
        updated = self._run(_CHANGE) if self._rest else 0
        inserted = self._run(_ADD)
        return Counts(inserted, updated, staged - inserted - updated, deleted)

    def empty(self) -> int:
        return self._run(_EMPTY)

    def _single(self) -> None:
        """Each staged key once, and none of them NULL.

        In ``diff`` a key that stands twice is an error; else the newest of its rows stays.
        """
        if self._count(_NULL_KEYS):
            raise keys.null(self._load)
        if self._load.how == "diff":
            # The sink must hold exactly the source's rows.
            if count := self._count(_DOUBLED):
                raise keys.doubled(self._load, count)
            return
        self._run(_DOUBLES)

    # What arrived

    def landed(self, wanted: str) -> str:
        """A SELECT over the target's rows; in mode incremental over those whose key is staged."""
        statement = _ALL_STAGED if self._load.mode == "incremental" else _ALL
        return statement.format(wanted=wanted, **self._parts)


def _name(plan: ColumnPlan) -> str:
    return identifier(plan.sink.name)


def _each(columns: Sequence[ColumnPlan], pattern: str, glue: str) -> str:
    return glue.join(pattern.format(_name(plan)) for plan in columns)


def _difference(plan: ColumnPlan) -> str:
    """Two values of one column that are not the same, to the letter and to the type."""
    name = _name(plan)
    value = f"t.{name} collate binary is not s.{name} collate binary"
    return f"{value} or typeof(t.{name}) is not typeof(s.{name})" if _untyped(plan) else value


def _untyped(plan: ColumnPlan) -> bool:
    """Whether a column keeps 1 and 1.0 apart, which compare as equal."""
    return bool(plan.sink.detail["affinity"] == "BLOB")


def _affinity(plan: ColumnPlan) -> str:
    """A declared type of the target's affinity, without its constraints."""
    affinity: str = plan.sink.detail["affinity"]
    return "" if affinity == "BLOB" else affinity


def _collations(load: Load) -> dict[str, str]:
    """Of the unique index over the load's key, by column."""
    assert load.relation is not None
    wanted = set(load.key)
    for parts in load.relation.detail["unique"]:
        if parts.keys() == wanted:
            return dict(parts)
    return {}
