-- name: have_runs
-- Which of these child jobs have a run of this lineage already, so that an attempt that repeats
-- another gives them no second one (R-R7), and whether any has. A retry by hand (R-R8) starts anew:
-- what came before it does not count. The caller holds the run, so that nothing is added meanwhile.
-- `offset 0` keeps the planner, which takes a lineage for long, from reading the whole table.
with recursive attempt as (
  select r.id, r.previous_run_id from job_run r where r.id = %(run_id)s::uuid
  union all
  select before.id, before.previous_run_id
  from attempt join job_run before on before.id = attempt.previous_run_id
  where not exists (select from audit_event a
    where a.run_id = attempt.id and a.action = 'run.retry')
), child as materialized (
  select found.job_id, found.job_name
  from attempt cross join lateral (
    select r.job_id, r.job_name from job_run r where r.parent_run_id = attempt.id offset 0
  ) found
)
select array(select distinct child.job_id from child
    where child.job_id is not null and child.job_name = any(%(names)s::text[])) as job_ids,
  exists (select from child) as has_any;
