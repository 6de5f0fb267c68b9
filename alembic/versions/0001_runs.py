"""Runs, jobs, datasources, schedules and their guards (R-S2).

The statements stand as SQL, so that what the database refuses can be read in one place.
Functions that read tables fix their search_path to the schema they were created in.
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DATASOURCE = """
create table datasource (
  id uuid primary key default gen_random_uuid(),
  name text not null unique,
  connector text not null,
  envelope jsonb,
  enabled boolean not null default true,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  -- The nil row stands for "no datasource", so that one claim statement can lock what a job has.
  constraint datasource_envelope_unless_nil check (
    (envelope is null) = (id = '00000000-0000-0000-0000-000000000000')),
  constraint datasource_envelope_is_object check (jsonb_typeof(envelope) = 'object'),
  -- R-X1: an envelope belongs to its row and to no other.
  constraint datasource_envelope_is_own check (envelope->>'datasource' = id::text)
);
insert into datasource (id, name, connector)
  values ('00000000-0000-0000-0000-000000000000', '', 'none');
"""

CONCURRENCY_KEY = """
create table concurrency_key (
  key text primary key,
  max integer not null constraint concurrency_key_max_positive check (max >= 1)
);
"""

JOB = """
create table job (
  id uuid primary key default gen_random_uuid(),
  name text not null unique,
  parent_job_id uuid references job (id) on delete cascade,
  handler text not null,
  definition jsonb not null default '{}'
    constraint job_definition_is_object check (jsonb_typeof(definition) = 'object'),
  source_id uuid references datasource (id),
  sink_id uuid references datasource (id),
  enabled boolean not null default true,
  paused boolean not null default false,
  source_enabled boolean not null default true,
  sink_enabled boolean not null default true,
  queue text not null default 'runs',
  priority smallint not null default 0
    constraint job_priority_range check (priority between 0 and 9),
  overlap text not null default 'queue'
    constraint job_overlap_known check (overlap in ('skip', 'queue', 'allow')),
  max_attempts integer not null default 3
    constraint job_max_attempts_positive check (max_attempts >= 1),
  concurrency_key text references concurrency_key (key),
  watermark text,
  watermark_type text,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp()
);
create index job_source on job (source_id);
create index job_sink on job (sink_id);
create index job_parent on job (parent_job_id) where parent_job_id is not null;
create index job_concurrency on job (concurrency_key) where concurrency_key is not null;
"""

JOB_SCHEDULE = """
create table job_schedule (
  id uuid primary key default gen_random_uuid(),
  job_id uuid not null references job (id) on delete cascade,
  name text not null,
  cron text,
  timezone text,
  every_seconds double precision
    constraint job_schedule_every_positive check (every_seconds > 0),
  anchor_at timestamptz not null default clock_timestamp(),
  misfire text not null default 'fire_once'
    constraint job_schedule_misfire_known check (misfire in ('fire_once', 'skip', 'catch_up')),
  enabled boolean not null default true,
  next_fire_at timestamptz,
  last_fire_at timestamptz,
  failures integer not null default 0,
  retry_at timestamptz,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  constraint job_schedule_cron_or_every check ((cron is null) <> (every_seconds is null)),
  constraint job_schedule_cron_has_timezone check ((cron is null) = (timezone is null)),
  -- R-D2: a disabled schedule has no next fire.
  constraint job_schedule_disabled_never_fires check (enabled or next_fire_at is null),
  constraint job_schedule_name_unique unique (job_id, name)
);
-- R-D3: the next due schedule; one that failed is due again when its back-off ends (R-D9).
create index job_schedule_due on job_schedule (greatest(next_fire_at, retry_at))
  where next_fire_at is not null;
"""

JOB_RUN = """
create sequence fence_seq as bigint;

