-- name: server
-- What the control database runs on, for `db status` and `doctor`.
select current_setting('server_version') as server_version,
  current_database() as database, current_user as role, current_schema() as schema,
  pg_is_in_recovery() as is_standby, clock_timestamp() as now;

-- name: volume
-- How much the control database holds, by the server's statistics, and its fence.
select pg_database_size(current_database()) as bytes,
  (select greatest(reltuples, 0)::bigint from pg_class where oid = 'job_run'::regclass) as runs,
  (select last_value from fence_seq) as fence;

-- name: bump_fence
-- Move the fence past every number that was handed out after the backup was taken (R-F5), with its
-- audit record (R-X4).
with moved as (
  select setval('fence_seq', greatest((select last_value from fence_seq),
    (select coalesce(max(fence), 0) from job_run)) + %(by)s::bigint) as fence
), audited as (
  insert into audit_event (actor, action, subject_type, subject, outcome, detail)
  select %(actor)s::text, 'db.bump-fence', 'db', 'fence_seq', 'moved',
    jsonb_build_object('fence', fence) from moved
  returning id
)
select fence + 1 as next_fence from moved where exists (select from audited);

-- name: beats
-- The beats that listen on this database, on all hosts and under one connection's name; such a name
-- is seen by every role.
select count(*) as beats, count(*) filter (where application_name = %(name)s::text) as beats_here
from pg_stat_activity
where starts_with(application_name, 'claimcheck-beat') and datname = current_database();

-- name: health
-- What should not be: leases that nobody recovered, due schedules that nobody fired, and schedules
-- that fail.
select
  (select count(*) from job_run
   where status in ('RUNNING', 'CANCEL_REQUESTED')
     and lease_until < clock_timestamp() - interval '60 seconds') as expired_leases,
  (select count(*) from job_schedule
   where greatest(next_fire_at, retry_at) < clock_timestamp() - interval '60 seconds')
    as overdue_schedules,
  (select count(*) from job_schedule where failures > 0) as failing_schedules,
  (select count(*) from job_run where status in ('RUNNING', 'CANCEL_REQUESTED')) as running;

-- name: waiting
-- The runs that have been due for a minute, of jobs that may run, by their queue and the handler that
-- a worker needs for them.
select r.queue, j.handler, count(*) as runs, min(r.available_at) as since
from job j
join job_run r on r.job_id = j.id
-- include: sides
where r.status = 'PENDING' and r.available_at < clock_timestamp() - interval '60 seconds'
  -- include: switched_on
group by r.queue, j.handler
order by r.queue, j.handler;

-- name: long_transactions
-- The transactions of this database that keep dead rows, and have for long, the oldest first. Those of
-- other roles are seen by a member of pg_read_all_stats only.
select pid, usename as role, application_name as application, xact_start as since
from pg_stat_activity
where datname = current_database() and backend_type = 'client backend'
  and (backend_xmin is not null or backend_xid is not null) and pid <> pg_backend_pid()
  and xact_start < clock_timestamp() - make_interval(secs => %(seconds)s::float8)
order by xact_start
limit 10;

-- name: handlers_of_jobs
-- The handlers that enabled jobs need.
select distinct handler from job where enabled order by handler;
