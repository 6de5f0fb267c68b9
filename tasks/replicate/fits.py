"""Which kinds of column fit into which, whatever the engines: the planner's table for cells.

The rule: every value arrives as it was, or its column is refused. A conversion that may lose
something is either guarded value by value, or refused with the way out (a conversion that the
user writes into a query is no longer silent).
"""

from __future__ import annotations

from tasks.replicate.shapes import MOMENTS, ColumnType, Fit, Guard, Kind

_QUERY = "convert it at the source, such as in a query, where it is visible"
_TIMES = frozenset({Kind.TIME, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})
_NUMBERS = frozenset({Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT})
_TEXTUAL = (
    frozenset({Kind.TEXT, Kind.JSON, Kind.UUID, Kind.OTHER, Kind.INTERVAL, Kind.DATE}) | _TIMES
)


def refusal(source: ColumnType, sink: ColumnType, reason: str = "") -> Fit:
    """A refusal that names both types."""
    why = f" {reason};" if reason else ""
    return Fit(refusal=f"{source.name} does not go into {sink.name} unchanged:{why} {_QUERY}")


def fit(source: ColumnType, sink: ColumnType) -> Fit:
    """Whether cells of one type fit another, in the row lane."""
    guards = _guards(source, sink)
    return refusal(source, sink) if guards is None else Fit(guards=tuple(guards))


def ordered(source: ColumnType, sink: ColumnType) -> bool:
    """Whether a watermark's values sort in the sink's column as they do in the source's."""
    kinds = {source.kind, sink.kind}
    return kinds <= _NUMBERS or kinds <= MOMENTS or source.name == sink.name


def _guards(source: ColumnType, sink: ColumnType) -> list[Guard] | None:
    """The guards that are needed, or None where the kinds do not go together."""
    loose = source.loose or source.kind is Kind.TEXT
    match sink.kind:
        case Kind.INTEGER:
            return _into_integer(source, sink)
        case Kind.DECIMAL:
            return _into_decimal(source, sink)
        case Kind.FLOAT:
            return _into_float(source, sink)
        case Kind.BOOLEAN:
            if source.kind is Kind.BOOLEAN and not source.loose:
                return []
            return [Guard("boolean")] if loose or source.kind is Kind.INTEGER else None
        case Kind.TEXT:
            return _into_text(source, sink)
        case Kind.BYTES:
            if source.kind is not Kind.BYTES and not source.loose:
                return None
            wide = sink.length is None or (source.length or sink.length + 1) <= sink.length
            return [] if wide and not source.loose else [Guard("octets", sink.length)]
        case Kind.DATE:
            if source.kind is Kind.DATE and not source.loose:
                return []
            return [Guard("date")] if loose else None
        case Kind.TIME | Kind.TIMESTAMP | Kind.TIMESTAMPTZ:
            return _into_time(source, sink, loose)
        case Kind.UUID | Kind.INTERVAL | Kind.JSON:
            return [] if source.kind in (sink.kind, Kind.TEXT) else None
    same = source.kind is Kind.OTHER and source.name == sink.name
    return [] if same or source.kind is Kind.TEXT else None


def _into_integer(source: ColumnType, sink: ColumnType) -> list[Guard] | None:
    if source.kind is Kind.BOOLEAN:
        return [Guard("number-of-boolean"), Guard("integer", sink.bits, int(sink.unsigned))]
    if source.kind not in (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT, Kind.TEXT) and not source.loose:
        return None
    if source.kind is Kind.INTEGER and not source.loose and _holds(sink, source):
        return []
    return [Guard("integer", sink.bits, int(sink.unsigned))]


def _holds(sink: ColumnType, source: ColumnType) -> bool:
    """Whether every integer of the source is one of the sink."""
    if sink.bits is None:
        return True
    if source.bits is None or (sink.unsigned and not source.unsigned):
        return False
    return sink.bits >= source.bits + (1 if source.unsigned and not sink.unsigned else 0)


def _into_decimal(source: ColumnType, sink: ColumnType) -> list[Guard] | None:
    numbers = (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT, Kind.TEXT)
    if source.kind not in numbers and not source.loose:
        return None
    if sink.precision is None and sink.scale is None:
        return [Guard("scale")] if source.loose or source.kind is Kind.TEXT else []
    guard = [Guard("scale", sink.precision, sink.scale or 0)]
    if source.loose or source.kind in (Kind.FLOAT, Kind.TEXT):
        return guard
    room = (sink.precision or 10**6) - (sink.scale or 0)
    if source.kind is Kind.INTEGER:
        roomy = source.bits is not None and len(str(2**source.bits)) <= room
        return [] if roomy and (sink.scale or 0) >= 0 else guard
    if source.precision is None or source.scale is None:
        return guard
    fits = source.scale <= (sink.scale or 0) and source.precision - source.scale <= room
    return [] if fits else guard


def _into_float(source: ColumnType, sink: ColumnType) -> list[Guard] | None:
    guard = [Guard("real", sink.bits)]
    if source.loose or source.kind is Kind.TEXT:
        return guard
    if source.kind is Kind.FLOAT:
        return [] if (sink.bits or 64) >= (source.bits or 64) else guard
    if source.kind is Kind.INTEGER:
        exact = 24 if sink.bits == 32 else 53
        return [] if source.bits is not None and source.bits <= exact else guard
    return None


def _into_text(source: ColumnType, sink: ColumnType) -> list[Guard] | None:
    if source.kind is Kind.BYTES and not source.loose:
        return None
    if source.kind is Kind.BOOLEAN and not source.loose:
        return None
    known = source.length
    if source.kind is Kind.UUID:
        known = 36
    if sink.length is None and not source.loose and source.kind in _TEXTUAL:
        return []
    if known is not None and sink.length is not None and known <= sink.length and not source.loose:
        return []
    return [Guard("text", sink.length)]


def _into_time(source: ColumnType, sink: ColumnType, loose: bool) -> list[Guard] | None:
    guards: list[Guard] = []
    if source.kind is not sink.kind or source.loose:
        day = source.kind is Kind.DATE and sink.kind is Kind.TIMESTAMP
        if not loose and not day:
            return None
        guards.append(Guard(sink.kind.value))
    digits = 6 if sink.precision is None else sink.precision
    if loose or (source.precision is None and digits < 6) or (source.precision or 0) > digits:
        guards.append(Guard("fraction", digits))
    return guards
