"""The keyring file: created once, checked when loaded, rotated without losing a key."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from db import keyring
from db.keyring import Keyring, KeyringError


def encoded(byte: int, length: int = 32) -> str:
    return base64.b64encode(bytes([byte]) * length).decode()


def write(path: Path, content: object, mode: int = 0o600) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keyring.json"


def test_init_writes_a_private_file_that_loads__R_X1(path: Path) -> None:
    made = keyring.init(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = Keyring.load(path)
    assert (loaded.current, loaded.versions) == ("v1", ("v1",))
    assert loaded.key("v1") == made.key("v1")
    assert len(loaded.key("v1")) == 32
    assert os.listdir(path.parent) == ["keyring.json"]


def test_init_creates_its_folder_for_the_owner_only(tmp_path: Path) -> None:
    keyring.init(tmp_path / "home" / "keyring.json")
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_init_never_overwrites(path: Path) -> None:
    first = keyring.init(path)
    with pytest.raises(KeyringError, match="exists already"):
        keyring.init(path)
    assert Keyring.load(path).key("v1") == first.key("v1")
    assert os.listdir(path.parent) == ["keyring.json"]


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


def test_init_without_hard_links_still_never_overwrites(path: Path, no_hard_links: None) -> None:
    first = keyring.init(path)
    with pytest.raises(KeyringError, match="exists already"):
        keyring.init(path)
    assert Keyring.load(path).key("v1") == first.key("v1")
    assert os.listdir(path.parent) == ["keyring.json"]


def test_init_without_hard_links_still_shows_no_half_file(
    path: Path, no_hard_links: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_and_look(*given: Any, **options: Any) -> int:
        descriptor = opened(*given, **options)
        if path.exists():
            Keyring.load(path)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_look)
    keyring.init(path)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_processes_that_start_at_once_share_one_key(
    path: Path, links: bool, request: pytest.FixtureRequest
) -> None:
    if not links:
        request.getfixturevalue("no_hard_links")
    found: list[bytes] = []
    start = threading.Barrier(8)

    def begin() -> None:
        start.wait(timeout=10)
        found.append(keyring.load_or_init(path).key("v1"))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_rotation_keeps_every_earlier_key__R_X3(path: Path) -> None:
    first = keyring.init(path)
    second = keyring.add_version(path)
    assert (second.current, second.versions) == ("v2", ("v1", "v2"))
    loaded = Keyring.load(path)
    assert loaded.key("v1") == first.key("v1")
    assert loaded.key("v2") == second.key("v2") != first.key("v1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["keyring.json"]


def test_a_key_can_be_spread_before_it_is_used__R_X3(path: Path) -> None:
    keyring.init(path)
    assert keyring.add_version(path, "2027-01", make_current=False).current == "v1"
    assert keyring.set_current(path, "2027-01").current == "2027-01"
    assert keyring.remove_version(path, "v1").versions == ("2027-01",)


def test_rotations_at_once_lose_no_key__R_X3(path: Path) -> None:
    keyring.init(path)
    start = threading.Barrier(6)

    def rotate() -> None:
        start.wait(timeout=10)
        keyring.add_version(path)

    threads = [threading.Thread(target=rotate) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert Keyring.load(path).versions == tuple(f"v{number}" for number in range(1, 8))


def test_rotation_writes_through_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    keyring.init(target)
    link.symlink_to(target)
    keyring.add_version(link)
    assert link.is_symlink()
    assert Keyring.load(target).current == "v2"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: keyring.add_version(path, "v1"), "already"),
        (lambda path: keyring.add_version(path, "a b"), "letters, digits"),
        (lambda path: keyring.set_current(path, "v9"), "it holds v1"),
        (lambda path: keyring.remove_version(path, "v1"), "current"),
        (lambda path: keyring.remove_version(path, "v9"), "it holds v1"),
    ],
)
def test_a_refused_edit_changes_nothing(path: Path, call, says: str) -> None:
    keyring.init(path)
    before = path.read_bytes()
    with pytest.raises(KeyringError, match=says):
        call(path)
    assert path.read_bytes() == before


GOOD = {"current": "v1", "keys": {"v1": encoded(7)}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{not json", "is not JSON (line 1"),
        ("[]", "does not hold exactly"),
        ({"current": "v1"}, "does not hold exactly"),
        ({**GOOD, "extra": 1}, "does not hold exactly"),
        ({"current": "v1", "keys": {}}, "malformed"),
        ({"current": 1, "keys": GOOD["keys"]}, "malformed"),
        ({"current": "v2", "keys": GOOD["keys"]}, "names 'v2' as current"),
        ({"current": "v1", "keys": {"v1": encoded(7, 16)}}, "holds 16 bytes as key 'v1', not 32"),
        ({"current": "v1", "keys": {"v1": encoded(7) + "!"}}, "no base64 text as key 'v1'"),
        ({"current": "v1", "keys": {"v1": None}}, "no base64 text as key 'v1'"),
        ({"current": "v 1", "keys": {"v 1": encoded(7)}}, "bad name"),
        ({"current": "v1", "keys": {"v1": encoded(7), "v2": encoded(7)}}, "same key under two"),
        (f'{{"current": "v1", "current": "v1", "keys": {{"v1": "{encoded(7)}"}}}}', "twice"),
    ],
)
def test_a_malformed_file_is_named_with_its_setting_and_shows_no_key__R_X2(
    path: Path, content: object, says: str
) -> None:
    write(path, content)
    with pytest.raises(KeyringError) as caught:
        Keyring.load(path)
    message = str(caught.value)
    assert says in message
    assert message.startswith(f"CLAIMCHECK_KEYRING_FILE: the keyring {path} ")
    assert encoded(7)[:10] not in message
    assert caught.value.__cause__ is None


def test_a_missing_file_names_the_way_out(path: Path) -> None:
    says = r"does not exist; .*copy the file from a host.* keyring init"
    with pytest.raises(KeyringError, match=says):
        Keyring.load(path)


def test_a_folder_instead_of_a_file_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match="cannot be read: Is a directory"):
        Keyring.load(tmp_path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    write(path, GOOD, mode)
    with pytest.raises(KeyringError, match="writable by others"):
        Keyring.load(path)


def test_a_file_that_others_may_read_is_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, GOOD, 0o444)
    with caplog.at_level(logging.WARNING):
        assert Keyring.load(path).current == "v1"
    assert "CLAIMCHECK_KEYRING_FILE" in caplog.text
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_private_file_gives_no_warning(
    path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, GOOD, mode)
    Keyring.load(path)
    assert caplog.text == ""


def test_repr_shows_no_key_and_pickle_is_refused__R_X2(path: Path) -> None:
    write(path, GOOD)
    loaded = Keyring.load(path)
    assert repr(loaded) == "<Keyring current='v1' versions=['v1']>"
    with pytest.raises(TypeError):
        pickle.dumps(loaded)
