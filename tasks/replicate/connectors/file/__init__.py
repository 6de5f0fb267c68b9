"""Files as source and sink: CSV, JSON lines and Parquet; one, a folder of them, or a pattern."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from tasks.replicate.connector import Capabilities, Connector, Problem, SourceError


class Files(Connector):
    """Files on this machine. A table is a file of the folder, or all files of a pattern."""

    name = "file"
    capabilities = Capabilities(
        title="Files (CSV, JSON lines, Parquet)",
        source_modes=frozenset({"complete", "complete-atomic"}),
        sink_modes=frozenset({"complete", "complete-atomic"}),
        atomic=("rename",),
        create=True,
        patterns=True,
        cancel="between two blocks of a file",
        tested="CSV, JSON lines, and Parquet by pyarrow 17 and later",
        settings={
            "path": "a file, a folder, or (as source) a pattern such as /data/orders-*.csv",
            "format": "csv, jsonl or parquet",
            "delimiter": "csv: the character between fields; a comma",
            "null": "csv: the unquoted text that stands for NULL; nothing",
            "header": "csv: whether the first line names the columns; true",
            "encoding": "csv and jsonl: the character encoding; utf-8",
        },
        secrets=frozenset(),
    )

    def check_config(self, config: Mapping[str, Any]) -> list[Problem]:
        from tasks.replicate.connectors.file import formats

        found = [
            Problem(key, f"is no setting of file; it has {', '.join(self.capabilities.settings)}")
            for key in config
            if key not in self.capabilities.settings
        ]
        path = config.get("path")
        if not isinstance(path, str) or not path or "\0" in path:
            found.append(Problem("path", "is missing; name a file, a folder or a pattern"))
        if config.get("format") not in formats.NAMES:
            found.append(Problem("format", f"must be one of {', '.join(formats.NAMES)}"))
        elif config["format"] == "parquet" and importlib.util.find_spec("pyarrow") is None:
            message = (
                "parquet needs pyarrow, which is not installed: "
                "pip install 'celery-claimcheck[parquet]'"
            )
            found.append(Problem("format", message))
        return found + formats.option_problems(config)

    def test(self, config: Mapping[str, Any]) -> str:
        from tasks.replicate.connectors.file.places import Place

        problems = self.check_config(config)
        if problems:
            raise SourceError("; ".join(map(str, problems)), permanent=True)
        place = Place(config)
        files = place.files()
        if not files and not place.folder.is_dir():
            raise SourceError(f"{place.folder} is no folder", permanent=True)
        if place.is_absent:
            # By its ending it is a file, which a sink makes; else most likely a folder.
            if place.path.suffix not in place.format.suffixes:
                raise SourceError(
                    f"{place.path} does not exist: make the folder, or the file", permanent=True
                )
            return f"{place.path} does not exist yet; a sink makes it"
        count = f"{len(files)} {config['format']} file{'' if len(files) == 1 else 's'}"
        return f"{count} at {config['path']}"

    def source(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.file.source import FileSource

        self._checked(config)
        return FileSource(config)

    def sink(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.file.sink import FileSink

        self._checked(config)
        return FileSink(config)

    def _checked(self, config: Mapping[str, Any]) -> None:
        problems = self.check_config(config)
        if problems:
            raise SourceError("; ".join(map(str, problems)), permanent=True)
