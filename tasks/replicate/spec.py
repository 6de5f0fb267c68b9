"""What a replication job's definition says, checked and typed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from dispatch.context import STORED_KEYS
from dispatch.durations import parse_duration
from tasks.replicate.names import matching, split_name
from tasks.replicate.shapes import Problem

Mode = Literal["complete", "complete-atomic", "incremental"]

_MOST = 2**63 - 1
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|ki|mi|gi)?b?(?:/s)?", re.IGNORECASE)
_FACTOR = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class SpecError(ValueError):
    """A definition is wrong; ``problems`` holds every mistake found, not only the first.

    ``spec`` is what it says apart from those, so that more can be found; None where too much is.
    """

    def __init__(self, problems: list[Problem], spec: ReplicationSpec | None = None) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems
        self.spec = spec


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"is one text; write a list, such as [{value}]")
    return value


def _pairs(value: Any) -> Any:
    names = [*value, *value.values()] if isinstance(value, dict) else value
    if value is not None and not (
        isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    ):
        raise ValueError("must be a list of the sink's names in order, or a mapping {SOURCE: SINK}")
    return value


def _table(value: str | None) -> str | None:
    if value is not None:
        split_name(value)
    return value


class SourceSpec(_Strict):
    """What to read: a table with chosen columns and rows, or a query in the source's own SQL."""

    datasource: str
    table: str | None = None
    query: str | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None

    _check_columns = field_validator("columns", mode="before")(_names)
    _check_table = field_validator("table")(_table)

    @model_validator(mode="after")
    def _one_of_each(self) -> SourceSpec:
        if self.table is not None and self.query is not None:
            raise ValueError("has both table and query; keep one of them")
        if self.columns is not None:
            if not self.columns:
                raise ValueError("columns is empty; name some, or leave the key out to take all")
            doubled = sorted({c for c in self.columns if self.columns.count(c) > 1})
            if doubled:
                raise ValueError(f"columns names {', '.join(doubled)} twice")
        return self


class SinkSpec(_Strict):
    """Where to write. ``columns`` maps source to sink names, or lists sink names in order."""

    datasource: str
    table: str | None = None
    table_schema: str | None = None
    columns: dict[str, str] | tuple[str, ...] | None = None
    key: tuple[str, ...] | None = None
    staging_schema: str | None = None

    _check_columns = field_validator("columns", mode="before")(_pairs)
    _check_key = field_validator("key", mode="before")(_names)
    _check_table = field_validator("table")(_table)


