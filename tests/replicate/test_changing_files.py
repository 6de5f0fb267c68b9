"""Source files that come, go or change between the description and the reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conformance import read_all, request_for
from replication_kit import Job, definition

from tasks.replicate.connector import Lane, Part, SourceError
from tasks.replicate.connectors.file import Files
from tasks.replicate.connectors.file.sink import FileSink


def _write(path: Path, columns: str, values: str) -> None:
    """One row into a file of the format that its ending tells."""
    row = dict(zip(columns.split(","), values.split(","), strict=True))
    if path.suffix == ".parquet":
        pq.write_table(pa.table({name: [value] for name, value in row.items()}), path)
    elif path.suffix == ".jsonl":
        members = ", ".join(f'"{name}": "{value}"' for name, value in row.items())
        path.write_text(f"{{{members}}}\n")
    else:
        path.write_text(f"{columns}\n{values}\n")


def _removed(path: Path) -> None:
    path.unlink()


def _moved(path: Path) -> None:
    path.rename(path.with_name(f"orders-3{path.suffix}"))


def _replaced(path: Path) -> None:
    other = path.with_name(f"other{path.suffix}")
    _write(other, "id,a,c", "9,a9,c9")
    other.replace(path)


CHANGES = [_removed, _moved, _replaced]
FORMATS = ["csv", "jsonl", "parquet"]


@pytest.fixture(params=FORMATS)
def orders(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    for number in "12":
        path = tmp_path / f"orders-{number}.{request.param}"
        _write(path, "id,a,b", f"{number},a{number},b{number}")
    return {"path": str(tmp_path / f"orders-*.{request.param}"), "format": request.param}


def _second(config: dict[str, Any]) -> Path:
    return Path(config["path"].replace("*", "2"))


def test_a_file_that_joins_a_pattern_is_left_for_the_next_run(orders):
    with Files().source(orders) as source:
        request = request_for(source, "orders")
        _write(Path(orders["path"].replace("*", "3")), "id,a,c", "3,a3,c3")
        source.snapshot()
        assert read_all(source, request) == [("1", "a1", "b1"), ("2", "a2", "b2")]
        assert source.count(request) == 2
        assert len(source.reads(request)) == 2


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["snapshot", "read", "count"])
def test_a_file_that_goes_or_is_replaced_fails_the_run_by_its_name(
    orders: dict[str, Any], change: Callable[[Path], None], call: str
) -> None:
    lost = _second(orders)
    with Files().source(orders) as source:
        request = request_for(source, "orders")
        change(lost)
        told = f"orders-2.{orders['format']} was (removed|changed) while the run was at work"
        calls: dict[str, Callable[[], Any]] = {
            "snapshot": source.snapshot,
            "read": lambda: read_all(source, request),
            "count": lambda: source.count(request),
        }
        with pytest.raises(SourceError, match=told):
            calls[call]()


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_goes_while_another_is_read_fails_the_run_by_its_name(
    orders: dict[str, Any], change: Callable[[Path], None]
) -> None:
    with Files().source(orders) as source:
        found = source.read(request_for(source, "orders"), Part(0), Lane.ROWS)
        assert next(found).data == [("1", "a1", "b1")]
        change(_second(orders))
        told = f"orders-2.{orders['format']} was (removed|changed) while the run was at work"
        with pytest.raises(SourceError, match=told):
            list(found)


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_a_run_reads_the_files_that_it_began_with(orders, mode, tmp_path, monkeypatch):
    target = tmp_path / "sink.csv"
    target.write_text("id,a,b\n0,old,old\n")
    work = definition({"table": "orders"}, {"table": "sink"}, mode, verify="checksum")
    job = Job(orders, {"path": str(target), "format": "csv"}, work, ("file", "file"))
    changes = [lambda: _write(Path(orders["path"].replace("*", "3")), "id,a,c", "3,a3,c3")]
    write = FileSink.write

    def changed(self: FileSink, *given: Any, **named: Any) -> int:
        changes.pop()()
        return write(self, *given, **named)

    monkeypatch.setattr(FileSink, "write", changed)
    job.run()
    assert target.read_text() == "id,a,b\n1,a1,b1\n2,a2,b2\n"
    _removed(Path(orders["path"].replace("*", "3")))
    changes.append(_second(orders).unlink)
    with pytest.raises(SourceError, match=r"orders-2\.\w+ was removed"):
        job.run()


@pytest.mark.parametrize("lane", [Lane.ROWS, Lane.COPY_CSV])
def test_a_csv_file_that_lacks_a_column_by_now_is_told_with_it(tmp_path, lane, monkeypatch):
    """Also where nothing shows that it was changed: its time was set back."""
    path = tmp_path / "t.csv"
    path.write_text("id,a,b\n1,a1,b1\n")
    monkeypatch.setattr("tasks.replicate.connectors.file.source.state", lambda path: (1, 1, 1))
    with Files().source({"path": str(path), "format": "csv"}) as source:
        request = request_for(source, "t")
        path.write_text("id,a,c\n1,a1,c1\n")
        with pytest.raises(SourceError, match=r"t\.csv: has no column b$"):
            list(source.read(request, Part(0), lane))


def test_a_parquet_file_that_lacks_a_column_by_now_is_told_with_it(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    _write(path, "id,a,b", "1,a1,b1")
    monkeypatch.setattr("tasks.replicate.connectors.file.source.state", lambda path: (1, 1, 1))
    with Files().source({"path": str(path), "format": "parquet"}) as source:
        request = request_for(source, "t")
        _write(path, "id,a,c", "1,a1,c1")
        with pytest.raises(SourceError, match=r"t\.parquet: has no column b$"):
            read_all(source, request)
