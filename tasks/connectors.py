"""The connectors that there are, as definitions see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tasks.replicate import registry
from tasks.replicate.connector import Problem
from tasks.replicate.spec import ReplicationSpec, SpecError


class RegisteredConnectors:
    """The built-in connectors and those of the entry point group ``claimcheck.connectors``."""

    def names(self) -> Collection[str]:
        return list(registry.connectors())

    def canonical(self, name: str) -> str:
        """Raises UnknownConnector and MissingExtra, which are ValueErrors with the way out."""
        return registry.get(name).name

    def check_config(self, connector: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        return _told(registry.check_config(connector, config))

    def secret_keys(self, connector: str) -> Collection[str]:
        found = registry.connectors().get(connector)
        # Of a connector that is not installed here nothing is known to be harmless.
        return {"url"} if found is None else found.capabilities.secrets

    def job_keys(self) -> Collection[str]:
        return list(ReplicationSpec.model_fields)

    def check_job(
        self, definition: Mapping[str, Any], source: str | None, sink: str | None
    ) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        try:
            spec = ReplicationSpec.parse(definition)
        except SpecError as error:
            return dict(definition), _told(error.problems) + _unable(error.spec, source, sink)
        problems = _unable(spec, source, sink)
        # What was not stated stays out: the spec gives it the same default at each reading.
        return spec.model_dump(mode="json", exclude_unset=True, exclude_none=True), problems


def _unable(
    spec: ReplicationSpec | None, source: str | None, sink: str | None
) -> list[tuple[str, str]]:
    """What the job asks for that its connectors cannot do."""
    if spec is None or source is None or sink is None:
        return []
    return _told(registry.problems(spec, source, sink))


def _told(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """The problems as definitions take them, which do not know replication."""
    return [(problem.key, problem.message) for problem in problems]


CONNECTORS = RegisteredConnectors()
