"""The tables as SQLAlchemy sees them; constraints, guards and functions stand in the migrations.

``tests/db/test_migrations.py`` proves that migrating from each version ends at these models.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Identity,
    Index,
    SmallInteger,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NIL_DATASOURCE = UUID(int=0)
"""The row that stands for "no datasource"; hidden from users."""

Json = dict[str, Any]
NOW = func.clock_timestamp()
UUID_DEFAULT = func.gen_random_uuid()
ACTIVE = "status in ('PENDING', 'RUNNING', 'CANCEL_REQUESTED')"
HELD = "status in ('RUNNING', 'CANCEL_REQUESTED')"
PENDING = "status = 'PENDING'"


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it as a plain attribute)
        datetime: TIMESTAMP(timezone=True),
        str: Text(),
        Json: JSONB(none_as_null=True),
    }


class Datasource(Base):
    """A place to read from or write to; nothing secret stands outside ``envelope`` (R-X1)."""

    __tablename__ = "datasource"

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=UUID_DEFAULT)
    name: Mapped[str] = mapped_column(unique=True)
    connector: Mapped[str]
    envelope: Mapped[Json | None]
    enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ConcurrencyKey(Base):
    """How many runs may hold a slot of ``key`` at once (R-C8)."""

    __tablename__ = "concurrency_key"

    key: Mapped[str] = mapped_column(primary_key=True)
    max: Mapped[int]


class Job(Base):
    """What to run, as defined; a claim snapshots ``definition`` and the two datasources (R-C5)."""

    __tablename__ = "job"
    __table_args__ = (
        Index("job_source", "source_id"),
        Index("job_sink", "sink_id"),
        Index("job_parent", "parent_job_id", postgresql_where=text("parent_job_id is not null")),
        Index(
            "job_concurrency",
            "concurrency_key",
            postgresql_where=text("concurrency_key is not null"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=UUID_DEFAULT)
    name: Mapped[str] = mapped_column(unique=True)
    parent_job_id: Mapped[UUID | None] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    handler: Mapped[str]
    definition: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    source_id: Mapped[UUID | None] = mapped_column(ForeignKey("datasource.id"))
    sink_id: Mapped[UUID | None] = mapped_column(ForeignKey("datasource.id"))
    enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    paused: Mapped[bool] = mapped_column(server_default=text("false"))
    source_enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    sink_enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    queue: Mapped[str] = mapped_column(server_default=text("'runs'"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    overlap: Mapped[str] = mapped_column(server_default=text("'queue'"))
    max_attempts: Mapped[int] = mapped_column(server_default=text("3"))
    concurrency_key: Mapped[str | None] = mapped_column(ForeignKey("concurrency_key.key"))
    watermark: Mapped[str | None]
    watermark_type: Mapped[str | None]
    watermark_reset_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class JobSchedule(Base):
    """When a job fires by itself; ``next_fire_at`` is a stored deadline (R-D3)."""

    __tablename__ = "job_schedule"
    __table_args__ = (
        UniqueConstraint("job_id", "name", name="job_schedule_name_unique"),
        Index(
            "job_schedule_due",
            text("greatest(next_fire_at, retry_at)"),
            postgresql_where=text("next_fire_at is not null"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=UUID_DEFAULT)
    job_id: Mapped[UUID] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    name: Mapped[str]
    cron: Mapped[str | None]
    timezone: Mapped[str | None]
    every_seconds: Mapped[float | None]
    anchor_at: Mapped[datetime] = mapped_column(server_default=NOW)
    misfire: Mapped[str] = mapped_column(server_default=text("'fire_once'"))
    enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    next_fire_at: Mapped[datetime | None]
    last_fire_at: Mapped[datetime | None]
    failures: Mapped[int] = mapped_column(server_default=text("0"))
    retry_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class JobRun(Base):
    """One attempt of a run. The database's guards keep it as lifecycle rules R-S1 to R-S3 say."""

    __tablename__ = "job_run"
    __table_args__ = (
        Index(
            "job_run_one_replacement",
            "previous_run_id",
            unique=True,
            postgresql_where=text("previous_run_id is not null"),
        ),
        Index(
            "job_run_one_active",
            "skip_key",
            unique=True,
            postgresql_where=text(f"skip_key is not null and {ACTIVE}"),
        ),
        Index(
            "job_run_one_held",
            "job_id",
            unique=True,
            postgresql_where=text(f"exclusive and {HELD}"),
        ),
        Index(
            "job_run_slot",
            "slot_key",
            "slot_no",
            unique=True,
            postgresql_where=text("slot_key is not null and finished_at is null"),
        ),
        Index(
            "job_run_claim_order",
            "queue",
            text("priority desc"),
            "available_at",
            "created_at",
            "id",
            postgresql_where=text(PENDING),
        ),
        Index(
            "job_run_pending_of_job",
            "job_id",
            text("(queue || '')"),
            text("priority desc"),
            "available_at",
            "created_at",
            "id",
            postgresql_where=text(PENDING),
        ),
        Index(
            "job_run_offer_due",
            "queue",
            "job_id",
            text("least(offer_count, 14)"),
            text("coalesce(offered_at, available_at)"),
            postgresql_where=text(PENDING),
        ),
        Index("job_run_lease", "lease_until", postgresql_where=text(HELD)),
        Index(
            "job_run_held_of_job",
            "job_id",
            postgresql_where=text("started_at is not null and finished_at is null"),
        ),
        Index("job_run_lineage", "root_run_id", "attempt"),
        Index(
            "job_run_children",
            "parent_run_id",
            postgresql_where=text("parent_run_id is not null"),
        ),
        Index("job_run_newest", text("created_at desc")),
        Index("job_run_newest_of_job", "job_name", text("created_at desc")),
        Index(
            "job_run_ended",
            "finished_at",
            postgresql_where=text("finished_at is not null and status <> 'RETRY_SCHEDULED'"),
        ),
        Index("job_run_schedule", "schedule_id", postgresql_where=text("schedule_id is not null")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=UUID_DEFAULT)
    job_id: Mapped[UUID | None] = mapped_column(ForeignKey("job.id", ondelete="SET NULL"))
    job_name: Mapped[str]
    previous_run_id: Mapped[UUID | None]
    root_run_id: Mapped[UUID]
    parent_run_id: Mapped[UUID | None]
    attempt: Mapped[int] = mapped_column(server_default=text("1"))
    max_attempts: Mapped[int]
    status: Mapped[str] = mapped_column(server_default=text("'PENDING'"))
    queue: Mapped[str]
    priority: Mapped[int] = mapped_column(SmallInteger)
    available_at: Mapped[datetime] = mapped_column(server_default=NOW)
    offered_at: Mapped[datetime | None]
    offer_count: Mapped[int] = mapped_column(server_default=text("0"))
    skip_key: Mapped[UUID | None]
    exclusive: Mapped[bool] = mapped_column(server_default=text("false"))
    executor: Mapped[str | None]
    lease_token: Mapped[UUID | None]
    lease_until: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    fence: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    started_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    rows_processed: Mapped[int | None] = mapped_column(BigInteger)
    progress: Mapped[Json | None]
    counters: Mapped[Json | None]
    committed_watermark: Mapped[str | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    cancellation_warning: Mapped[str | None]
    params: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    result: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    chain: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    source_snapshot: Mapped[Json | None]
    sink_snapshot: Mapped[Json | None]
    job_snapshot: Mapped[Json | None]
    source_datasource_id: Mapped[UUID | None]
    sink_datasource_id: Mapped[UUID | None]
    datasources_resolved_at: Mapped[datetime | None]
    schedule_id: Mapped[UUID | None] = mapped_column(
        ForeignKey("job_schedule.id", ondelete="SET NULL")
    )
    scheduled_for: Mapped[datetime | None]
    slot_key: Mapped[str | None]
    slot_no: Mapped[int | None]
    triggered_by: Mapped[str | None]


class RunAlias(Base):
    """An id handed out for a skipped or repeated trigger, and the run it stands for (R-T7)."""

    __tablename__ = "run_alias"
    __table_args__ = (Index("run_alias_run", "run_id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("job_run.id", ondelete="CASCADE"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class TriggerKey(Base):
    """An idempotency key, stored only together with its run (R-T5)."""

    __tablename__ = "trigger_key"
    __table_args__ = (
        Index("trigger_key_run", "run_id"),
        Index("trigger_key_expiry", "expires_at"),
    )

    job_id: Mapped[UUID] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[UUID] = mapped_column(
        ForeignKey("job_run.id", ondelete="CASCADE", deferrable=True, initially="DEFERRED")
    )
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]


class ScheduleSlot(Base):
    """A fire time that was settled, and how: a run, or skipped and why (R-D1)."""

    __tablename__ = "schedule_slot"

    schedule_id: Mapped[UUID] = mapped_column(
        ForeignKey("job_schedule.id", ondelete="CASCADE"), primary_key=True
    )
    fire_at: Mapped[datetime] = mapped_column(primary_key=True)
    outcome: Mapped[str]
    reason: Mapped[str | None]
    run_id: Mapped[UUID | None]
    settled_at: Mapped[datetime] = mapped_column(server_default=NOW)


class RunLog(Base):
    """A run's own lines, redacted: first three quarters, last quarter, a mark between (R-X5)."""

    __tablename__ = "run_log"

    run_id: Mapped[UUID] = mapped_column(
        ForeignKey("job_run.id", ondelete="CASCADE"), primary_key=True
    )
    head: Mapped[str] = mapped_column(server_default=text("''"))
    tail: Mapped[str] = mapped_column(server_default=text("''"))
    dropped_bytes: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class AuditEvent(Base):
    """An accepted action or a run's end: who, what, when and with what outcome (R-X4)."""

    __tablename__ = "audit_event"
    __table_args__ = (
        Index("audit_event_newest", text("at desc")),
        Index("audit_event_run", "run_id", postgresql_where=text("run_id is not null")),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    actor: Mapped[str]
    action: Mapped[str]
    subject_type: Mapped[str]
    subject: Mapped[str]
    run_id: Mapped[UUID | None]
    outcome: Mapped[str]
    detail: Mapped[Json | None]
