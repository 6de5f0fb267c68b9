"""The content of a query's result as one comparable value, summed up by the database itself."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

# Every row as text, hashed; the sums do not depend on the order of the rows, and a row that is
# there twice counts twice.
CONTENT = """
select count(*), coalesce(sum(('x' || left(h, 16))::bit(64)::bigint::numeric), 0),
  coalesce(sum(('x' || right(h, 16))::bit(64)::bigint::numeric), 0)
from (select md5(t::text) as h from ({query}) as t) as hashed
"""


@dataclass(frozen=True, slots=True)
class Content:
    """How many rows, and a digest of all of them."""

    rows: int
    digest: str


def read_content(database: str, query: str) -> Content:
    """Sum up what `query` gives in `database` (libpq conninfo). The query is trusted."""
    with psycopg.connect(database) as connection:
        connection.execute("set timezone to 'UTC'")
        row = connection.execute(CONTENT.format(query=query)).fetchone()  # type: ignore[arg-type]
    assert row is not None
    rows, high, low = row
    return Content(rows, f"{int(high) % 2**64:016x}{int(low) % 2**64:016x}")
