"""Some rows on their way from a source to a sink, by rows or by columns.

Looking at each value in Python costs more than moving it. A column passes by a few calls that loop
in C, and what is found out for one of its guards serves the next, and the sink that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

Cell = None | bool | int | float | str | bytes
Row = tuple[Cell, ...]
Convert = Callable[[Any], Any]

BETWEEN = "\x1e"
"""Stands between texts while one call looks at many; hardly any text has it in it."""
_SHARE = 2 * 1024 * 1024
"""Bytes of a batch that is looked at as a whole, at most, where it is more than one row."""
_ZEROS = str.maketrans("123456789", "000000000")


class Side:
    """The values of one column in a batch, and what is known of them."""

    def __init__(self, values: Sequence[Cell]) -> None:
        self.values = values

    @cached_property
    def _known(self) -> tuple[frozenset[type], Sequence[Cell], str | None]:
        values = self.values
        try:
            # To join texts costs less than to ask each for its type, and fails where one is none.
            return frozenset({str} if values else ()), values, BETWEEN.join(values)  # type: ignore[arg-type]
        except TypeError:
            kinds = set(map(type, values))
        if type(None) in kinds:
            kinds.discard(type(None))
            values = [value for value in values if value is not None]
        return frozenset(kinds), values, None

    @property
    def kinds(self) -> frozenset[type]:
        """The types of the values that are not NULL."""
        return self._known[0]

    @property
    def present(self) -> Sequence[Cell]:
        """The values that are not NULL, in their order."""
        return self._known[1]

    @cached_property
    def joined(self) -> str:
        """Texts that are not NULL, with :data:`BETWEEN` between them, and perhaps in them."""
        found = self._known[2]
        return BETWEEN.join(self.present) if found is None else found  # type: ignore[arg-type]

    @cached_property
    def weight(self) -> int:
        """Bytes that the values take in memory, about."""
        try:
            return sum(map(len, self.values)) + len(self.values)  # type: ignore[arg-type]
        except TypeError:
            if not self.kinds & {str, bytes}:
                return 8 * len(self.values)
        return sum(len(v) + 1 if isinstance(v, str | bytes) else 8 for v in self.values)

    @cached_property
    def shapes(self) -> set[str]:
        """The different shapes of texts that are not NULL: the texts, with each digit made a 0.

        Where :data:`BETWEEN` is in a text, it is also among them.
        """
        shapes = self.joined.translate(_ZEROS).split(BETWEEN)
        if len(shapes) != len(self.present):
            shapes.append(BETWEEN)
        return set(shapes)


class Batch:
    """Some rows of cells, or bytes of a lane, with their counts; not to be changed."""

    __slots__ = ("_data", "_sides", "place", "rows", "size")

    def __init__(
        self,
        data: list[Row] | bytes,
        rows: int,
        size: int,
        place: tuple[str, int] | None = None,
    ) -> None:
        """``size`` is in bytes as they count for progress and bandwidth; an estimate in the row
        lane. ``place`` is for bytes in lines, where they are the first of a file: its name and the
        number of their first line, so that a sink can tell where what it stumbles over stands."""
        self._data: list[Row] | bytes | None = data
        self._sides: Sequence[Side] | None = None
        self.rows = rows
        self.size = size
        self.place = place

    @classmethod
    def of_rows(cls, rows: Sequence[Row], conversions: Mapping[int, Convert] | None = None) -> Self:
        """Of rows as a driver fetched them, with what ``conversions`` make of the values that are
        not NULL in the columns at these positions."""
        batch = cls(list(rows), len(rows), 0)
        batch.size = batch.weight
        if not conversions:
            return batch
        return batch.with_sides(
            {
                position: Side([None if v is None else convert(v) for v in side.values])
                for position, side in enumerate(batch.sides)
                if (convert := conversions.get(position)) is not None
            }
        )

    @classmethod
    def of_columns(cls, columns: Sequence[Sequence[Cell]], rows: int, size: int) -> Self:
        """Of rows that stand in columns already; ``data`` is made where somebody asks for it."""
        return cls._of_sides(list(map(Side, columns)), rows, size)

    @classmethod
    def _of_sides(cls, sides: Sequence[Side], rows: int, size: int) -> Self:
        made = cls(b"", rows, size)
        made._data, made._sides = None, sides
        return made

    @property
    def data(self) -> list[Row] | bytes:
        """The rows, or the bytes."""
        if self._data is None:
            assert self._sides is not None
            self._data = list(zip(*(side.values for side in self._sides), strict=True))
        return self._data

    @property
    def in_bytes(self) -> bool:
        """Whether these are bytes of a lane."""
        return isinstance(self._data, bytes)

    @property
    def sides(self) -> Sequence[Side]:
        """The columns of the rows; none where there are no rows."""
        if self._sides is None:
            assert not isinstance(self._data, bytes)
            assert self._data is not None
            self._sides = list(map(Side, zip(*self._data, strict=True)))
        return self._sides

    @property
    def weight(self) -> int:
        """Bytes that the values take in memory, about."""
        return sum(side.weight for side in self.sides)

    def shares(self) -> Iterator[Self]:
        """The same rows in batches of which one can be looked at as a whole.

        What is known of a column takes as much memory as its values, and the calls that find it
        out let no other thread run meanwhile.
        """
        if self.in_bytes or self.rows <= 1 or self.weight <= _SHARE:
            yield self
            return
        # Long values may stand close together, so each half is weighed by itself.
        half = self.rows // 2
        for rows in (self.data[:half], self.data[half:]):
            yield from type(self)(rows, len(rows), self.size * len(rows) // self.rows).shares()

    def with_sides(self, changed: Mapping[int, Side]) -> Self:
        """The same rows with other values in some columns."""
        sides = [changed.get(position, side) for position, side in enumerate(self.sides)]
        return self._of_sides(sides, self.rows, self.size)
