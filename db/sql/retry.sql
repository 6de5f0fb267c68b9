-- name: retry
-- Replace a FAILED attempt by one that is due at once (R-R8, R-S2). It may pass the attempt limit by
-- one, takes over what a retry keeps, is recorded (R-X4), and notifies (R-D3). No row where the
-- attempt is not FAILED any more, or where `skip` refuses it: it knows active runs from before the
-- policy too, and the index job_run_one_active keeps it under races (R-T6).
with failed as materialized (
  select r.*, coalesce(r.skip_key, case when j.overlap = 'skip' then j.id end) as its_skip_key,
         clock_timestamp() as now
  from job_run r join job j on j.id = r.job_id
  where r.id = %(previous_run_id)s::uuid and r.status = 'FAILED'
    and (j.overlap <> 'skip' or not (
      exists (select from job_run x where x.job_id = j.id and x.status = 'PENDING')
      or exists (select from job_run x where x.job_id = j.id
        and x.started_at is not null and x.finished_at is null)))
), replaced as (
  update job_run r set status = 'RETRY_SCHEDULED'
  where r.id = (select id from failed)
  returning r.id
), created as (
  insert into job_run (id, job_id, job_name, previous_run_id, root_run_id, parent_run_id, attempt,
    max_attempts, queue, priority, available_at, offered_at, offer_count, skip_key, created_at,
    params, chain, schedule_id, scheduled_for, triggered_by)
  select %(run_id)s::uuid, f.job_id, f.job_name, f.id, f.root_run_id, f.parent_run_id, f.attempt + 1,
    greatest(f.max_attempts, f.attempt + 1), f.queue, f.priority, f.now,
    case when %(offered)s::boolean then f.now end, case when %(offered)s::boolean then 1 else 0 end,
    f.its_skip_key, f.now, f.params, f.chain, f.schedule_id, f.scheduled_for, %(actor)s::text
  from failed f join replaced on replaced.id = f.id
  returning id, job_name, queue, priority
), audited as (
  insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
  select %(actor)s::text, 'run.retry', 'run', job_name, id, 'created',
    jsonb_build_object('previous_run_id', %(previous_run_id)s::uuid)
  from created
)
select id, queue, priority, claimcheck_notify('queue:' || queue, 'deadlines') from created;

-- name: active_run_of
-- The active run that keeps a retry from being created under `skip` (R-T6).
(select id, status from job_run
 where job_id = %(job_id)s::uuid and started_at is not null and finished_at is null limit 1)
union all
(select id, status from job_run
 where job_id = %(job_id)s::uuid and status = 'PENDING' limit 1)
limit 1;
