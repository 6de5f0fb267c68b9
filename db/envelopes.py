"""Datasource configurations at rest: AES-256-GCM under a wrapped data key (R-X1).

An envelope is a JSON object. Its data key is fresh, wrapped (AES key wrap, RFC 3394) by a
key-encryption key of the keyring. The datasource's id and the envelope's format are additional
authenticated data, so an envelope opens for its own datasource and for no other.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import (
    InvalidUnwrap,
    aes_key_unwrap,
    aes_key_wrap,
)

from db.keyring import Keyring

FORMAT = 1
_NONCE_BYTES = 12
_TAG_BYTES = 16
_WRAPPED_BYTES = 40
_FIELDS = frozenset({"format", "datasource", "key_version", "wrapped_key", "nonce", "ciphertext"})


class EnvelopeError(Exception):
    """An envelope cannot be opened; the message names its datasource and never the content."""


class OtherKey(EnvelopeError):
    """The keyring's key of that version is not the one that sealed the envelope."""


def seal(keyring: Keyring, datasource_id: UUID, config: Mapping[str, Any]) -> dict[str, Any]:
    """Encrypt a datasource's configuration with a fresh data key under the current version."""
    data_key = AESGCM.generate_key(bit_length=256)
    nonce = os.urandom(_NONCE_BYTES)
    plaintext = json.dumps(dict(config), ensure_ascii=False, separators=(",", ":")).encode()
    ciphertext = AESGCM(data_key).encrypt(nonce, plaintext, _additional_data(datasource_id))
    return {
        "format": FORMAT,
        "datasource": str(datasource_id),
        "key_version": keyring.current,
        "wrapped_key": _text(aes_key_wrap(keyring.key(keyring.current), data_key)),
        "nonce": _text(nonce),
        "ciphertext": _text(ciphertext),
    }


def open_envelope(
    keyring: Keyring, datasource_id: UUID, envelope: Mapping[str, Any], *, name: str
) -> dict[str, Any]:
    """Decrypt the configuration of the datasource ``name`` with the id ``datasource_id``.

    Raises EnvelopeError where the envelope is malformed, was altered, belongs to another
    datasource, or needs a key that the keyring lacks.
    """
    _check_shape(envelope, name)
    if envelope["datasource"] != str(datasource_id):
        _fail(name, "its envelope belongs to another datasource; set its credentials again")
    data_key = _unwrap(keyring, envelope, name)
    try:
        plaintext = AESGCM(data_key).decrypt(
            _bytes(envelope, "nonce", name, _NONCE_BYTES),
            _bytes(envelope, "ciphertext", name),
            _additional_data(datasource_id),
        )
    except InvalidTag:
        _fail(name, "its envelope was altered; set its credentials again")
    try:
        config = json.loads(plaintext)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        _fail(name, "its envelope holds no configuration; set its credentials again")
    return config


def check_key(keyring: Keyring, envelope: Mapping[str, Any], *, name: str) -> None:
    """Whether the keyring's key unwraps the data key; the content stays sealed.

    Raises OtherKey where another key of that version sealed it, and EnvelopeError as
    ``open_envelope`` does.
    """
    _check_shape(envelope, name)
    _unwrap(keyring, envelope, name)


def rewrap(
    keyring: Keyring, envelope: Mapping[str, Any], *, name: str | None = None
) -> dict[str, Any]:
    """The same envelope with its data key wrapped under the current version (R-X3).

    Only ``key_version`` and ``wrapped_key`` change; one that is current already is returned as
    it is, so that repeating costs nothing. Raises EnvelopeError, naming ``name`` or else the id.
    """
    label = name or str(envelope.get("datasource"))
    _check_shape(envelope, label)
    if envelope["key_version"] == keyring.current:
        return dict(envelope)
    data_key = _unwrap(keyring, envelope, label)
    return {
        **envelope,
        "key_version": keyring.current,
        "wrapped_key": _text(aes_key_wrap(keyring.key(keyring.current), data_key)),
    }


def _unwrap(keyring: Keyring, envelope: Mapping[str, Any], name: str) -> bytes:
    version = envelope["key_version"]
    if version not in keyring:
        _fail(
            name,
            f"it is sealed with key version {version!r}, which this keyring lacks "
            f"(it holds {', '.join(keyring.versions)}); add that key to CLAIMCHECK_KEYRING_FILE",
        )
    wrapped = _bytes(envelope, "wrapped_key", name, _WRAPPED_BYTES)
    try:
        return aes_key_unwrap(keyring.key(version), wrapped)
    except InvalidUnwrap:
        _fail(
            name,
            f"the key {version!r} of this keyring is not the one that sealed it; "
            "use the keyring file of the host that stored it",
            OtherKey,
        )


def _check_shape(envelope: Mapping[str, Any], name: str) -> None:
    if not isinstance(envelope, Mapping) or set(envelope) != _FIELDS:
        _fail(name, "its envelope is malformed; set its credentials again")
    if envelope["format"] != FORMAT or isinstance(envelope["format"], bool):
        _fail(name, "its envelope has a format that this version does not know; upgrade Claimcheck")
    if not isinstance(envelope["key_version"], str):
        _fail(name, "its envelope is malformed; set its credentials again")


def _bytes(envelope: Mapping[str, Any], field: str, name: str, length: int | None = None) -> bytes:
    value = envelope[field]
    try:
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        content = b""
    # b64decode ignores stray bits in the last character: an altered envelope must not pass.
    whole = len(content) == length if length is not None else len(content) >= _TAG_BYTES
    if not whole or _text(content) != value:
        _fail(name, "its envelope was altered; set its credentials again")
    return content


def _additional_data(datasource_id: UUID) -> bytes:
    return f"claimcheck datasource {datasource_id} format {FORMAT}".encode()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _fail(name: str, fault: str, kind: type[EnvelopeError] = EnvelopeError) -> NoReturn:
    # Without its cause: the libraries' errors say nothing useful and may carry the content.
    raise kind(f"the datasource {name!r} cannot be opened: {fault}") from None