class ReplicationSpec(_Strict):
    """A replication job, as its definition says it.

    ``lag`` is in seconds for time watermarks and in units for numeric ones; ``bandwidth`` in bytes
    a second over all parts; ``fetch_size`` in rows.
    """

    source: SourceSpec
    sink: SinkSpec
    mode: Mode
    watermark: str | None = None
    lag: float | None = None
    parallelism: int = 1
    atomic: Literal["delete", "diff", "truncate", "rename"] | None = None
    verify: Literal["count", "checksum"] | None = None
    create: bool = False
    analyze: bool = False
    fetch_size: int = 1000
    bandwidth: int | None = None
    tables: tuple[str, ...] | None = None

    @field_validator("lag", mode="before")
    @classmethod
    def _lag(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.strip()
            if not re.fullmatch(r"\d+(\.\d+)?", value):
                return parse_duration(value, what="").total_seconds()
            value = float(value)
        if value is not None and not (_is_number(value) and 0 <= value <= _MOST):
            raise ValueError(
                f"must be a duration, or a number (of seconds or units) from 0 to {_MOST}"
            )
        return value

    @field_validator("bandwidth", mode="before")
    @classmethod
    def _bandwidth(cls, value: Any) -> Any:
        if isinstance(value, str):
            match = _SIZE.fullmatch(value.strip())
            if not match:
                raise ValueError(f"{value!r} is no size; write bytes a second, such as 10MB")
            value = int(Decimal(match[1]) * _FACTOR[(match[2] or "").lower()])
        if value is not None and not _is_number(value):
            raise ValueError("must be bytes a second, such as 10MB")
        if value is not None and value < 1:
            raise ValueError("must be at least one byte a second; leave it out for no limit")
        if value is not None and _MOST < value < float("inf"):
            raise ValueError("is more than any line carries; leave it out for no limit")
        return value

    @field_validator("tables", mode="before")
    @classmethod
    def _tables(cls, value: Any) -> Any:
        patterns = [value] if isinstance(value, str) else value
        if isinstance(patterns, list | tuple):
            if all(isinstance(p, str) for p in patterns):
                matching([], patterns)
                if not any(not p.startswith("!") for p in patterns):
                    raise ValueError("only excludes; add a pattern such as public.*")
            return tuple(patterns)
        return patterns

    @field_validator("parallelism")
    @classmethod
    def _parallelism(cls, value: int) -> int:
        if not 1 <= value <= 64:
            raise ValueError("must be between 1 and 64")
        return value

    @field_validator("fetch_size")
    @classmethod
    def _fetch_size(cls, value: int) -> int:
        if not 1 <= value <= 1_000_000:
            raise ValueError("must be between 1 and 1000000 rows")
        return value

    @classmethod
    def parse(cls, definition: Mapping[str, Any]) -> ReplicationSpec:
        """Read a job's definition, also a stored one; raises SpecError with every mistake in it.

        STORED_KEYS are passed by: they are every job's, and checked elsewhere. Any other key that
        is not known is a mistake: a newer version may have stored an option that changes the work.
        """
        own = {key: value for key, value in definition.items() if key not in STORED_KEYS}
        try:
            spec = cls.model_validate(own)
        except ValidationError as error:
            found = error.errors()
        else:
            problems = _contradictions(spec)
            if problems:
                raise SpecError(problems, spec)
            return spec
        problems, rest = [_problem(e) for e in found], _without(own, found)
        if rest is not None:
            # What only follows from a key that was taken out says nothing new.
            wrong = {problem.key for problem in problems}
            problems += [
                problem
                for problem in _contradictions(rest)
                if not any(key == problem.key or key.startswith(f"{problem.key}.") for key in wrong)
            ]
        raise SpecError(problems, rest)

    def for_table(self, name: tuple[str, ...]) -> dict[str, Any]:
        """The definition of the child job for one table of the ``tables`` pattern."""
        from tasks.replicate.names import join_name

        target = (self.sink.table_schema, name[-1]) if self.sink.table_schema else name
        child = self.model_dump(exclude_none=True, exclude={"tables"}, mode="json")
        child["source"]["table"] = join_name(name)
        child["sink"]["table"] = join_name(target)
        child["sink"].pop("table_schema", None)
        return child


def _without(definition: Mapping[str, Any], errors: Sequence[Any]) -> ReplicationSpec | None:
    """The definition without its wrong keys, where what is left is enough for a spec."""
    left: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value
        for key, value in definition.items()
    }
    for error in errors:
        key, *inner = error["loc"]
        if inner and isinstance(left.get(key), dict):
            left[key].pop(inner[0], None)
        else:
            left.pop(key, None)
    try:
        return ReplicationSpec.model_validate(left)
    except ValidationError:
        return None


