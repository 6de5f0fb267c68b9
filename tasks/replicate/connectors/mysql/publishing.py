"""From the staging table to the target, inside the transaction that shows it to readers."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.replicate.connector import ColumnPlan, Counts, Load
from tasks.replicate.connectors import keys
from tasks.replicate.connectors.mysql import catalog, staging
from tasks.replicate.connectors.mysql.session import Session, identifier

# TRUNCATE would commit by itself, so the rows are deleted.
_EMPTY = "delete from {target}"
_FILL = "insert into {target} ({columns}) select {columns} from {stage} order by {number}"
_NULL_KEYS = "select count(*) from {stage} where {nulls}"
# Keys that the collation takes for one are two keys of the source: they must not become one row.
_ALIKE = """
select count(*) from (
  select 1 from {stage} group by {key} having count(distinct {exact}) > 1
) claimcheck_alike
"""
_ALIKE_STORED = "select count(*) from {stage} s join {target} t on {matched} where not ({exactly})"
_DOUBLED = """
select count(*) from (
  select 1 from {stage} group by {key} having count(*) > 1
) claimcheck_doubled
"""
# Of staged rows with one key the newest stays: by the watermark, then by its arrival.
_DOUBLES = """
delete s from {stage} s join (
  select {number}, row_number() over (partition by {key} order by {newest}{number} desc) as place
  from {stage}
) ranked on ranked.{number} = s.{number} where ranked.place > 1
"""
_STAGED = "select count(*) from {stage}"
_CHANGE = "update {target} t join {stage} s on {matched} set {assigned} where {differs}"
# Not ON DUPLICATE KEY UPDATE, which would take a conflict on any other unique index for this row.
_ADD = """
insert into {target} ({columns})
select {staged} from {stage} s left join {target} t on {matched}
where t.{one} is null order by s.{number}
"""
_REMOVE = "delete t from {target} t left join {stage} s on {matched} where s.{one} is null"
_ALL = "select {wanted} from {target} t"
_ALL_STAGED = """
select {wanted} from {target} t where exists (select 1 from {stage} s where {matched})
"""
_ANALYZE = "analyze table {target}"


class Publication:
    """The statements of one load; every name in them is quoted."""

    def __init__(self, session: Session, load: Load) -> None:
        self._session = session
        self._load = load
        keyed = load.how in ("merge", "diff")
        self._key = [plan for plan in load.columns if plan.sink.name in load.key] if keyed else []
        self._rest = [plan for plan in load.columns if plan not in self._key]
        self._parts = {
            "target": target(load),
            "stage": staging.name(load),
            "number": staging.number(load),
            "columns": _each(load.columns, "{0}", ", "),
            "staged": _each(load.columns, "s.{0}", ", "),
            "key": _each(self._key, "{0}", ", "),
            "one": _each(self._key[:1], "{0}", ""),
            "nulls": _each(self._key, "{0} is null", " or "),
            "matched": _each(self._key, "t.{0} = s.{0}", " and "),
            "newest": f"{identifier(load.watermark)} desc, " if load.watermark else "",
            "assigned": _each(self._rest, "t.{0} = s.{0}", ", "),
            "differs": " or ".join(f"not ({_same(plan)})" for plan in self._rest),
            "exact": ", ".join(_exact(plan, "") for plan in self._key),
            "exactly": " and ".join(_same(plan) for plan in self._key),
        }

    def _run(self, statement: str) -> int:
        return self._session.execute(statement.format(**self._parts))

    def _count(self, statement: str) -> int:
        return int(self._session.row(statement.format(**self._parts))[0])

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
        """Each staged key once, none of them NULL, and none that only looks like another.

        In ``diff`` a key that stands twice is an error; else the newest of its rows stays.
        """
        if self._count(_NULL_KEYS):
            raise keys.null(self._load)
        if any(catalog.is_textual(plan.sink) for plan in self._key):
            alike = self._count(_ALIKE) or self._count(_ALIKE_STORED)
            if alike:
                raise keys.alike(self._load, alike, "give the key column a binary collation")
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

    def analyze(self) -> None:
        self._session.rows(_ANALYZE.format(**self._parts))


def target(load: Load) -> str:
    """The quoted name of the target."""
    assert load.relation is not None
    return identifier(load.relation.detail["schema"], load.relation.detail["table"])


def _each(columns: Sequence[ColumnPlan], pattern: str, glue: str) -> str:
    return glue.join(pattern.format(identifier(plan.sink.name)) for plan in columns)


def _exact(plan: ColumnPlan, table: str) -> str:
    """The column's bytes where a collation would compare it otherwise."""
    name = table + identifier(plan.sink.name)
    return f"binary {name}" if catalog.is_textual(plan.sink) else name


def _same(plan: ColumnPlan) -> str:
    return f"{_exact(plan, 't.')} <=> {_exact(plan, 's.')}"
