"""Loads into one folder: side by side, of older attempts, and of two jobs with one target."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance import batches
from files_kit import load_of
from replication_kit import Job, definition
from support.waiting import until

from tasks.replicate.connector import CommitUnknown, Fenced, SinkError
from tasks.replicate.connectors.file import Files, fence
from tasks.replicate.connectors.file import sink as file_sink

Worker = Callable[[Job], "subprocess.Popen[bytes]"]
ROWS = 400_000
"""More than a megabyte, which is what a file's writer holds back."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.csv"
    path.write_text("a\n" + "".join(f"{i}\n" for i in range(ROWS)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "to"
    found.mkdir()
    for name in ("one", "two"):
        (found / f"{name}.csv").write_text("a\nold\n")
    return found


def job(source: Path, folder: Path, table: str, mode: str, **more: Any) -> Job:
    return Job(
        {"path": str(source), "format": "csv"},
        {"path": str(folder), "format": "csv"},
        definition({"table": source.stem}, {"table": table}, mode, **more),
        ("file", "file"),
    )


def loading(folder: Path, table: str) -> bool:
    """Whether rows have gone to the hidden file that shall become the table."""
    hidden = [*folder.glob(f".claimcheck_new.*.{table}.csv")]
    hidden += folder.glob(f".claimcheck_stage.*.{table}.csv")
    return any(path.stat().st_size > 100 for path in hidden)


def lines(folder: Path, table: str) -> int:
    return len((folder / f"{table}.csv").read_text().splitlines()) - 1


def refuse_to_replace(patch: pytest.MonkeyPatch, target: Path, error: OSError) -> None:
    """Let nothing be put in the target's place."""
    real = Path.replace

    def refusing(path: Path, to: Path) -> Path:
        if to == target:
            raise error
        return real(path, to)

    patch.setattr(Path, "replace", refusing)


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_two_jobs_load_into_one_folder_at_once(
    source: Path, folder: Path, worker: Worker, mode: str
) -> None:
    slow = job(source, folder, "one", mode, bandwidth="1MB")
    process = worker(slow)
    until("the first load to begin", lambda: loading(folder, "one"), 30)
    # Held where it is, so that the other is sure to begin and to end meanwhile.
    process.send_signal(signal.SIGSTOP)
    try:
        job(source, folder, "two", mode).run()
        assert loading(folder, "one")
        assert lines(folder, "two") == ROWS
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 0
    assert lines(folder, "one") == ROWS


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_a_frozen_worker_does_not_hold_up_the_next_attempt_and_writes_nothing__R_F5(
    source: Path, folder: Path, worker: Worker, mode: str
) -> None:
    task = job(source, folder, "one", mode, bandwidth="1MB")
    process = worker(task)
    until("the load to begin", lambda: loading(folder, "one"), 30)
    process.send_signal(signal.SIGSTOP)
    try:
        task.fence += 1
        del task.definition["bandwidth"]
        began = time.monotonic()
        task.run()
        assert time.monotonic() - began < 10
        written = (folder / "one.csv").stat()
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) != 0
    assert (folder / "one.csv").stat().st_ino == written.st_ino
    assert lines(folder, "one") == ROWS


def test_an_attempt_that_is_overtaken_before_it_commits_replaces_nothing__R_F5(
    folder: Path,
) -> None:
    config = {"path": str(folder), "format": "csv"}
    older = load_of(config, "one", mode="complete-atomic", how="rename")
    newer = replace(older, fence=2, run_id="newer")
    with Files().sink(config) as old, Files().sink(config) as new:
        for sink, load, text in ((old, older, "old"), (new, newer, "new")):
            sink.stage(load)
            sink.write(load, batches([(text,)]), staging=True)
            sink.begin(load)
            sink.publish(load)
        with pytest.raises(Fenced):
            old.commit()
        assert (folder / "one.csv").read_text() == "a\nold\n"
        new.commit()
    assert (folder / "one.csv").read_text() == "a\nnew\n"


def test_two_jobs_with_one_target_do_not_mix_their_loads(folder: Path) -> None:
    config = {"path": str(folder), "format": "csv"}
    one = load_of(config, "one", run_id="run-1", scope="job-1")
    two = replace(one, run_id="run-2", scope="job-2")
    with Files().sink(config) as first, Files().sink(config) as second:
        first.begin(one)
        first.truncate(one)
        for step in (0, 1):
            load = replace(two, step=step)
            second.begin(load)
            second.write(load, batches([("two",)] * step), staging=False)
            second.commit()
        # Whoever empties the file last fills it.
        first.commit()
        for step in (0, 1):
            load = replace(one, step=step)
            first.begin(load)
            first.write(load, batches([("one",)] * step), staging=False)
            if step == 0:
                first.commit()
        second.begin(two)
        second.truncate(two)
        second.commit()
        with pytest.raises(SinkError, match="run run-2 has begun to write one since"):
            first.commit()
        first.rollback()
        with pytest.raises(SinkError, match="run run-2 has begun to write one since"):
            first.begin(replace(one, step=1))
        assert (folder / "one.csv").read_text() == "a\n"


def test_a_job_that_only_began_does_not_take_anothers_turn(folder: Path) -> None:
    config = {"path": str(folder), "format": "csv"}
    one = load_of(config, "one", run_id="run-1", scope="job-1")
    two = replace(one, run_id="run-2", scope="job-2", mode="complete-atomic", how="rename")
    with Files().sink(config) as first, Files().sink(config) as second:
        first.begin(one)
        first.truncate(one)
        first.commit()
        second.begin(two)
        second.rollback()
        last = replace(one, step=1)
        first.begin(last)
        first.write(last, batches([("one",)]), staging=False)
        first.commit()
    assert (folder / "one.csv").read_text() == "a\none\n"


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_an_error_after_the_file_was_replaced_is_settled_as_replaced__R_F5(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    failed: list[Path] = []
    whole = file_sink._sync

    def broken(path: Path) -> None:
        if path == folder and len(failed) < 2:
            failed.append(path)
            raise OSError(5, "Input/output error")
        whole(path)

    monkeypatch.setattr(file_sink, "_sync", broken)
    monkeypatch.setattr("tasks.replicate.ends._NAP_SECONDS", 0.01)
    job(source, folder, "one", mode).run()
    assert len(failed) == 2
    assert lines(folder, "one") == ROWS
    assert not list(folder.glob(".claimcheck_[ns]*"))


def test_an_error_before_the_file_was_replaced_is_settled_as_nothing__R_F5(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"path": str(folder), "format": "csv"}
    load = load_of(config, "one")
    with Files().sink(config) as sink:
        sink.begin(load)
        sink.truncate(load)
        with monkeypatch.context() as patch:
            patch.setattr(file_sink, "_keep_mode", lambda old, new: new.chmod(0o600))
            refuse_to_replace(patch, folder / "one.csv", OSError(5, "Input/output error"))
            with pytest.raises(CommitUnknown):
                sink.commit()
        assert sink.settle(load) is False
    assert (folder / "one.csv").read_text() == "a\nold\n"
    assert not list(folder.glob(".claimcheck_new*"))


def test_a_record_that_cannot_be_written_leaves_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"path": str(folder), "format": "csv"}
    load = load_of(config, "one")
    with Files().sink(config) as sink:
        sink.begin(load)
        sink.truncate(load)
        with monkeypatch.context() as patch:

            def full(number: int) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "fsync", full)
            with pytest.raises(SinkError, match="No space left") as caught:
                sink.commit()
        assert not isinstance(caught.value, CommitUnknown)
    assert (folder / "one.csv").read_text() == "a\nold\n"


