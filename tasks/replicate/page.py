"""Prints ``docs/connectors.md`` from the connectors' own capabilities.

``python -m tasks.replicate.page > docs/connectors.md``
"""

from __future__ import annotations

from tasks.replicate import registry
from tasks.replicate.connector import MODES, Capabilities, Connector

HEAD = """# Connectors

Printed by `python -m tasks.replicate.page` from what the connectors say of themselves. \
`apply` refuses a job that asks for what a connector cannot do; `datasource show` prints the same.
"""
_WATERMARKS = {
    "safe": "safe bound",
    "lag": "by a stated lag",
    "none": "-",
}


def page() -> str:
    """The page as Markdown."""
    found = [c for n, c in registry.connectors().items() if n in registry.BUILT_IN]
    return HEAD + "".join(map(_section, found))


def _section(connector: Connector) -> str:
    can = connector.capabilities
    lines = [
        f"\n## {can.title} (`connector: {connector.name}`)\n",
        "| | source | sink |",
        "|---|---|---|",
    ]
    lines += [
        f"| {mode} | {_yes(mode in can.source_modes)} | {_yes(mode in can.sink_modes)} |"
        for mode in MODES
    ]
    lines += [f"| {label} | {reads} | {writes} |" for label, reads, writes in _rows(can)]
    lines.append("")
    lines += [f"- `{key}`: {text}" for key, text in can.settings.items()]
    if can.extra:
        lines.append(f"- needs `pip install 'celery-claimcheck[{can.extra}]'`")
    lines.append(f"- a blocking call ends by: {can.cancel}")
    lines.append(f"- tested with {can.tested}")
    return "\n".join(lines) + "\n"


def _rows(can: Capabilities) -> list[tuple[str, str, str]]:
    return [
        ("`parallelism`", _yes(can.parallel_source), _yes(can.parallel_sink)),
        ("`query`, `where`", _yes(can.queries), ""),
        ("`tables`", _yes(can.patterns), ""),
        ("watermark", _WATERMARKS[can.watermark], ""),
        ("`atomic`", "", ", ".join(can.atomic) or "-"),
        ("`staging_schema`", "", _yes(can.staging_schema)),
        ("fence and change commit together", "", _yes(can.transactional)),
        ("`create`, `analyze`", "", f"{_yes(can.create)}, {_yes(can.analyze)}"),
    ]


def _yes(able: bool) -> str:
    return "yes" if able else "-"


if __name__ == "__main__":
    print(page(), end="")