create table job_run (
  id uuid primary key default gen_random_uuid(),
  job_id uuid references job (id) on delete set null,
  job_name text not null,
  previous_run_id uuid,
  root_run_id uuid not null,
  parent_run_id uuid,
  attempt integer not null default 1 constraint job_run_attempt_positive check (attempt >= 1),
  max_attempts integer not null constraint job_run_max_attempts_positive check (max_attempts >= 1),
  status text not null default 'PENDING',
  queue text not null,
  priority smallint not null constraint job_run_priority_range check (priority between 0 and 9),
  available_at timestamptz not null default clock_timestamp(),
  offered_at timestamptz,
  offer_count integer not null default 0,
  skip_key uuid,
  exclusive boolean not null default false,
  executor text,
  lease_token uuid,
  lease_until timestamptz,
  heartbeat_at timestamptz,
  fence bigint,
  created_at timestamptz not null default clock_timestamp(),
  started_at timestamptz,
  cancel_requested_at timestamptz,
  finished_at timestamptz,
  rows_processed bigint,
  progress jsonb,
  counters jsonb,
  committed_watermark text,
  error_code text,
  error_message text,
  cancellation_warning text,
  params jsonb not null default '{}'
    constraint job_run_params_is_object check (jsonb_typeof(params) = 'object'),
  result jsonb,
  chain jsonb constraint job_run_chain_is_array check (jsonb_typeof(chain) = 'array'),
  source_snapshot jsonb,
  sink_snapshot jsonb,
  job_snapshot jsonb,
  source_datasource_id uuid,
  sink_datasource_id uuid,
  datasources_resolved_at timestamptz,
  schedule_id uuid references job_schedule (id) on delete set null,
  scheduled_for timestamptz,
  slot_key text,
  slot_no integer,
  triggered_by text,

  constraint job_run_status_known check (status in ('PENDING', 'RUNNING', 'CANCEL_REQUESTED',
    'SUCCEEDED', 'FAILED', 'CANCELLED', 'RETRY_SCHEDULED')),
  constraint job_run_unfinished_has_job check (job_id is not null or finished_at is not null),
  constraint job_run_root_of_first check (
    case when previous_run_id is null then root_run_id = id else root_run_id <> id end),
  constraint job_run_pending_is_unclaimed check (status <> 'PENDING' or (lease_token is null
    and lease_until is null and executor is null and fence is null and started_at is null
    and source_snapshot is null and sink_snapshot is null and job_snapshot is null
    and datasources_resolved_at is null and slot_no is null)),
  constraint job_run_claimed_is_whole check (
    (status not in ('RUNNING', 'CANCEL_REQUESTED', 'SUCCEEDED', 'FAILED', 'RETRY_SCHEDULED'))
    or (lease_token is not null and lease_until is not null and heartbeat_at is not null
      and executor is not null and fence is not null and started_at is not null
      and job_snapshot is not null and datasources_resolved_at is not null)),
  constraint job_run_snapshot_has_datasource check (
    (source_snapshot is null) = (source_datasource_id is null)
    and (sink_snapshot is null) = (sink_datasource_id is null)),
  constraint job_run_slot_is_whole check ((slot_key is null) = (slot_no is null)),
  constraint job_run_terminal_has_finish check (
    (finished_at is not null) = (status not in ('PENDING', 'RUNNING', 'CANCEL_REQUESTED'))),
  constraint job_run_cancel_has_time check (
    status not in ('CANCEL_REQUESTED', 'CANCELLED') or cancel_requested_at is not null),
  constraint job_run_success_has_no_error check (
    status <> 'SUCCEEDED' or (error_code is null and error_message is null)),
  constraint job_run_failure_has_code check (
    status not in ('FAILED', 'RETRY_SCHEDULED') or error_code is not null),
  constraint job_run_watermark_only_on_success check (
    committed_watermark is null or status = 'SUCCEEDED'),
  constraint job_run_error_code_known check (error_code in ('lease_expired', 'worker_lost',
    'worker_shutdown', 'timeout', 'handler_error', 'permanent', 'source_error', 'sink_error',
    'verify_failed', 'no_handler', 'snapshot_unreadable', 'snoozed'))
);

-- R-R2: at most one replacement for an attempt.
create unique index job_run_one_replacement on job_run (previous_run_id)
  where previous_run_id is not null;
-- R-T6 `skip`: at most one active run.
create unique index job_run_one_active on job_run (skip_key)
  where skip_key is not null and status in ('PENDING', 'RUNNING', 'CANCEL_REQUESTED');
-- R-T6 `skip` and `queue`: at most one run is held at a time.
create unique index job_run_one_held on job_run (job_id)
  where exclusive and status in ('RUNNING', 'CANCEL_REQUESTED');
