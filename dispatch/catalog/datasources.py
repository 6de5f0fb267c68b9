"""Datasources: stored with their configuration sealed, changed under audit (R-X1, R-X4)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.envelopes import EnvelopeError, open_envelope, seal
from db.keyring import Keyring
from db.models import Datasource, Job
from dispatch import audit, catalog
from dispatch.catalog import jobs
from dispatch.catalog.changes import SECRET, Change, Difference, audited, differences
from dispatch.definitions import DatasourceDefinition, parse_datasource
from dispatch.definitions.documents import DefinitionError, Problem, Report
from dispatch.definitions.jobdefinition import Connectors
from dispatch.errors import InUse, NameTaken
from dispatch.redaction import secrets_of


def open_config(keyring: Keyring, stored: Datasource) -> dict[str, Any]:
    """A stored datasource's configuration, with its secrets. Raises EnvelopeError."""
    return open_envelope(keyring, stored.id, stored.envelope or {}, name=stored.name)


def difference(
    session: Session,
    stored: Datasource | None,
    wanted: DatasourceDefinition,
    keyring: Keyring,
    connectors: Connectors,
) -> Change | None:
    """What storing ``wanted`` would change; None where nothing is. Compares by opening.

    What cannot be opened counts as changed: setting it anew is the way out of a lost key.
    """
    secret = frozenset(connectors.secret_keys(wanted.connector))
    after: dict[str, Any] = {"connector": wanted.connector, **wanted.config}
    if wanted.enabled is not None:
        after["enabled"] = wanted.enabled
    if stored is None:
        return Change("add", "datasource", wanted.name, differences({}, after, secret=secret))
    notes = []
    is_lost = False
    try:
        config = open_config(keyring, stored)
    except EnvelopeError:
        config = {key: object() for key in wanted.config}
        notes.append("what is stored cannot be opened with this keyring and is replaced")
        is_lost = True
    before: dict[str, Any] = {"connector": stored.connector, **config}
    if wanted.enabled is not None:
        before["enabled"] = stored.enabled
    hidden = secret | (frozenset(config) if is_lost else frozenset())
    found = differences(before, after, secret=hidden)
    if not found:
        return None
    marked = _resets(session, stored, wanted, keyring)
    if marked:
        names = ", ".join(job.name for job in marked[:5])
        more = f" and {len(marked) - 5} more" if len(marked) > 5 else ""
        why = "may point" if is_lost else "points"
        notes.append(
            f"it {why} to another place: the watermark of {names}{more} is reset, so that the next "
            "run reads everything again"
        )
    return Change("edit", "datasource", wanted.name, found, "; ".join(notes) or None)


def store(
    session: Session,
    stored: Datasource | None,
    wanted: DatasourceDefinition,
    change: Change,
    keyring: Keyring,
    actor: str,
) -> Datasource:
    """Carry a change out: seal, audit, and tell of the work that it frees.

    ``stored`` is locked, and before it the jobs that use it: where it points to another place,
    their watermarks are reset (R-F3).
    """
    marked = [] if stored is None else _resets(session, stored, wanted, keyring)
    enables = wanted.enabled is True and stored is not None and not stored.enabled
    if stored is None:
        stored = Datasource(id=uuid4(), name=wanted.name)
        session.add(stored)
    # Switching one on or off alone leaves what is sealed as it is.
    if any(found.key != "enabled" for found in change.differences):
        stored.connector = wanted.connector
        stored.envelope = seal(keyring, stored.id, wanted.config)
    if wanted.enabled is not None:
        stored.enabled = wanted.enabled
    stored.updated_at = func.clock_timestamp()
    session.flush()
    audit.record(
        session,
        actor=actor,
        action=f"datasource.{change.action}",
        subject=wanted.name,
        outcome="added" if change.action == "add" else "changed",
        detail=audited(change.differences),
    )
    for job in marked:
        jobs.forget_watermark(session, job, actor=actor, because=f"datasource {wanted.name}")
    if enables:
        catalog.notify_work(session, [job.name for job in catalog.jobs_of(session, stored.id)])
    return stored


