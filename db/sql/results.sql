-- name: outcome
-- The last attempt of the lineage that a run's id, or an alias of one, belongs to: what a caller
-- who waits for that id is told (R-T7). A step that its chain lost has no run, and failed. No row
-- where the id is of neither.
(select r.id, r.job_name, r.status, r.attempt, r.previous_run_id, r.parent_run_id, r.queue,
       r.executor, r.finished_at, r.result, r.error_code, r.error_message, r.cancellation_warning
from job_run r
where r.root_run_id = coalesce(
  (select root_run_id from job_run where id = %(run_id)s::uuid),
  (select known.root_run_id from run_alias a join job_run known on known.id = a.run_id
     where a.id = %(run_id)s::uuid))
order by r.attempt desc, r.created_at desc
limit 1)
union all
(select a.run_id, a.subject, 'FAILED', 1, null, null, null,
       null, a.at, null, 'chain_broken',
       format('the chain broke after run %%s: %%s', a.detail->>'after', a.detail->>'reason'), null
from audit_event a
where a.run_id = %(run_id)s::uuid and a.action = 'run.trigger' and a.outcome = 'refused'
order by a.id
limit 1)
limit 1;