-- R-C8: a slot of a concurrency key is held by at most one run.
-- Three partial indexes tell held runs in words of their own (a run has a slot or a start only from
-- its claim on), so that a statement says which of them it means: with the statistics of an empty
-- table the planner cannot tell them apart, and would read them all through.
create unique index job_run_slot on job_run (slot_key, slot_no)
  where slot_key is not null and finished_at is null;
-- R-C3: the order of the generic claim.
create index job_run_claim_order on job_run (queue, priority desc, available_at, created_at, id)
  where status = 'PENDING';
-- R-C3, R-D7: the jobs that have waiting runs, and each one's next, whatever stands before them.
-- The queue is spelt as an expression, so that a statement says which of the two indexes it means:
-- with the statistics of an empty table the planner could not tell them apart.
create index job_run_pending_of_job on job_run (job_id, (queue || ''), priority desc, available_at,
  created_at, id) where status = 'PENDING';
-- R-D3: of each queue, job and number of offers the run whose next offer is due first: the next
-- retry, delay or unoffered run (no offer yet), the next wake-up that may be lost (the later ones).
create index job_run_offer_due on job_run (queue, job_id, least(offer_count, 14),
  coalesce(offered_at, available_at)) where status = 'PENDING';
-- R-D3: the next lease to expire.
create index job_run_lease on job_run (lease_until) where status in ('RUNNING', 'CANCEL_REQUESTED');
create index job_run_held_of_job on job_run (job_id)
  where started_at is not null and finished_at is null;
create index job_run_lineage on job_run (root_run_id, attempt);
create index job_run_children on job_run (parent_run_id) where parent_run_id is not null;
-- Without the id: in an empty table any index that holds it looks as good as the primary key.
create index job_run_newest on job_run (created_at desc);
create index job_run_newest_of_job on job_run (job_name, created_at desc);
create index job_run_finished on job_run (finished_at) where finished_at is not null;
create index job_run_schedule on job_run (schedule_id) where schedule_id is not null;
"""

AROUND_A_RUN = """
create table run_alias (
  id uuid primary key,
  run_id uuid not null references job_run (id) on delete cascade,
  created_at timestamptz not null default clock_timestamp()
);
create index run_alias_run on run_alias (run_id);

create table trigger_key (
  job_id uuid not null references job (id) on delete cascade,
  key text not null,
  run_id uuid not null references job_run (id) on delete cascade deferrable initially deferred,
  created_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  primary key (job_id, key)
);
create index trigger_key_run on trigger_key (run_id);
create index trigger_key_expiry on trigger_key (expires_at);

create table schedule_slot (
  schedule_id uuid not null references job_schedule (id) on delete cascade,
  fire_at timestamptz not null,
  outcome text not null
    constraint schedule_slot_outcome_known check (outcome in ('run', 'skipped')),
  reason text,
  run_id uuid,
  settled_at timestamptz not null default clock_timestamp(),
  primary key (schedule_id, fire_at),
  constraint schedule_slot_says_why check ((outcome = 'run') = (reason is null)),
  constraint schedule_slot_run_has_id check (outcome <> 'run' or run_id is not null)
);

-- R-X5: the first three quarters and the last quarter of 256 KiB.
create table run_log (
  run_id uuid primary key references job_run (id) on delete cascade,
  head text not null default '' constraint run_log_head_size check (octet_length(head) <= 196608),
  tail text not null default '' constraint run_log_tail_size check (octet_length(tail) <= 65536),
  dropped_bytes bigint not null default 0,
  updated_at timestamptz not null default clock_timestamp()
);

create table audit_event (
  id bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  actor text not null,
  action text not null,
  subject_type text not null,
  subject text not null,
  run_id uuid,
  outcome text not null,
  detail jsonb
);
create index audit_event_newest on audit_event (at desc);
create index audit_event_run on audit_event (run_id) where run_id is not null;
"""

FUNCTIONS = """
-- R-D6: a change says its scope (`queue:NAME`, `job:NAME` or `all`) and its kind:
-- `work` where only eligible work may have changed, `deadlines` where a stored deadline may have.
create function claimcheck_notify(scope text, kind text default 'deadlines') returns void
language plpgsql as $$
begin
  if scope <> 'all' and scope !~ '^(queue|job):.+' then
    raise exception 'claimcheck_notify: scope must be queue:NAME, job:NAME or all, not "%"', scope;
  end if;
  if kind not in ('work', 'deadlines') then
    raise exception 'claimcheck_notify: kind must be work or deadlines, not "%"', kind;
  end if;
  perform pg_notify('claimcheck', kind || ' ' || scope);
