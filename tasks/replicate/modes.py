"""The three modes, written once on the ends of :mod:`tasks.replicate.connector`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dispatch.context import HandlerFailure, Outcome, RunContext, RunStopped
from tasks.replicate import checksum, planner, registry, tables
from tasks.replicate import parts as processes
from tasks.replicate.connector import (
    Bound,
    CommitUnknown,
    Connector,
    Counts,
    Fenced,
    Load,
    Part,
    ReadRequest,
    Relation,
    Sink,
    SinkError,
    Source,
    SourceError,
)
from tasks.replicate.ends import opened, reading, refuse_changes, settled
from tasks.replicate.guards import guarded
from tasks.replicate.meter import Meter
from tasks.replicate.names import join_name, session_name, split_name
from tasks.replicate.spec import ReplicationSpec, SpecError

EMPTIED = "the sink was emptied before the run ended: it is empty or holds a part of the rows"
COMMITTED = "the sink holds the new rows: they were committed before the run was stopped"
UNFINISHED = COMMITTED + "; sequences and statistics may not have followed"
LOST = "the answer to the sink's commit was lost: "
COMMITTING = "the run was stopped while the sink committed: "
_MAY_BE_EMPTY = "it may have been emptied"
_MAY_HOLD = "it may hold the new rows"
_EMPTY_OR_NEW = "it is empty or holds the new rows"


def run(context: RunContext) -> Outcome:
    """Carry out a replication job; raises HandlerFailure or RunStopped."""
    try:
        spec = ReplicationSpec.parse(context.definition)
        source, sink = _connectors(context)
    except (SpecError, ValueError) as error:
        raise HandlerFailure(f"the job's definition: {error}", permanent=True) from None
    if spec.tables is not None:
        from tasks.replicate import patterns

        return patterns.run(context, spec, source)
    refusals = registry.problems(spec, source.name, sink.name)
    planner.refuse([str(problem) for problem in refusals])
    try:
        return Replication(context, spec, source, sink).run()
    except Exception:
        # An end that was broken by a stop reports an error, or its driver stumbles; the stop is
        # the truth.
        context.check_cancelled()
        raise


def _connectors(context: RunContext) -> tuple[Connector, Connector]:
    assert context.source is not None, "a replication job has a source"
    assert context.sink is not None, "a replication job has a sink"
    return registry.get(context.source.connector), registry.get(context.sink.connector)


class Replication:
    """One run of one table."""

    def __init__(
        self, context: RunContext, spec: ReplicationSpec, source: Connector, sink: Connector
    ) -> None:
        assert context.source is not None
        assert context.sink is not None
        self.context = context
        self.spec = spec
        self._source_connector, self._sink_connector = source, sink
        self._source_config: Mapping[str, Any] = context.source.config
        self._sink_config: Mapping[str, Any] = context.sink.config
        self._name = session_name(str(context.job_id), context.fence)
        self._read = self._written = 0
        self._warnings: list[str] = []
        self._kept = False
        """Whether a table that the run made must stay: something was or may be committed to it."""

    def run(self) -> Outcome:
        with (
            opened(self.context, self._open_source) as source,
            opened(self.context, self._open_sink) as sink,
        ):
            return self._replicate(source, sink)

    def _open_source(self) -> Source:
        return self._source_connector.source(self._source_config, name=self._name)

    def _open_sink(self) -> Sink:
        return self._sink_connector.sink(self._sink_config, name=self._name)

    # Planning

    def _replicate(self, source: Source, sink: Sink) -> Outcome:
        self.context.progress(0, phase="describing")
        request = tables.request(self.spec, self.context.watermark)
        ours = tables.described(self.spec, source, sink, request)
        planner.check_names(self.spec, planner.chosen(self.spec, ours))
        self.meter = Meter(self.context, ours, bandwidth=self.spec.bandwidth)
        with self._target(sink, source, request, ours) as theirs:
            self._refuse_itself(source, sink, request, theirs)
            plan = planner.plan(self.spec, source, sink, ours, theirs)
            for warning in plan.warnings:
                self._warn(warning)
            request = request.planned(plan.columns)
            load = self._load(theirs, plan)
            planner.refuse(sink.refusals(load))
            bound = self._bound(source, request, ours)
            source.snapshot()
            if load.how:
                counts = self._staged(source, sink, request, load)
            else:
                counts = self._emptied(source, sink, request, load)
        return self._outcome(counts, bound, plan)

    def _refuse_itself(
        self, source: Source, sink: Sink, request: ReadRequest, theirs: Relation
    ) -> None:
        """Emptying the table that is about to be read would lose it."""
        same = (
            self._source_connector.name == self._sink_connector.name
            and self._source_config == self._sink_config
            and request.table == split_name(self.spec.sink.table or "")
        )
        if same or sink.writes(theirs) in source.reads(request):
            planner.refuse(
                [f"{self.spec.sink.table} is both source and sink: write to another table"]
            )

    @contextlib.contextmanager
    def _target(
        self, sink: Sink, source: Source, request: ReadRequest, ours: Relation
    ) -> Iterator[Relation]:
        """The sink's table; one that is made for it is taken back where the block fails before
        anything was committed: the next job would take an empty table for data."""
        table = split_name(self.spec.sink.table or "")
        theirs = sink.describe(table)
        if theirs is not None and theirs.blank is None:
            yield theirs
            return
        if theirs is None and request.since is not None:
            raise SinkError(
                f"nothing was changed: sink table {join_name(table)} does not exist any more, and "
                "the job reads only from its watermark on: let it read everything again (celery "
                f"-A tasks job edit {self.context.job} --reset-watermark)",
                permanent=True,
            )
        if theirs is None and not self.spec.create:
            raise SinkError(
                f"nothing was changed: sink table {join_name(table)} does not exist (names are "
                "literal: case and spaces count); create it, or set create: true",
                permanent=True,
            )
        key = tables.new_key(self.spec, ours)
        if self.spec.mode == "incremental" and not key:
            planner.refuse(
                [
                    "incremental needs a key, and the source has none to make the sink's table "
                    "with: name its columns in sink.key"
                ]
            )
        self.context.check_cancelled()
        sink.create(table, tables.new_columns(self.spec, ours), key, source.dialect)
        try:
            theirs = sink.describe(table)
            if theirs is None:
                raise SinkError(f"sink table {join_name(table)} was made and is gone again")
            yield theirs
        except BaseException:
            if not self._kept:
                sink.uncreate(table)
            raise

    def _load(self, theirs: Relation, plan: planner.Plan) -> Load:
        how = ""
        if self.spec.mode == "incremental":
            how = "merge"
        elif self.spec.mode == "complete-atomic":
            how = self.spec.atomic or self._sink_connector.capabilities.atomic[0]
        newest = next(
            (c.sink.name for c in plan.columns if c.source.name == self.spec.watermark), None
        )
        return Load(
            table=split_name(self.spec.sink.table or ""),
            columns=plan.columns,
            mode=self.spec.mode,
            lane=plan.lane,
            run_id=str(self.context.id),
            scope=str(self.context.job_id),
            fence=self.context.fence,
            key=self.spec.sink.key or theirs.key,
            watermark=newest,
            how=how,
            staging_schema=self.spec.sink.staging_schema,
            verified=self.spec.verify is not None,
            relation=theirs,
            computed=plan.computed,
        )

    def _bound(self, source: Source, request: ReadRequest, ours: Relation) -> Bound | None:
        """Before the snapshot: what opens later than this look is seen by the next read (R-F3)."""
        if self.spec.mode != "incremental":
            return None
        column = ours.column(self.spec.watermark or "")
        if column is None:
            raise SourceError(
                f"nothing was changed: the source has no watermark column {self.spec.watermark}",
                permanent=True,
            )
        bound = source.bound(request, column, self.spec.lag)
        if bound.warning is not None:
            self._warn(bound.warning)
        return bound

    # Moving the rows

    def _emptied(self, source: Source, sink: Sink, request: ReadRequest, load: Load) -> Counts:
        """``complete``: the truncate commits first, then the rows follow.

        Not before all parts are connected: one that cannot be leaves the old content.
        """
        parts = self._parts(source, request)
        with self._team(request, parts, load) as team:
            with self._transaction(sink, load, may=_MAY_BE_EMPTY):
                sink.truncate(load)
                self.context.sink_indeterminate(EMPTIED)
            if team is not None:
                # Each part commits for itself, behind the fence.
                self._moved(team.transfer())
                self._verify(source, sink, request, load)
            else:
                last = replace(load, step=1)
                with self._transaction(sink, last, may=_EMPTY_OR_NEW, undone=EMPTIED):
                    self._moved(self._move(source, sink, request, last, parts[0]))
                    self._verify(source, sink, request, last)
        self.context.sink_indeterminate(UNFINISHED)
        self._finish(sink, load)
        return Counts(inserted=self._written)

    def _staged(self, source: Source, sink: Sink, request: ReadRequest, load: Load) -> Counts:
        """Rows go to staging first; one short transaction then shows them to readers."""
        self.context.check_cancelled()
        sink.stage(load)
        try:
            parts = self._parts(source, request)
            with self._team(request, parts, load) as team:
                if team is not None:
                    self._moved(team.transfer())
                else:
                    self._moved(self._move(source, sink, request, load, parts[0]))
            with self._transaction(sink, load, may=_MAY_HOLD):
                self.meter.report("publishing")
                counts = sink.publish(load)
                self._verify(source, sink, request, load)
            self.context.sink_indeterminate(UNFINISHED)
        finally:
            if (left := sink.unstage(load)) is not None:
                self._leave(left)
        self._finish(sink, load)
        return counts

    def _leave(self, staging: str) -> None:
        """Say that a staging table stays: another session holds it, or a stop broke ours."""
        text = f"{staging} is left for a later run to drop"
        self._warn(text)
        before = self.context.warning or "the sink holds its old content"
        self.context.sink_indeterminate(f"{before}; {text}")

    @contextlib.contextmanager
    def _transaction(
        self, sink: Sink, load: Load, *, may: str, undone: str | None = None
    ) -> Iterator[None]:
        """A fenced transaction that changes the target; a commit of unknown outcome is settled.

        ``undone`` is what is to be said of the sink where the transaction comes to nothing, and
        ``may`` where that is not known.
        """
        self.context.check_cancelled()
        try:
            sink.begin(load)
            refuse_changes(sink, load)
            yield
            self.context.check_cancelled()
        except BaseException:
            sink.rollback()
            self.context.sink_indeterminate(undone)
            raise
        kept, self._kept = self._kept, True
        try:
            sink.commit()
        except CommitUnknown as lost:
            if self.context.stop_reason is not None:
                self.context.sink_indeterminate(COMMITTING + may)
                raise RunStopped(self.context.stop_reason) from None
            if not self._settled(sink, load, may):
                self._kept = kept
                self.context.sink_indeterminate(undone)
                raise SinkError(
                    f"the sink broke while it committed, and nothing of it remained: {lost}"
                ) from None
        except (SinkError, Fenced):
            self._kept = kept
            self.context.sink_indeterminate(undone)
            raise

    def _settled(self, sink: Sink, load: Load, may: str) -> bool:
        """Whether a commit whose answer was lost took place; raises where that is not learned."""
        self.context.log.warning("the sink's connection broke at commit; reading what became of it")
        before = self.context.warning
        self.context.sink_indeterminate(LOST + may)
        found = settled(sink, load, self.context.check_cancelled)
        self.context.sink_indeterminate(before)
        return found

    def _parts(self, source: Source, request: ReadRequest) -> list[Part]:
        if self.spec.parallelism == 1:
            return [Part(0)]
        parts = source.split(request, self.spec.parallelism)
        warning = parts[0].bounds.get("warning")
        if warning is not None:
            self._warn(warning)
        return parts

    def _team(
        self, request: ReadRequest, parts: list[Part], load: Load
    ) -> contextlib.AbstractContextManager[processes.Team | None]:
        """The processes of several parts, connected for the block; None where one part is all."""
        if len(parts) == 1:
            return contextlib.nullcontext()
        ends = processes.Ends(
            (self._source_connector.name, self._sink_connector.name),
            self._source_config,
            self._sink_config,
            self._name,
        )
        bandwidth = self.spec.bandwidth
        return processes.Team(
            self.context, self.meter, ends, request, parts, load, bandwidth=bandwidth
        ).connected()

    def _move(
        self, source: Source, sink: Sink, request: ReadRequest, load: Load, part: Part
    ) -> int:
        """Move one part in this process and return the rows written."""
        with reading(source, source.read(request, part, load.lane)) as batches:
            flow = guarded(self.meter.through(batches), load.columns)
            return sink.write(load, flow, staging=bool(load.how))

    def _moved(self, written: int) -> None:
        self._written = written
        self._read = self.meter.rows
        self.meter.report("reading")

    def _warn(self, warning: str) -> None:
        """Tell it in the run's log and, at the end, with its result."""
        self._warnings.append(warning)
        self.context.log.warning("%s", warning)

    # Afterwards

    def _verify(self, source: Source, sink: Sink, request: ReadRequest, load: Load) -> None:
        if self.spec.verify is None:
            return
        self.meter.report("verifying")
        there, here = source.count(request), sink.count(load)
        if there != here:
            doubled = ""
            if self.spec.mode == "incremental" and there > here:
                doubled = (
                    " (of rows with one key the sink has the newest alone: where the source has "
                    "several, verify does not suit the mode)"
                )
            raise _differs(f"the source has {there} rows and the sink {here}{doubled}")
        if self.spec.verify == "checksum":
            whole = load.columns + load.computed
            one, two = checksum.of_both(
                source, sink, request.planned(whole), replace(load, columns=whole)
            )
            if one != two:
                how = f"the source's checksum is {one} and the sink's {two}"
                if load.computed and len(set(checksum.of_both(source, sink, request, load))) == 1:
                    names = ", ".join(plan.sink.name for plan in load.computed)
                    how += f"; they differ only in what each end computes for itself: {names}"
                    raise _differs(how, "give both the same expression, or leave it out")
                raise _differs(how)

    def _finish(self, sink: Sink, load: Load) -> None:
        self.meter.report("finishing")
        try:
            warnings = sink.finish(load, analyze=self.spec.analyze)
        except SinkError as error:
            warnings = [f"the rows are in place, but what follows them failed: {error}"]
        self.context.sink_indeterminate(COMMITTED)
        for warning in warnings:
            self._warn(warning)

    def _outcome(self, counts: Counts, bound: Bound | None, plan: planner.Plan) -> Outcome:
        counters = {
            "read": self._read,
            "written": self._written,
            "inserted": counts.inserted,
            "updated": counts.updated,
            "unchanged": counts.unchanged,
            "deleted": counts.deleted,
        }
        result: dict[str, Any] = {
            "lane": plan.lane.value,
            "bytes": self.meter.bytes,
            "verified": self.spec.verify,
            **counters,
        }
        if self._warnings:
            result["warnings"] = self._warnings
        return Outcome(
            result=result,
            rows_processed=self._written,
            watermark=None if bound is None else bound.value,
            watermark_type=None if bound is None else bound.type,
            counters=counters,
        )


_LOOK = (
    "look for another session that writes to the sink, or a source that gives other rows each time"
)


def _differs(how: str, remedy: str = _LOOK) -> HandlerFailure:
    """Permanent: each side was looked at in one state, and the next attempt would differ too."""
    return HandlerFailure(
        f"verify: {how}. It is not retried by itself: {remedy}",
        code="verify_failed",
        permanent=True,
    )
