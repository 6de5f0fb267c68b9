-- name: cancel
-- Record the intent to cancel (R-K1): a waiting attempt ends at once, also one in backoff (R-R5); a
-- held one is asked to. No row where it is neither any more: of a race, the answer tells who won.
-- Its holder hears of it by the notification of its id, the beat of the changed deadlines (R-D3).
with asked as (
  update job_run r
  set status = case r.status when 'PENDING' then 'CANCELLED' else 'CANCEL_REQUESTED' end,
      cancel_requested_at = clock_timestamp(),
      finished_at = case r.status when 'PENDING' then clock_timestamp() end
  where r.id = %(run_id)s::uuid and r.finished_at is null and r.cancel_requested_at is null
  returning r.*
), audited as (
  insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
  select %(actor)s::text, 'run.cancel', 'run', asked.job_name, asked.id, asked.status,
    jsonb_build_object('attempt', asked.attempt)
  from asked
  returning run_id
), told as materialized (
  select pg_notify('claimcheck_cancel', asked.id::text) as holder,
    claimcheck_notify('queue:' || asked.queue, 'deadlines') as beat
  from asked
)
select asked.id, asked.status, asked.job_name as job, asked.queue, asked.priority, asked.attempt,
  asked.root_run_id, asked.previous_run_id,
  (select count(*) from audited) + (select count(*) from told) as recorded
from asked;
