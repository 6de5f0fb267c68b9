-- name: renew
-- Prolong the lease while the token matches, the run is unfinished and the lease has not expired by
-- the database's clock at this very moment (R-L1); no row means FENCED. The row is locked first: an
-- UPDATE that waited for a mere lock does not look at its conditions again, and would renew a lease
-- that ran out meanwhile. `finished_at is null` stands for the two held states: a status would let
-- the planner take the lease index instead of the key.
with held as materialized (
  select id from job_run
  where id = %(run_id)s::uuid and lease_token = %(token)s::uuid and finished_at is null
  for no key update
)
update job_run
set lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s::float8),
    heartbeat_at = clock_timestamp(),
    progress = coalesce(%(progress)s::jsonb, progress),
    rows_processed = coalesce(%(rows_processed)s::bigint, rows_processed)
where id = (select held.id from held) and lease_token = %(token)s::uuid and finished_at is null
  and lease_until > clock_timestamp()
returning status;

-- name: report
-- Store progress between renewals (R-F1). The lease stays as it is: no index changes with it.
update job_run
set heartbeat_at = clock_timestamp(), progress = %(progress)s::jsonb,
    rows_processed = coalesce(%(rows_processed)s::bigint, rows_processed)
where id = %(run_id)s::uuid and lease_token = %(token)s::uuid and finished_at is null
returning status;

-- name: write_log
-- Append to a run's log, under its token (R-F1, R-X5). `head` goes on at character `offset`; of it
-- what lies beyond the stored end is appended, so that neither a repetition after a lost answer nor
-- a delta that another one overtook stores a line twice or leaves one out. Where a failover lost
-- the end it goes on behind what is left. `tail` is replaced, but not by an older one: its bytes,
-- with those dropped before them, only ever grow.
insert into run_log (run_id, head, tail, dropped_bytes, updated_at)
select r.id, %(head)s::text, %(tail)s::text, %(dropped_bytes)s::bigint, clock_timestamp()
from job_run r
where r.id = %(run_id)s::uuid and r.lease_token = %(token)s::uuid and r.finished_at is null
on conflict (run_id) do update
set head = run_log.head
      || substr(excluded.head, 1 + length(run_log.head) - %(offset)s::integer),
    tail = excluded.tail, dropped_bytes = excluded.dropped_bytes, updated_at = excluded.updated_at
where run_log.dropped_bytes + octet_length(run_log.tail)
  <= excluded.dropped_bytes + octet_length(excluded.tail)
returning run_id;

-- name: exists
-- Whether there is such a run at all: FENCED or NOT_FOUND (R-L1).
select id from job_run where id = %(run_id)s::uuid;

-- name: release
-- End the leases of a child process that its parent saw die (R-L5); R-R1 follows.
update job_run
set lease_until = clock_timestamp()
where status in ('RUNNING', 'CANCEL_REQUESTED') and executor = %(executor)s::text
  and lease_until > clock_timestamp()
returning id, claimcheck_notify('queue:' || queue, 'deadlines');

-- name: expired
-- The runs whose lease has run out, the longest ago first; those set aside are left alone (R-D9).
select r.id
from job_run r
where r.status in ('RUNNING', 'CANCEL_REQUESTED') and r.lease_until <= statement_timestamp()
  and r.id <> all(%(set_aside)s::uuid[])
order by r.lease_until
limit %(limit)s::integer;

-- name: lock_expired
-- One such run, locked and checked again, with what its recovery depends on (R-R1). No row where
-- another recoverer, its holder's late finish, or a cancel has it: nobody waits here (R-R2).
select r.id, r.lease_token, r.status, r.job_name, r.attempt, r.max_attempts, r.executor,
  r.job_snapshot->'definition' as definition,
  exists (select from job_run a join job_run c on c.parent_run_id = a.id
    where a.root_run_id = r.root_run_id) as has_children,
  (select p.error_code from job_run p where p.id = r.previous_run_id) as previous_code
from job_run r
where r.id = %(run_id)s::uuid and r.finished_at is null and r.lease_until <= clock_timestamp()
for no key update of r skip locked;

-- name: still_held
-- Whether the token still holds its run, for work that is stored on its behalf; the lock keeps a
-- cancel or a recovery until that work commits (R-F1).
select status from job_run
where id = %(run_id)s::uuid and lease_token = %(token)s::uuid and finished_at is null
for no key update;
