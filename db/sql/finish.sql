-- name: finish
-- Record the end of an attempt, under its token, with all that belongs to it (R-F1, R-F2).
-- One row: `id` is null where the token holds nothing any more (FENCED; nothing was written) or
-- where `chained` says that the run has a chain, which needs a transaction (`in_transaction`).
--   held       the run, locked, as it is now: a cancel that was recorded first wins (R-F4)
--   marked     the job's watermark, never moved backwards, and only while the job still means by it
--              what it did when the run was claimed (`watermark_basis`, keys of the definition), at
--              the same places, and was not reset meanwhile (R-F3)
--   ended      the attempt itself
--   next       the retry's new attempt (R-R3): from the beginning, with what the first one was given
with held as materialized (
  select r.id, r.job_id, r.job_snapshot, r.source_datasource_id, r.sink_datasource_id,
    r.source_snapshot, r.sink_snapshot, r.datasources_resolved_at,
    case when r.status = 'CANCEL_REQUESTED' then 'CANCELLED' else %(status)s::text end as outcome,
    r.chain is not null as chained
  from job_run r
  where r.id = %(run_id)s::uuid and r.lease_token = %(token)s::uuid and r.finished_at is null
  for no key update of r
), decided as materialized (
  select * from held
  where %(in_transaction)s::boolean or not (chained and outcome = 'SUCCEEDED')
), marked as (
  update job j
  set watermark = case
        when j.watermark_type = %(watermark_type)s::text
          and not claimcheck_later(%(watermark)s::text, j.watermark, %(watermark_type)s::text)
        then j.watermark
        -- Compared with itself, so that a value that does not fit its type is an error.
        when not claimcheck_later(%(watermark)s::text, %(watermark)s::text, %(watermark_type)s::text)
        then %(watermark)s::text end,
      watermark_type = %(watermark_type)s::text
  from decided d
  where %(watermark)s::text is not null and d.outcome = 'SUCCEEDED' and j.id = d.job_id
    and j.source_id is not distinct from d.source_datasource_id
    and j.sink_id is not distinct from d.sink_datasource_id
    and not exists (select from unnest(%(watermark_basis)s::text[]) as key
      where j.definition->key is distinct from d.job_snapshot->'definition'->key)
    and (j.watermark is not null or d.job_snapshot->>'watermark' is null)
    -- A job that had none yet when it was reset shows it only by the time.
    and (j.watermark_reset_at is null or j.watermark_reset_at <= d.datasources_resolved_at)
    -- Another key alone (R-X3) leaves updated_at, and a switch leaves the envelope.
    and not exists (select from datasource s
      where s.id in (j.source_id, j.sink_id) and s.updated_at > d.datasources_resolved_at
        and s.envelope is distinct from
          case s.id when j.source_id then d.source_snapshot else d.sink_snapshot end)
  returning j.watermark
), ended as (
  update job_run r
  set status = d.outcome,
      finished_at = clock_timestamp(),
      rows_processed = coalesce(%(rows_processed)s::bigint, r.rows_processed),
      progress = coalesce(%(progress)s::jsonb, r.progress),
      counters = coalesce(%(counters)s::jsonb, r.counters),
      result = case when d.outcome = 'SUCCEEDED' then %(result)s::jsonb end,
      committed_watermark = case when d.outcome = 'SUCCEEDED' then (select watermark from marked) end,
      error_code = case when d.outcome in ('FAILED', 'RETRY_SCHEDULED') then %(error_code)s::text end,
      error_message =
        case when d.outcome in ('FAILED', 'RETRY_SCHEDULED') then %(error_message)s::text end,
      cancellation_warning = case when d.outcome = 'CANCELLED'
        then coalesce(r.cancellation_warning, %(warning)s::text) end
  from decided d
  where r.id = (select id from decided)
  returning r.*
), next as (
  insert into job_run (job_id, job_name, previous_run_id, root_run_id, parent_run_id, attempt,
    max_attempts, queue, priority, available_at, offered_at, offer_count, skip_key, created_at,
    params, chain, schedule_id, scheduled_for, triggered_by)
  select e.job_id, e.job_name, e.id, e.root_run_id, e.parent_run_id,
    e.attempt + case when e.error_code = 'snoozed' then 0 else 1 end,
    e.max_attempts, e.queue, e.priority,
    e.finished_at + make_interval(secs => %(delay)s::float8),
    case when %(delay)s::float8 = 0 then e.finished_at end,
    case when %(delay)s::float8 = 0 then 1 else 0 end,
    e.skip_key, e.finished_at, e.params, e.chain, e.schedule_id, e.scheduled_for, e.triggered_by
  from ended e
  where e.status = 'RETRY_SCHEDULED'
  returning id, queue
), audited as (
  insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
  select %(actor)s::text, 'run.finish', 'run', e.job_name, e.id, e.status,
    jsonb_strip_nulls(jsonb_build_object('attempt', e.attempt, 'error_code', e.error_code,
      'rows', e.rows_processed, 'watermark', e.committed_watermark,
      'cancellation_warning', e.cancellation_warning, 'next_run_id', (select id from next)))
  from ended e
  returning run_id
), notified as materialized (
  -- R-D3: a new attempt is a deadline that no beat knows of yet.
  select claimcheck_notify('queue:' || next.queue, 'deadlines') as done from next
)
select e.id, e.job_id, e.job_name as job, e.root_run_id, e.previous_run_id, e.attempt, e.queue,
  e.priority, e.status, e.error_code, e.error_message, e.rows_processed, e.committed_watermark,
  e.chain, e.exclusive, e.slot_key,
  extract(epoch from e.finished_at - e.started_at)::float8 as runtime,
  (select id from next) as next_run_id,
  coalesce((select chained from held), false) as chained,
  (select count(*) from audited) + (select count(*) from notified) as recorded
