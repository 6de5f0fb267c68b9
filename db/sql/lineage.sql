-- fragment: of_last_attempt
-- The last attempt of a lineage, by the id of any of its attempts, or else an alias of one (R-T7):
-- the attempt that nothing replaced. Neither number nor time tells it: a snooze does not count, and
-- clocks step back. `offset 0` keeps the planner from joining all replacements of all lineages.
from job_run r
where r.root_run_id = coalesce(
    (select named.root_run_id from job_run named where named.id = %(run_id)s::uuid),
    (select named.root_run_id from run_alias a join job_run named on named.id = a.run_id
     where a.id = %(run_id)s::uuid))
  and not exists (select from job_run later where later.previous_run_id = r.id offset 0)

-- name: last_attempt
-- What a lineage has come to (R-K1).
select r.id, r.status, r.job_name as job, r.queue, r.priority, r.attempt, r.root_run_id,
  r.previous_run_id, r.started_at, r.cancellation_warning, r.error_code
-- include: of_last_attempt
;

-- name: lock_last_attempt
-- The same to replace it (R-R8). Behind another replacement of it, it is RETRY_SCHEDULED when it is
-- locked at last, and no longer the last one: look again.
select r.id, r.job_id, r.job_name, r.status, r.queue, r.priority, r.attempt
-- include: of_last_attempt
for no key update of r;

-- name: outcome
-- The same for a caller who waits for that id (R-T7). A step that its chain lost has no run, and
-- failed. No row where the id is of neither.
(select r.id, r.job_name, r.status, r.attempt, r.previous_run_id, r.parent_run_id, r.queue,
       r.executor, r.finished_at, r.result, r.error_code, r.error_message, r.cancellation_warning
-- include: of_last_attempt
)
union all
(select a.run_id, a.subject, 'FAILED', 1, null, null, null,
       null, a.at, null, 'chain_broken',
       format('the chain broke after run %%s: %%s', a.detail->>'after', a.detail->>'reason'), null
from audit_event a
where a.run_id = %(run_id)s::uuid and a.action = 'run.trigger' and a.outcome = 'lost'
order by a.id
limit 1)
limit 1;
