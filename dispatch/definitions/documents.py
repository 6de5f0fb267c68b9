"""A YAML file as plain values, with the line of each, and the mistakes found in it.

The file is read as a node graph and never constructed into objects: no tag can run code, keys
that stand twice are seen, and each value keeps its line for the message that may follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dispatch.names import did_you_mean

Path = tuple[str | int, ...]
"""Where a value stands: ``("jobs", "orders", "schedules", 0, "cron")``."""

UNSTORABLE = "holds a character that no database stores"
LARGEST_FILE = 4 * 1024 * 1024
_MOST_VALUES = 200_000
_TAG = "tag:yaml.org,2002:"
_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it stands, and what to do about it. Holds no value of the file."""

    path: Path
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = dotted(self.path)
        text = f"{place}: {self.message}" if place else self.message
        return text if self.line is None else f"line {self.line}: {text}"


@dataclass(frozen=True, slots=True)
class UnsetVariable(Problem):
    """A value names an environment variable that is not set; what else is wrong there follows."""


class DefinitionError(Exception):
    """Definitions are refused; ``problems`` holds every mistake found, in the file's order."""

    def __init__(self, problems: Collection[Problem], source: str | None = None) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        self.source = source
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Report:
    """Collects the mistakes of one reading, each with its line where the text has lines."""

    def __init__(self, lines: Mapping[Path, int] | None = None) -> None:
        self._lines = lines or {}
        self._problems: dict[Problem, None] = {}

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems)

    def add(self, path: Path, message: str) -> None:
        """Report a mistake at ``path``, or at the nearest line above it that is known."""
        line = next(
            (
                self._lines[path[:length]]
                for length in range(len(path), -1, -1)
                if path[:length] in self._lines
            ),
            None,
        )
        self._problems[Problem(path, message, line)] = None

    def unknown_key(self, path: Path, kind: str, known: Collection[str]) -> None:
        self.add(path, f"is no key of {kind}{did_you_mean(str(path[-1]), known)}")

    @contextmanager
    def catching(self, path: Path, *errors: type[Exception]) -> Iterator[None]:
        """An error of the given types in the block becomes a mistake at ``path``."""
        try:
            yield
        except errors as error:
            self.add(path, str(error))