end $$;

-- R-F3: whether one watermark lies after another, by the column's own type. A value that does not
-- fit the type, or a type that this server lacks, is an error.
create function claimcheck_later(one text, other text, type_name text) returns boolean
language plpgsql stable as $$
declare
  found regtype := to_regtype(type_name);
  answer boolean;
begin
  if found is null then
    raise exception 'claimcheck_later: % is not a type of the control database', type_name
      using errcode = 'undefined_object';
  end if;
  execute format('select $1::%1$s > $2::%1$s', found) into answer using one, other;
  return answer;
end $$;

-- A program may insert only job_id: the rest follows from the job, as a trigger would set it.
create function job_run_complete_insert() returns trigger
language plpgsql set search_path from current as $$
declare
  its_job job%rowtype;
  earlier job_run%rowtype;
begin
  if new.status <> 'PENDING' then
    raise exception 'job_run: a run starts as PENDING, not as %', new.status
      using errcode = 'check_violation', constraint = 'job_run_legal_transition';
  end if;
  if new.job_name is null or new.queue is null or new.priority is null
     or new.max_attempts is null or new.skip_key is null then
    select * into its_job from job where id = new.job_id;
    new.job_name := coalesce(new.job_name, its_job.name);
    new.queue := coalesce(new.queue, its_job.queue);
    new.priority := coalesce(new.priority, its_job.priority);
    new.max_attempts := coalesce(new.max_attempts, its_job.max_attempts);
    -- A retry keeps what its run had: a policy that changed meanwhile must not refuse it.
    if its_job.overlap = 'skip' and new.previous_run_id is null then
      new.skip_key := new.job_id;
    end if;
    if new.previous_run_id is null and jsonb_typeof(its_job.definition->'params') = 'object' then
      new.params := its_job.definition->'params' || new.params;
    end if;
  end if;
  if new.previous_run_id is null then
    new.root_run_id := coalesce(new.root_run_id, new.id);
  else
    select * into earlier from job_run where id = new.previous_run_id;
    if earlier.id is null or earlier.root_run_id <> new.root_run_id
       or earlier.job_id <> new.job_id
       or new.attempt not in (earlier.attempt, earlier.attempt + 1) then
      raise exception 'job_run: % does not continue the lineage of %', new.id, new.previous_run_id
        using errcode = 'check_violation', constraint = 'job_run_lineage';
    end if;
  end if;
  return new;
end $$;

-- R-S1, R-S2, R-C5: the legal transitions and no others; what is settled stays settled.
create function job_run_guard_update() returns trigger
language plpgsql as $$
declare
  free text[] := array['job_id', 'schedule_id', 'source_snapshot', 'sink_snapshot'];