def _contradictions(spec: ReplicationSpec) -> list[Problem]:
    """What the single keys cannot see."""
    found: list[Problem] = []

    def problem(key: str, message: str) -> None:
        found.append(Problem(key, message))

    if spec.tables is None:
        if spec.source.table is None and spec.source.query is None:
            problem("source", "names neither a table nor a query (nor the job a tables pattern)")
        if spec.sink.table is None:
            problem("sink.table", "is missing; name the table to write")
        if spec.sink.table_schema is not None:
            problem("sink.table_schema", "is only for a tables pattern; write it into sink.table")
        if _is_itself(spec):
            problem("sink.table", "is the source's own table: write to another table")
    else:
        for key in ("table", "query", "columns"):
            if getattr(spec.source, key) is not None:
                problem(f"source.{key}", "does not go with a tables pattern; remove one of them")
        for key in ("table", "columns", "key"):
            if getattr(spec.sink, key) is not None:
                problem(f"sink.{key}", "does not go with a tables pattern; remove one of them")
        if spec.source.datasource == spec.sink.datasource and spec.sink.table_schema is None:
            problem(
                "sink",
                "is the source's own datasource, so that each table would be written to itself: "
                "name another datasource, or a table_schema",
            )
    if spec.source.query is not None:
        if spec.source.where is not None:
            problem("source.where", "does not go with a query; write the condition into the query")
        if spec.source.columns is not None:
            problem("source.columns", "does not go with a query; let the query choose its columns")
    if spec.mode == "incremental" and spec.watermark is None:
        problem("watermark", "is missing; incremental needs a column that rises with each change")
    if spec.mode != "incremental":
        for key in ("watermark", "lag"):
            if getattr(spec, key) is not None:
                problem(key, f"is only for mode incremental, and this is {spec.mode}")
    columns = spec.source.columns
    if spec.watermark is not None and columns is not None and spec.watermark not in columns:
        problem("watermark", f"{spec.watermark} is not among source.columns; add it there")
    if spec.atomic is not None and spec.mode != "complete-atomic":
        problem("atomic", f"is only for mode complete-atomic, and this is {spec.mode}")
    if spec.sink.staging_schema is not None:
        if spec.mode == "complete":
            problem(
                "sink.staging_schema",
                "does nothing in mode complete, which stages no rows: leave it out",
            )
        if spec.atomic == "rename":
            problem(
                "sink.staging_schema",
                "does nothing with atomic: rename, whose new table is made beside the old one; "
                "leave it out",
            )
    if isinstance(spec.sink.columns, tuple) and columns is not None:
        ours, theirs = len(columns), len(spec.sink.columns)
        if ours != theirs:
            problem("sink.columns", f"lists {theirs} names for {ours} source columns")
    if isinstance(spec.sink.columns, dict) and columns is not None:
        unknown = sorted(set(spec.sink.columns) - set(columns))
        if unknown:
            problem("sink.columns", f"maps {', '.join(unknown)}, not among source.columns")
    if spec.sink.columns is not None:
        names = (
            list(spec.sink.columns.values())
            if isinstance(spec.sink.columns, dict)
            else list(spec.sink.columns)
        )
        doubled = sorted({n for n in names if names.count(n) > 1})
        if doubled:
            problem("sink.columns", f"writes {', '.join(doubled)} twice")
    return found


def _is_itself(spec: ReplicationSpec) -> bool:
    """Whether both sides say the same; a run finds out whether two spellings mean one table."""
    source, sink = spec.source, spec.sink
    if source.datasource != sink.datasource or source.table is None or sink.table is None:
        return False
    return split_name(source.table) == split_name(sink.table)


_SIDES: dict[str, type[_Strict]] = {"source": SourceSpec, "sink": SinkSpec}

# What pydantic finds wrong with a value, by the first word of its name for it.
_WRONG = {
    "model": "must be a mapping, such as {datasource: NAME, table: SCHEMA.TABLE}",
    "bool": "must be true or false",
    "int": "must be a whole number",
    "finite": "must be a whole number",
    "string": "must be text",
    "invalid": "is no key of a replication job",
}


def _problem(error: Any) -> Problem:
    """One mistake of pydantic's in our words, without echoing a value that may be secret."""
    location = error["loc"]
    key = ".".join(str(part) for part in location)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        ways = {
            "mode": "write complete, complete-atomic or incremental",
            "source": "write source: {datasource: NAME, table: SCHEMA.TABLE}",
            "sink": "write sink: {datasource: NAME, table: SCHEMA.TABLE}",
        }
        return Problem(key, f"is missing; {ways.get(key, 'name the datasource')}")
    if kind == "extra_forbidden":
        known = (_SIDES[location[0]] if len(location) > 1 else ReplicationSpec).model_fields
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return Problem(key, f"is no key of a replication job; {hint}")
    if kind == "literal_error":
        return Problem(key, f"must be {context['expected']}")
    if kind == "value_error":
        return Problem(key, str(context["error"]).strip())
    if kind == "tuple_type":
        return Problem(
            key, f"must be a list, such as [{'public.*' if key == 'tables' else 'NAME'}]"
        )
    word = kind.partition("_")[0]
    return Problem(key, _WRONG.get(word, "is not what this key takes: see docs/replication.md"))