class Unset(str):
    """Stands where an environment variable is missing, so that nothing more is said about it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Document:
    """The values of a file, the line of each path, and the variables that each path used."""

    values: Mapping[str, Any]
    lines: Mapping[Path, int]
    variables: Mapping[Path, frozenset[str]] = field(default_factory=dict)

    def variables_under(self, path: Path) -> dict[Path, frozenset[str]]:
        return {
            place: names for place, names in self.variables.items() if place[: len(path)] == path
        }


def dotted(path: Path) -> str:
    """``jobs.orders.schedules[0].cron``"""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _number(text: str, *, whole: bool) -> int | float | None:
    """The number that YAML writes so; None where JSON has none for it."""
    plain = text.replace("_", "").lower()
    try:
        if whole:
            return int(plain, 0 if plain.lstrip("+-")[:2] in ("0x", "0o", "0b") else 10)
        number = float(plain.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def is_storable(text: str) -> bool:
    """Whether JSONB can hold the text: NUL is the one character that it cannot."""
    return "\0" not in text and _is_unicode(text)


def _is_unicode(text: str) -> bool:
    """Whether the text is free of lone surrogates, which neither UTF-8 nor JSONB can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_pairs_joined(text: str) -> str:
    """The text with each pair of surrogates, as JSON escapes an emoji, as its one character."""
    if _is_unicode(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def read(text: str, environ: Mapping[str, str], report_into: list[Problem]) -> Document:
    """Read a YAML mapping; ``${NAME}`` in a value is replaced from ``environ``, ``$${`` is ``${``.

    An unquoted value that is one reference and nothing else is typed like any other plain value
    (``limit: ${LIMIT}`` is a number), except that what stands under ``datasources`` stays text.
    Mistakes go to ``report_into``. Raises DefinitionError where the text is no YAML at all.
    """
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        what = error.problem or error.context or "it cannot be read"
        around = [] if mark is None else text.splitlines()[mark.line : mark.line + 1]
        if any("${" in line for line in around):
            what += ' (inside { } and [ ] a reference needs quotes: "${NAME}")'
        raise DefinitionError([Problem((), f"this is not YAML: {what}", line)]) from None
    except YAMLError:
        raise DefinitionError(
            [Problem((), "this is not YAML: a character is not allowed")]
        ) from None
    except RecursionError:
        raise DefinitionError([Problem((), "it is nested too deeply")]) from None
    if root is None:
        return Document({}, {})
    if not isinstance(root, MappingNode):
        message = "the file must hold keys such as datasources: and jobs:"
        raise DefinitionError([Problem((), message, root.start_mark.line + 1)])
    reader = _Reader(environ)
    try:
        values = reader.mapping(root, (), ())
    except RecursionError:
        raise DefinitionError([Problem((), "it is nested too deeply")]) from None
    report_into.extend(reader.problems)
    return Document(values, reader.lines, reader.variables)


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._resolver = YAML(typ="safe", pure=True).resolver
        self._values = 0
        self.lines: dict[Path, int] = {}
        self.variables: dict[Path, frozenset[str]] = {}
        self.problems: list[Problem] = []

    def mapping(self, node: MappingNode, path: Path, above: tuple[int, ...]) -> dict[str, Any]:
        self._enter(node, above)
        values: dict[str, Any] = {}
        merged: list[MappingNode] = []
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                merged += self._merged(value, path)
                continue
            if not isinstance(key, ScalarNode):
                self._problem(path, key, "a key must be a plain word")
                continue
            name = _with_pairs_joined(key.value)
            place = (*path, name)
            if name in values:
                self._problem(place, key, f"stands twice (before on line {self.lines[place]})")
                continue
            self.lines[place] = key.start_mark.line + 1
            values[name] = self._value(value, place, (*above, id(node)))
        for source in merged:
            # What stands in the mapping itself wins over what is merged into it.
            for name, value in self.mapping(source, path, (*above, id(node))).items():
                values.setdefault(name, value)
        return values

    def _value(self, node: Node, path: Path, above: tuple[int, ...]) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            message = f"the file has more than {_MOST_VALUES} values; split it"
            raise DefinitionError([Problem(path, message, node.start_mark.line + 1)])
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            return self.mapping(node, path, above)
        if isinstance(node, SequenceNode):
            self._enter(node, above)
            inside = (*above, id(node))
            return [
                self._value(item, (*path, index), inside) for index, item in enumerate(node.value)
            ]
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        raise AssertionError(f"YAML has no such node: {type(node).__name__}")

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        tag = str(node.tag)
        if tag in (f"{_TAG}str", f"{_TAG}timestamp"):
            written = _with_pairs_joined(str(node.value))
            text = self._with_variables(written, node, path)
            if isinstance(text, Unset):
                return text
            whole = _REFERENCE.fullmatch(str(node.value))
            if node.style is not None or whole is None or not whole[1] or path[0] == "datasources":
                return text
            tag, value = self._resolver.resolve(ScalarNode, text, (True, False)), text
            tag = str(tag)
            if tag in (f"{_TAG}str", f"{_TAG}timestamp"):
                return text
        else:
            value = str(node.value)
        if tag == f"{_TAG}null":
            return None
        if tag == f"{_TAG}bool":
            return value.lower() == "true"
        if tag not in (f"{_TAG}int", f"{_TAG}float"):
            self._problem(path, node, "is a kind of value that is not taken here; quote it as text")
            return None
        number = _number(value, whole=tag == f"{_TAG}int")
        if number is None:
            self._problem(path, node, "is no number that can be stored; quote it to make it text")
        return number

    def _with_variables(self, text: str, node: ScalarNode, path: Path) -> str:
        used: set[str] = set()

        def replace(reference: re.Match[str]) -> str:
            name = reference[1]
            if name is None:
                if reference[0] == "$${":
                    return "${"
                self._problem(
                    path, node, "holds a ${ that is not ${NAME}; write $${ where you mean the text"
                )
                return ""
            used.add(name)
            value = self._environ.get(name)
            if value is None:
                message = f"the environment variable {name} is not set"
                self.problems.append(UnsetVariable(path, message, node.start_mark.line + 1))
                return ""
            return value

        replaced = _REFERENCE.sub(replace, text)
        if used:
            self.variables[path] = frozenset(used)
        if any(name not in self._environ for name in used):
            return Unset()
        if not is_storable(replaced):
            self._problem(path, node, UNSTORABLE)
        return replaced

    def _merged(self, node: Node, path: Path) -> list[MappingNode]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        if all(isinstance(source, MappingNode) for source in sources):
            return list(sources)
        self._problem(path, node, "<< takes a mapping, or a list of mappings")
        return []

    def _enter(self, node: Node, above: tuple[int, ...]) -> None:
        if id(node) in above:
            message = "an alias refers to itself"
            raise DefinitionError([Problem((), message, node.start_mark.line + 1)])

    def _problem(self, path: Path, node: Node, message: str) -> None:
        self.problems.append(Problem(path, message, node.start_mark.line + 1))