def add(
    session: Session,
    keyring: Keyring,
    connectors: Connectors,
    name: str,
    settings: Mapping[str, Any],
    *,
    actor: str,
) -> Change:
    """Store a new datasource; ``settings`` holds ``connector`` and the connector's own keys.

    Raises NameTaken, and DefinitionError with every mistake.
    """
    wanted = _checked(name, settings, connectors)
    taken = session.scalars(select(Datasource).where(Datasource.name == name)).one_or_none()
    if taken is not None:
        raise NameTaken(
            f"a datasource is named {name!r} already; change it with: "
            f"celery -A tasks datasource edit {name}"
        )
    change = difference(session, None, wanted, keyring, connectors)
    assert change is not None
    store(session, None, wanted, change, keyring, actor)
    return change


def edit(
    session: Session,
    keyring: Keyring,
    connectors: Connectors,
    name: str,
    settings: Mapping[str, Any],
    *,
    clear: Collection[str] = (),
    actor: str,
) -> Change | None:
    """Change what ``settings`` names and keep the rest; ``clear`` removes keys, also secret ones.

    None where nothing changes. Another connector keeps the rest too: what it does not take is a
    mistake until it is cleared, so that no secret goes unasked. Raises UnknownDatasource,
    EnvelopeError, and DefinitionError with every mistake.
    """
    stored = catalog.datasource(session, name)
    catalog.lock(session, Job, [job.id for job in catalog.jobs_of(session, stored.id)])
    catalog.lock(session, Datasource, [stored.id])
    connector = settings.get("connector", stored.connector)
    own = {key: value for key, value in settings.items() if key != "connector"}
    kept = open_config(keyring, stored)
    unknown = sorted(set(clear) - set(kept))
    if unknown:
        report = Report()
        for key in unknown:
            report.add((key,), f"is not set for datasource {name}, so it cannot be cleared")
        raise DefinitionError(report.problems)
    kept = {key: value for key, value in kept.items() if key not in clear and key not in own}
    try:
        wanted = _checked(name, {"connector": connector, **kept, **own}, connectors)
    except DefinitionError as error:
        raise DefinitionError([_with_way_out(found, kept) for found in error.problems]) from None
    if wanted.connector != stored.connector:
        report = Report()
        jobs.check_bindings(session, connectors, {name: wanted.connector}, report)
        if report.problems:
            raise DefinitionError(report.problems)
    change = difference(session, stored, wanted, keyring, connectors)
    if change is not None:
        store(session, stored, wanted, change, keyring, actor)
    return change


def _with_way_out(problem: Problem, kept: Collection[str]) -> Problem:
    """The mistake, with what to do where it is about a setting that the edit did not name."""
    key = problem.path[0] if problem.path else None
    if key not in kept:
        return problem
    told = f"it is kept from before: remove it with --clear {key}, or give it anew"
    return replace(problem, message=f"{problem.message}; {told}")


def set_enabled(session: Session, name: str, enabled: bool, *, actor: str) -> Change | None:
    """Let the jobs of a datasource be claimed, or hold their next claims; None where it is so.

    A running attempt goes on (R-C5); runs are accepted and wait (R-T8). Raises UnknownDatasource.
    """
    stored = catalog.datasource(session, name)
    catalog.lock(session, Datasource, [stored.id])
    if stored.enabled == enabled:
        return None
    stored.enabled = enabled
    stored.updated_at = func.clock_timestamp()
    verb = "enable" if enabled else "disable"
    audit.record(
        session, actor=actor, action=f"datasource.{verb}", subject=name, outcome=f"{verb}d"
    )
    if enabled:
        catalog.notify_work(session, [job.name for job in catalog.jobs_of(session, stored.id)])
    return Change("edit", "datasource", name, (Difference("enabled", not enabled, enabled),))


