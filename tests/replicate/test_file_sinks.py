"""File sinks that cannot be written: a full disk, and what is no file."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replication_kit import Job, definition

from tasks.replicate.connector import SinkError, SourceError

MODES = ["complete", "complete-atomic"]


def _job(source: Path, sink: Path, mode: str = "complete", **more: Any) -> Job:
    work = definition({"table": source.stem}, {"table": sink.stem}, mode, **more)
    configs = [{"path": str(path), "format": path.suffix[1:]} for path in (source, sink)]
    return Job(configs[0], configs[1], work, ("file", "file"))


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file gets longer than ``room`` bytes. Not as a fixture: pytest prints before its end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A source of some 400 kB."""
    source = tmp_path / "many.csv"
    dice = random.Random(1)
    source.write_text("a\n" + "".join(f"{dice.randbytes(40).hex()}\n" for _ in range(5000)))
    return source


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_full_disk_is_told_with_the_sink_file(many, tmp_path, kind, mode):
    sink = tmp_path / f"sink.{kind}"
    job = _job(many, sink, mode, create=True)
    with pytest.raises(SinkError) as caught, full_disk(64 * 1024):
        job.run()
    assert str(caught.value) == f"sink: {sink}: File too large"


def test_a_disk_that_is_full_before_the_first_row_is_told_with_the_sink_file(many, tmp_path):
    sink = tmp_path / "sink.csv"
    job = _job(many, sink, create=True)
    with pytest.raises(SinkError) as caught, full_disk(0):
        job.run()
    assert str(caught.value) == f"sink: {sink}: File too large"


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("what", ["fifo", "socket", "folder", "device"])
def test_a_sink_that_is_no_file_is_refused_and_left(tmp_path, what, kind, create):
    source, folder = tmp_path / "t.csv", tmp_path / "to"
    source.write_text("a\n1\n")
    folder.mkdir()
    sink = folder / f"p.{kind}"
    if what == "fifo":
        os.mkfifo(sink)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(sink))
    elif what == "folder":
        sink.mkdir()
    else:
        # One of its own: what fails here would replace the one that it names.
        try:
            os.mknod(sink, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes a device")
    before = stat.S_IFMT(sink.stat().st_mode)
    job = _job(source, sink, create=create)
    # By the folder and its table's name, and by the path of the sink itself.
    ways = [{**job.sink, "path": str(folder)}]
    if what != "folder":
        ways.append({**job.sink})
    for config in ways:
        job.sink = config
        with pytest.raises(SinkError, match=r"is no file: name another table$"):
            job.run()
    assert stat.S_IFMT(sink.stat().st_mode) == before
    assert list(folder.iterdir()) == [sink]


def test_a_parquet_source_that_cannot_be_opened_is_told_by_its_file(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    (tmp_path / "t-1.parquet").write_bytes(b"")

    def broken(path: Path) -> Any:
        raise OSError(5, "Error reading bytes from file. Detail: [errno 5] Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", broken)
    config = {"path": str(tmp_path / "t-*.parquet"), "format": "parquet"}
    sink = {"path": str(tmp_path / "sink.csv"), "format": "csv"}
    work = definition({"table": "t"}, {"table": "sink"}, "complete", create=True)
    with pytest.raises(SourceError, match=r"^source: .*/t-1\.parquet: Input/output error$"):
        Job(config, sink, work, ("file", "file")).run()
