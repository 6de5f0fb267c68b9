"""What is stored, as a definition file that ``apply`` takes back; each secret as ``${NAME}``."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from sqlalchemy.orm import Session

from db.envelopes import EnvelopeError
from db.keyring import Keyring
from db.models import Datasource, Job
from dispatch import catalog
from dispatch.catalog import datasources, jobs, jobschedules
from dispatch.definitions.jobdefinition import Connectors, defaults
from dispatch.durations import format_duration
from dispatch.misfires import Misfire
from dispatch.redaction import secrets_of


def export(session: Session, keyring: Keyring, connectors: Connectors) -> dict[str, Any]:
    """All datasources and jobs with the keys of the definition file, defaults left out.

    A child job of a pattern job is left out too: its parent's runs store it. A datasource that
    this keyring cannot open gets a ``${NAME}`` for each secret key of its connector.
    """
    found: dict[str, Any] = {}
    stored = catalog.all_datasources(session)
    if stored:
        found["datasources"] = {one.name: _datasource(one, keyring, connectors) for one in stored}
    own = [one for one in catalog.all_jobs(session) if one.parent_job_id is None]
    if own:
        found["jobs"] = {one.name: _job(session, one) for one in own}
    return found


def as_yaml(content: Mapping[str, Any]) -> str:
    """The text of a definition file."""
    yaml = YAML()
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(dict(content), text)
    return text.getvalue()


def variable(datasource: str, key: str) -> str:
    """The environment variable that stands for a secret: ``SHOP_URL``."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", f"{datasource}_{key}").upper()
    return f"_{name}" if name[0].isdigit() else name


def _datasource(stored: Datasource, keyring: Keyring, connectors: Connectors) -> dict[str, Any]:
    found: dict[str, Any] = {"connector": stored.connector}
    secret = connectors.secret_keys(stored.connector)
    try:
        config = datasources.open_config(keyring, stored)
    except EnvelopeError:
        config = dict.fromkeys(secret, "")
    for key, value in config.items():
        hidden = key in secret or secrets_of({key: value})
        found[key] = f"${{{variable(stored.name, key)}}}" if hidden else _literal(value)
    if not stored.enabled:
        found["enabled"] = False
    return found


def _job(session: Session, stored: Job) -> dict[str, Any]:
    found = jobs.as_file(stored)
    usual = defaults(stored.handler, found.get("mode"))
    del usual["overlap"]  # stated where it stands in the definition, also as the default
    stated = {
        key: value for key, value in (found.pop("retry", None) or {}).items()
        if value != usual["retry"][key]
    }  # fmt: skip
    for key, default in {**usual, "params": {}}.items():
        if found.get(key, default) == default:
            found.pop(key, None)
    found = {key: _literal(found[key]) for key in sorted(found, key=_place)}
    if "timeout" in found:
        found["timeout"] = format_duration(found["timeout"])
    if "backoff" in stated:
        stated["backoff"] = format_duration(stated["backoff"])
    if stated:
        found["retry"] = stated
    if not stored.enabled:
        found["enabled"] = False
    if stored.paused:
        found["paused"] = True
    schedules = [_schedule(one) for one in jobschedules.of_job(session, stored.id)]
    if schedules:
        found["schedules"] = schedules
    return found


# JSONB keeps no order; people read a job from what it does to how often it may.
_ORDER = ("handler", "params", "source", "sink", "mode", "watermark", "lag")


def _place(key: str) -> tuple[int, str]:
    if key in _ORDER:
        return _ORDER.index(key), key
    return len(_ORDER) + (key in ("timeout", "overlap", "concurrency", "queue", "priority")), key


def _schedule(stored: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": stored.name}
    if stored.every_seconds is not None:
        found["every"] = format_duration(stored.every_seconds)
    else:
        found["cron"] = stored.cron
        found["timezone"] = stored.timezone
    if stored.misfire != Misfire.FIRE_ONCE.value:
        found["misfire"] = stored.misfire
    if not stored.enabled:
        found["enabled"] = False
    return found


def _literal(value: Any) -> Any:
    """A value whose texts mean themselves when the file is read again."""
    if isinstance(value, Mapping):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