def remove(session: Session, name: str, *, actor: str) -> Change:
    """Remove a datasource that no job uses (R-S3). Raises UnknownDatasource and InUse."""
    stored = catalog.datasource(session, name)
    users = [job.name for job in catalog.jobs_of(session, stored.id)]
    if users:
        shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
        raise InUse(
            f"the datasource {name!r} is used by {shown}; remove or rebind "
            f"{'that job' if len(users) == 1 else 'those jobs'} first"
        )
    session.delete(stored)
    session.flush()
    audit.record(session, actor=actor, action="datasource.remove", subject=name, outcome="removed")
    return Change("remove", "datasource", name)


def shown_config(config: Mapping[str, Any], secret: Collection[str]) -> dict[str, Any]:
    """A configuration as it may be shown: each value that may be secret is ``***``."""
    return {key: SECRET if key in secret else value for key, value in config.items()}


def _checked(
    name: str, settings: Mapping[str, Any], connectors: Connectors
) -> DatasourceDefinition:
    report = Report()
    found = parse_datasource(name, dict(settings), (), connectors, report)
    if report.problems or found is None:
        raise DefinitionError(report.problems)
    return found


def endpoint(config: Mapping[str, Any]) -> str | None:
    """Where a configuration points, such as ``postgresql://shop.example:5432/shop``.

    Built from the parts that hold no secret; None where they cannot be told apart safely.
    """
    url = config.get("url")
    if isinstance(config.get("path"), str):
        found = str(config["path"])
    elif isinstance(url, str) and "://" in url:
        try:
            parts = urlsplit(url)
            port = "" if parts.port is None else f":{parts.port}"
        except ValueError:
            return None
        # A password with an unencoded slash would stand in what looks like the path.
        if "@" in parts.path:
            return None
        found = f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
    else:
        return None
    return None if any(secret in found for secret in secrets_of(config)) else found


def _resets(
    session: Session, stored: Datasource, wanted: DatasourceDefinition, keyring: Keyring
) -> list[Job]:
    """The jobs whose watermark tells nothing any more once ``wanted`` is stored (R-F3)."""
    marked = [job for job in catalog.jobs_of(session, stored.id) if job.watermark is not None]
    if not marked:
        return []
    try:
        config = open_config(keyring, stored)
    except EnvelopeError:
        return marked
    same = stored.connector == wanted.connector and _place(config) == _place(wanted.config)
    return [] if same else marked


# Who comes in, and how the way there is secured, is no part of the place.
_WHO = re.compile(
    r"(?i)user(name)?|(ssl)?pass(word|wd|phrase|file)?|.*(secret|token|password|credential).*"
)
_WAY = re.compile(
    r"(?i)(ssl|tls|gss|krb|keepalive|tcp_).*|channel_binding|require_auth|application_name"
    r"|(connect|read|write)_timeout"
)


def _place(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of the place it points to; two that differ may be one place."""
    return {
        key: _place_of_url(value) if isinstance(value, str) and "://" in value else value
        for key, value in config.items()
        if not _WHO.fullmatch(key)
    }


def _place_of_url(url: str) -> Any:
    try:
        parts = urlsplit(url)
        where = parts.netloc.rpartition("@")[2].lower()
        # A password with an unencoded slash, sign or mark would stand in what looks like the rest.
        if "@" in url.partition(parts.netloc)[2]:
            return url
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return url
    scheme = parts.scheme.partition("+")[0]
    scheme = {"postgres": "postgresql", "mariadb": "mysql"}.get(scheme, scheme)
    kept = sorted(
        pair for pair in query if not _WHO.fullmatch(pair[0]) and not _WAY.fullmatch(pair[0])
    )
    # Without a name the database is called like its user.
    named = parts.path.strip("/") or any(key in ("dbname", "database") for key, _ in kept)
    user = None if named else (parts.username, dict(query).get("user"))
    return scheme, where, parts.path, kept, parts.fragment, user
