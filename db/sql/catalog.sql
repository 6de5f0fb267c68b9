-- name: let_go_of_job
-- Take one batch of a job's finished runs from it, and from its schedules, before it is removed: they
-- are kept, under its name (R-S3). The newest first, from where the batch before ended, by the index
-- of runs by their job's name; what has another name there is left to the foreign key.
with finished as materialized (
  select r.id, r.created_at
  from job_run r
  where r.job_name = %(name)s::text and r.created_at <= %(reached)s::timestamptz
    and r.job_id = %(job_id)s::uuid and r.finished_at is not null
  order by r.created_at desc
  limit %(batch)s::integer
), changed as (
  update job_run set job_id = null, schedule_id = null
  where id = any(array(select finished.id from finished))
  returning id
)
select (select count(*) from changed) as runs, min(finished.created_at)::text as reached
from finished;

-- name: let_go_of_schedule
-- The same for the finished runs that a schedule created, before it is removed alone.
with finished as materialized (
  select r.id
  from job_run r
  where r.schedule_id = %(schedule_id)s::uuid and r.finished_at is not null
  limit %(batch)s::integer
), changed as (
  update job_run set schedule_id = null
  where id = any(array(select finished.id from finished))
  returning id
)
select count(*) as runs from changed;
