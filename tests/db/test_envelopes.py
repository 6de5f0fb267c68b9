"""Envelopes open for their own datasource, with their own key, unaltered; for nothing else."""

from __future__ import annotations

import base64
import json
from typing import Any
from uuid import UUID, uuid4

import pytest

from db.envelopes import EnvelopeError, OtherKey, check_key, open_envelope, rewrap, seal
from db.keyring import Keyring

V1, V2 = bytes(range(32)), bytes(range(32, 64))
ONE = Keyring("v1", {"v1": V1})
BOTH = Keyring("v2", {"v1": V1, "v2": V2})
ID = UUID("00000000-0000-4000-8000-00000000000a")
CONFIG = {"url": "postgresql://app:s3cr3t-ünïcode@db/shop", "options": {"lag": 2}}


def refusal(keyring: Keyring, envelope: Any, datasource: UUID = ID) -> str:
    with pytest.raises(EnvelopeError) as caught:
        open_envelope(keyring, datasource, envelope, name="shop")
    message = str(caught.value)
    assert message.startswith("the datasource 'shop' cannot be opened: ")
    assert "s3cr3t" not in message
    assert caught.value.__cause__ is None
    return message


def test_what_is_sealed_opens_again__R_X1() -> None:
    envelope = seal(ONE, ID, CONFIG)
    assert open_envelope(ONE, ID, json.loads(json.dumps(envelope)), name="shop") == CONFIG
    assert envelope["key_version"] == "v1"
    assert set(envelope) == {
        "format", "datasource", "key_version", "wrapped_key", "nonce", "ciphertext",
    }  # fmt: skip


def test_the_stored_form_holds_no_plain_text__R_X1() -> None:
    envelope = seal(ONE, ID, CONFIG)
    stored = json.dumps(envelope)
    assert "s3cr3t" not in stored
    for field in ("wrapped_key", "nonce", "ciphertext"):
        assert b"s3cr3t" not in base64.b64decode(envelope[field])


def test_each_envelope_has_a_fresh_data_key_and_nonce__R_X1() -> None:
    first, second = seal(ONE, ID, CONFIG), seal(ONE, ID, CONFIG)
    for field in ("wrapped_key", "nonce", "ciphertext"):
        assert first[field] != second[field]


def test_an_envelope_of_another_datasource_is_refused__R_X1() -> None:
    other = uuid4()
    envelope = seal(ONE, other, CONFIG)
    assert "belongs to another datasource" in refusal(ONE, envelope)
    # Also where the id that it states was changed to match.
    assert "was altered" in refusal(ONE, {**envelope, "datasource": str(ID)})


@pytest.mark.parametrize("field", ["wrapped_key", "nonce", "ciphertext"])
def test_every_altered_byte_is_refused__R_X1(field: str) -> None:
    envelope = seal(ONE, ID, {"url": "x://u:s3cr3t@h"})
    content = base64.b64decode(envelope[field])
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        refusal(ONE, {**envelope, field: base64.b64encode(bytes(changed)).decode()})
    for cut in (b"", content[:-1], content + b"\0"):
        refusal(ONE, {**envelope, field: base64.b64encode(cut).decode()})


def test_every_altered_character_is_refused__R_X1() -> None:
    envelope = seal(ONE, ID, {"url": "x://u:s3cr3t@h"})
    for field in ("wrapped_key", "nonce", "ciphertext"):
        text = envelope[field]
        for position in range(len(text)):
            other = "A" if text[position] != "A" else "B"
            refusal(ONE, {**envelope, field: text[:position] + other + text[position + 1 :]})


def test_a_wrong_key_is_refused__R_X1() -> None:
    wrong = Keyring("v1", {"v1": V2})
    assert "is not the one that sealed it" in refusal(wrong, seal(ONE, ID, CONFIG))


def test_a_key_is_checked_without_opening_the_content__R_X3() -> None:
    envelope = {**seal(ONE, ID, CONFIG), "ciphertext": base64.b64encode(bytes(40)).decode()}
    check_key(ONE, envelope, name="shop")
    with pytest.raises(OtherKey, match="'shop'"):
        check_key(Keyring("v1", {"v1": V2}), envelope, name="shop")
    with pytest.raises(EnvelopeError, match="was altered") as caught:
        check_key(ONE, {**envelope, "wrapped_key": "AA=="}, name="shop")
    assert not isinstance(caught.value, OtherKey)


def test_a_missing_version_is_named_with_the_way_out__R_X3() -> None:
    message = refusal(ONE, seal(BOTH, ID, CONFIG))
    assert "key version 'v2', which this keyring lacks (it holds v1)" in message
    assert "CLAIMCHECK_KEYRING_FILE" in message


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"format": True}, {"format": "1"}, {"key_version": 1}, {"extra": 1},
        {"nonce": None}, {"ciphertext": 5}, {"wrapped_key": "not base64!"},
    ],
)  # fmt: skip
def test_a_malformed_envelope_is_refused(change: dict[str, Any]) -> None:
    refusal(ONE, {**seal(ONE, ID, CONFIG), **change})


@pytest.mark.parametrize("envelope", [{}, [], None, "text", {"format": 1}])
def test_something_else_is_refused(envelope: Any) -> None:
    refusal(ONE, envelope)


def test_rewrap_changes_the_wrapping_alone__R_X3() -> None:
    before = seal(ONE, ID, CONFIG)
    after = rewrap(BOTH, before)
    assert {field for field in before if before[field] != after[field]} == {
        "key_version",
        "wrapped_key",
    }
    only_new = Keyring("v2", {"v2": V2})
    assert open_envelope(only_new, ID, after, name="shop") == CONFIG
    assert before["key_version"] == "v1"


def test_rewrap_repeated_changes_nothing__R_X3() -> None:
    once = rewrap(BOTH, seal(ONE, ID, CONFIG))
    assert rewrap(BOTH, once) == once


def test_rewrap_without_the_old_key_names_the_datasource__R_X3() -> None:
    envelope = seal(ONE, ID, CONFIG)
    only_new = Keyring("v2", {"v2": V2})
    with pytest.raises(EnvelopeError, match=r"'shop'.*lacks"):
        rewrap(only_new, envelope, name="shop")
    with pytest.raises(EnvelopeError, match=str(ID)):
        rewrap(only_new, envelope)