begin
  if old.status <> new.status and (old.status, new.status) not in (
      ('PENDING', 'RUNNING'), ('PENDING', 'CANCELLED'),
      ('RUNNING', 'SUCCEEDED'), ('RUNNING', 'FAILED'), ('RUNNING', 'CANCEL_REQUESTED'),
      ('RUNNING', 'RETRY_SCHEDULED'), ('CANCEL_REQUESTED', 'CANCELLED'),
      ('FAILED', 'RETRY_SCHEDULED')) then
    raise exception 'job_run %: % cannot become %', old.id, old.status, new.status
      using errcode = 'check_violation', constraint = 'job_run_legal_transition';
  end if;
  if (new.id, new.job_name, new.root_run_id, new.attempt, new.created_at)
       is distinct from (old.id, old.job_name, old.root_run_id, old.attempt, old.created_at)
     or new.previous_run_id is distinct from old.previous_run_id
     or new.parent_run_id is distinct from old.parent_run_id
     or new.params <> old.params
     or (new.job_id is distinct from old.job_id
         and (new.job_id is not null or old.finished_at is null)) then
    raise exception 'job_run %: identity, lineage and parameters never change', old.id
      using errcode = 'check_violation', constraint = 'job_run_identity';
  end if;
  if old.job_snapshot is not null and (
       new.job_snapshot is distinct from old.job_snapshot
       or new.datasources_resolved_at is distinct from old.datasources_resolved_at
       or new.source_datasource_id is distinct from old.source_datasource_id
       or new.sink_datasource_id is distinct from old.sink_datasource_id
       or new.lease_token is distinct from old.lease_token
       or new.executor is distinct from old.executor
       or new.fence is distinct from old.fence
       or new.started_at is distinct from old.started_at
       or (new.source_snapshot - 'wrapped_key' - 'key_version')
          is distinct from (old.source_snapshot - 'wrapped_key' - 'key_version')
       or (new.sink_snapshot - 'wrapped_key' - 'key_version')
          is distinct from (old.sink_snapshot - 'wrapped_key' - 'key_version')) then
    raise exception 'job_run %: a claim''s snapshot, token and fence never change', old.id
      using errcode = 'check_violation', constraint = 'job_run_snapshot';
  end if;
  if new.status = 'PENDING' and (new.offered_at is null
      or (new.available_at <> old.available_at and new.offer_count = old.offer_count)) then
    -- A time that was moved by hand makes an earlier wake-up worthless (R-D3).
    new.offered_at := null;
    new.offer_count := 0;
  end if;
  if old.finished_at is not null then
    if old.status = 'FAILED' and new.status = 'RETRY_SCHEDULED' then
      free := free || array['status'];
    end if;
    if (to_jsonb(new) - free) is distinct from (to_jsonb(old) - free)
       or (new.schedule_id is distinct from old.schedule_id and new.schedule_id is not null) then
      raise exception 'job_run %: a finished run never changes', old.id
        using errcode = 'check_violation', constraint = 'job_run_terminal';
    end if;
  end if;
  return new;
end $$;

-- R-S3: only what has ended may be removed.
create function job_run_guard_delete() returns trigger
language plpgsql as $$
begin
  if old.finished_at is null then
    raise exception 'job_run %: % is active; cancel it before it is removed', old.id, old.status
      using errcode = 'check_violation', constraint = 'job_run_history';
  end if;
  return old;
end $$;

-- RETRY_SCHEDULED and its new attempt come in one transaction, and neither comes alone.
create function job_run_check_replacement() returns trigger
language plpgsql set search_path from current as $$
begin
  if new.status = 'RETRY_SCHEDULED'
     and not exists (select 1 from job_run where previous_run_id = new.id) then
    raise exception 'job_run %: RETRY_SCHEDULED without its new attempt', new.id
      using errcode = 'check_violation', constraint = 'job_run_retry_has_replacement';
  end if;
  if new.status = 'PENDING' and new.previous_run_id is not null
     and not exists (select 1 from job_run
                     where id = new.previous_run_id and status = 'RETRY_SCHEDULED') then
    raise exception 'job_run %: replaces a run that is not RETRY_SCHEDULED', new.id
      using errcode = 'check_violation', constraint = 'job_run_retry_has_replacement';
  end if;
  return null;
end $$;
"""

TRIGGERS = """
create trigger job_run_complete_insert before insert on job_run
  for each row execute function job_run_complete_insert();
create trigger job_run_guard_update before update on job_run
  for each row execute function job_run_guard_update();
create trigger job_run_guard_delete before delete on job_run
  for each row execute function job_run_guard_delete();
create constraint trigger job_run_retry_has_replacement after update of status on job_run
  deferrable initially deferred for each row
  when (new.status = 'RETRY_SCHEDULED' and old.status <> 'RETRY_SCHEDULED')
  execute function job_run_check_replacement();
create constraint trigger job_run_replacement_has_retry after insert on job_run
  deferrable initially deferred for each row when (new.previous_run_id is not null)
  execute function job_run_check_replacement();
"""


def upgrade() -> None:
    # The driver's own connection sends several statements at once and leaves "%" alone.
    connection = op.get_bind().connection.driver_connection
    for statements in (
        DATASOURCE,
        CONCURRENCY_KEY,
        JOB,
        JOB_SCHEDULE,
        JOB_RUN,
        AROUND_A_RUN,
        FUNCTIONS,
        TRIGGERS,
    ):
        connection.execute(statements)


def downgrade() -> None:
    raise NotImplementedError("restore a backup to go back before the first version")