from (select) always left join ended e on true;

-- name: finish_by_token
-- How an attempt ended whose finish got no answer, told by its token (R-R7). Same columns as `finish`.
-- No row where `actor` did not record that end: recovery came first and has told of it (R-F1).
select e.id, e.job_id, e.job_name as job, e.root_run_id, e.previous_run_id, e.attempt, e.queue,
  e.priority, e.status, e.error_code, e.error_message, e.rows_processed, e.committed_watermark,
  e.chain, e.exclusive, e.slot_key,
  extract(epoch from e.finished_at - e.started_at)::float8 as runtime,
  (select n.id from job_run n where n.previous_run_id = e.id) as next_run_id
from job_run e
where e.id = %(run_id)s::uuid and e.lease_token = %(token)s::uuid and e.finished_at is not null
  and exists (select from audit_event a
    where a.run_id = e.id and a.action = 'run.finish' and a.actor = %(actor)s::text);

-- name: offer_freed
-- The next run that waited for what an attempt held, its job's turn or its concurrency slot, in each
-- queue, marked as offered (R-D7): one of them gets it, and a wake-up in a queue that no worker takes
-- from holds back no other. `place` steps from queue to queue of each job, so that the cost does not
-- grow with the runs that wait. No row for a queue where nothing waits, where the first one is
-- `offered` already, the attempt's own retry, or where someone has it locked and so on its way.
with recursive freed as materialized (
  select j.id
  from job j
  -- include: sides
  left join concurrency_key k on k.key = j.concurrency_key
  where j.id = any(array(
      select %(job_id)s::uuid where %(exclusive)s::boolean
      union
      select same.id from job same where same.concurrency_key = %(slot_key)s::text))
    -- include: switched_on
    -- include: has_room
), place (job_id, queue) as (
  select freed.id, (select r.queue || '' from job_run r
    where r.status = 'PENDING' and r.job_id = freed.id order by r.queue || '' limit 1)
  from freed
  union all
  select place.job_id, (select r.queue || '' from job_run r
    where r.status = 'PENDING' and r.job_id = place.job_id and r.queue || '' > place.queue
    order by r.queue || '' limit 1)
  from place where place.queue is not null
), first as materialized (
  select distinct on (place.queue) due.id
  from place cross join lateral (
    select r.id, r.priority, r.available_at, r.created_at
    from job_run r
    where r.status = 'PENDING' and r.job_id = place.job_id and r.queue || '' = place.queue
      and r.available_at <= statement_timestamp()
    order by r.priority desc, r.available_at, r.created_at, r.id
    limit 1
  ) due
  order by place.queue, due.priority desc, due.available_at, due.created_at, due.id
), locked as materialized (
  select r.id from job_run r
  where r.id = any(array(select first.id from first))
    and r.lease_token is null and r.finished_at is null and r.id is distinct from %(offered)s::uuid
  for no key update of r skip locked
)
update job_run u
set offered_at = clock_timestamp(), offer_count = u.offer_count + 1
where u.id = any(array(select locked.id from locked))
returning u.id, u.queue, u.priority;