def test_a_file_that_another_job_has_made_meanwhile_is_not_made_again(folder: Path) -> None:
    config = {"path": str(folder), "format": "csv"}
    columns = load_of(config, "one").relation.columns  # type: ignore[union-attr]
    with Files().sink(config) as sink:
        assert sink.describe(("made",)) is None
        (folder / "made.csv").write_text("a\nkept\n")
        sink.create(("made",), columns, (), "file")
        assert sink.describe(("made",)) is not None
        sink.uncreate(("made",))
    assert (folder / "made.csv").read_text() == "a\nkept\n"


def test_a_lock_that_is_not_let_go_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "LOCK_SECONDS", 0.1)
    config = {"path": str(folder), "format": "csv"}
    load = load_of(config, "one")
    with (
        fence.Fence(folder / "two.csv").locked(lambda: None),
        Files().sink(config) as sink,
        pytest.raises(SinkError, match=r"\.claimcheck_lock was locked for 0\.1 s.* frozen"),
    ):
        sink.begin(load)


@pytest.mark.parametrize(
    "record",
    ["[1]", "5", "null", '"abc"', '{"job": 5}', '{"job": {"0": "x"}}', "[]", "[" * 100_000, "{"],
)
def test_a_record_that_is_none_is_refused_with_the_way_out(folder: Path, record: str) -> None:
    (folder / fence.RECORD).write_text(record)
    config = {"path": str(folder), "format": "csv"}
    load = load_of(config, "one")
    with Files().sink(config) as sink, pytest.raises(SinkError, match="remove it when no") as found:
        sink.begin(load)
    assert found.value.permanent
    assert (folder / "one.csv").read_text() == "a\nold\n"


def test_what_a_killed_process_was_to_make_is_removed_in_time(folder: Path) -> None:
    config = {"path": str(folder), "format": "csv"}
    load = load_of(config, "one")
    old, young = (folder / f".claimcheck_create.{number}.x.one.csv" for number in (1, 2))
    for path in (old, young):
        path.touch()
    os.utime(old, (time.time() - 2 * file_sink.MADE_SECONDS,) * 2)
    with Files().sink(config) as sink:
        sink.stage(load)
    assert (old.exists(), young.exists()) == (False, True)


def test_a_folder_that_cannot_be_synced_holds_the_file_all_the_same(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = file_sink._sync

    def unable(path: Path) -> None:
        if path == folder:
            raise OSError(22, "Invalid argument")
        whole(path)

    monkeypatch.setattr(file_sink, "_sync", unable)
    job(source, folder, "one", "complete").run()
    assert lines(folder, "one") == ROWS


def test_a_commit_that_came_to_nothing_says_why(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_replace(
        monkeypatch, folder / "one.csv", PermissionError(1, "Operation not permitted")
    )
    with pytest.raises(SinkError, match=r"nothing of it remained: .*one\.csv: Operation not perm"):
        job(source, folder, "one", "complete-atomic").run()


def test_a_link_to_itself_is_no_table(source: Path, folder: Path) -> None:
    (folder / "loop.csv").symlink_to(folder / "loop.csv")
    with pytest.raises(SinkError, match="is a link that leads to itself"):
        job(source, folder, "loop", "complete").run()
