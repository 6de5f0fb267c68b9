-- fragment: picked
-- What a claim reads of a run, its job and its datasources: `lo` and `hi`, in the order of their
-- ids, are source and sink or the one that is there, else the null datasource.
  select r.id, j.overlap <> 'allow' as exclusive, j.concurrency_key, k.max as slots,
    j.name, j.handler, j.definition, j.watermark, j.watermark_type, j.source_id, j.sink_id,
    lo.id as lo_id, lo.name as lo_name, lo.connector as lo_connector, lo.envelope as lo_envelope,
    hi.id as hi_id, hi.name as hi_name, hi.connector as hi_connector, hi.envelope as hi_envelope
  from patience
  cross join job_run r
  join job j on j.id = r.job_id
  join datasource lo on lo.id = coalesce(least(j.source_id, j.sink_id),
    '00000000-0000-0000-0000-000000000000')
  join datasource hi on hi.id = coalesce(greatest(j.source_id, j.sink_id),
    '00000000-0000-0000-0000-000000000000')
  left join concurrency_key k on k.key = j.concurrency_key

-- fragment: open
-- What lets a job's runs be claimed by this worker: the switches, its handlers and its keys (R-C2).
    and j.enabled and not j.paused and j.source_enabled and j.sink_enabled
    and lo.enabled and hi.enabled
    and j.handler = any(%(handlers)s::text[])
    and (lo.envelope is null or lo.envelope->>'key_version' = any(%(key_versions)s::text[]))
    and (hi.envelope is null or hi.envelope->>'key_version' = any(%(key_versions)s::text[]))

-- fragment: claimed
-- A picked run becomes RUNNING, with everything that its work needs (R-C4, R-C5).
), claimed as (
  update job_run u set
    status = 'RUNNING',
    executor = %(executor)s::text,
    lease_token = %(token)s::uuid,
    lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s::float8),
    heartbeat_at = clock_timestamp(),
    started_at = clock_timestamp(),
    fence = nextval('fence_seq'),
    datasources_resolved_at = clock_timestamp(),
    job_snapshot = jsonb_build_object('job', pick.name, 'handler', pick.handler,
      'definition', pick.definition, 'watermark', pick.watermark,
      'watermark_type', pick.watermark_type,
      'source', case pick.source_id
        when lo_id then jsonb_build_object('name', lo_name, 'connector', lo_connector)
        when hi_id then jsonb_build_object('name', hi_name, 'connector', hi_connector) end,
      'sink', case pick.sink_id
        when lo_id then jsonb_build_object('name', lo_name, 'connector', lo_connector)
        when hi_id then jsonb_build_object('name', hi_name, 'connector', hi_connector) end),
    source_datasource_id = pick.source_id,
    source_snapshot = case pick.source_id when lo_id then lo_envelope when hi_id then hi_envelope end,
    sink_datasource_id = pick.sink_id,
    sink_snapshot = case pick.sink_id when lo_id then lo_envelope when hi_id then hi_envelope end,
    exclusive = pick.exclusive,
    slot_key = pick.concurrency_key,
    -- R-C8: of the free numbers only as many as there is room for, the lowest, so that racing
    -- claims never hold more than the limit, also just after it was lowered.
    slot_no = case when pick.concurrency_key is not null then (
      select free.n from (
        select n from generate_series(1, pick.slots) n
        where not exists (select from job_run x where x.slot_key = pick.concurrency_key
          and x.slot_no = n and x.finished_at is null)
        order by n
        limit greatest(0, (select pick.slots - count(*) from job_run x
          where x.slot_key = pick.concurrency_key and x.finished_at is null))
      ) free order by random() limit 1) end
  from pick
  where u.id = (select id from pick)
  returning u.id, u.job_id, u.job_name, u.root_run_id, u.previous_run_id, u.attempt,
    u.max_attempts, u.fence, u.queue, u.priority, u.available_at, u.created_at, u.params, u.chain,
    u.exclusive, u.slot_key, u.scheduled_for, u.job_snapshot, u.source_snapshot,
    u.source_datasource_id, u.sink_snapshot, u.sink_datasource_id
), notified as materialized (
  select claimcheck_notify('queue:' || queue, 'deadlines') as done
  from claimed where %(notify)s::boolean
)

-- fragment: named
-- The named run, while nobody holds it, it is due, and there is room for it beside the others of
-- its job and its key. "PENDING" is spelt as unclaimed and unfinished: the status would let the
-- planner leave the primary key.
  where r.id = %(run_id)s::uuid
    and r.lease_token is null and r.finished_at is null
    and r.available_at <= statement_timestamp()
    -- include: has_room

-- name: claim_directed
-- Take the named run or nothing, and prepare it, in one statement that never waits (R-C1, R-C4,
-- R-C5). Always one row: `id` is null where nothing was taken; `candidates` tells then whether the
-- run is eligible, and someone holds it, its job or a datasource. The run's lock lets the share lock
-- of a foreign key pass, so that an alias or a key that is stored for the run does not hide it.
with patience as materialized (
  select set_config('lock_timeout', '100ms', true) as lock_timeout
), pick as materialized (
  -- include: picked
  -- include: named
  -- include: open
  for no key update of r skip locked
  for share of j, lo, hi skip locked
-- include: claimed
select claimed.*,
  (select p.error_code from job_run p where p.id = claimed.previous_run_id) as previous_code,
  (select count(*) from notified) as notified,
  case when claimed.id is null then (
    select count(*) from (
      -- include: picked
      -- include: named
      -- include: open
    ) candidate
  ) else 0 end as candidates
from (select) always left join claimed on true;

-- name: edit_patience
-- What bounds the wait for an edit, over all the locks together (R-C4), and what a claimer that
-- stops in the middle of it keeps from others.
select set_config('statement_timeout', '1s', true) as statement_timeout,
  set_config('idle_in_transaction_session_timeout', '5s', true) as idle_timeout;

-- name: wait_for_edit
-- Lock what a claim of the named run locks, and wait for whoever edits it: the run, then its job,
-- then both datasources in ascending order of their ids (R-C4). The claim that follows in the same
-- transaction waits for nothing any more, so what it reads, locked or not, is from after the edit,
-- a limit too (R-C5, R-C8).
with patience as materialized (
  select set_config('lock_timeout', '1s', true) as lock_timeout
), pick as materialized (
  -- include: picked
  -- include: named
  -- include: open
  for no key update of r skip locked
  for share of j, lo, hi
)
select pick.id from pick;

-- name: claim_next
-- Take the next eligible run of a queue and prepare it, in one statement that never waits (R-C3,
-- R-C4). Always one row: `id` is null where nothing was taken; then `near` tells how many due runs
-- were looked at, and `candidates` how many of all were eligible but locked by someone.
--   near       the first due runs of each priority, from a given place in its order onwards
--   unseen     the highest priority that may have more than these: a lower one is not taken before
--              a wide look has told that the rest of it is blocked
--   waiting    (a wide look) every job that has waiting runs, found by stepping from job to job, so
--              that ten thousand blocked runs of a job cost one step
--   open_job   which of these jobs may run now, and how many more of their runs
--   free_job   (a deep look, past runs that others have locked) of these, the ones that nobody edits
--   candidate  the runs to try, in order; not more than have room
-- Job and datasources are locked before the run, so that an open edit leaves its runs untouched.
-- Each part names one index by its own spelling (`r.queue || ''`, `finished_at is null`), so that a
-- plan that was made while the table was empty is as good as any.
with recursive patience as materialized (
  select set_config('lock_timeout', '100ms', true) as lock_timeout
), near as materialized (
  select due.id, due.job_id, due.priority, due.available_at, due.created_at
  from unnest(%(priorities)s::smallint[], %(after_available_at)s::timestamptz[],
    %(after_created_at)s::timestamptz[], %(after_id)s::uuid[])
    as level (priority, after_available_at, after_created_at, after_id)
  cross join lateral (
    select r.id, r.job_id, r.priority, r.available_at, r.created_at
    from job_run r
    where r.status = 'PENDING' and r.queue = %(queue)s::text and r.priority = level.priority
      and r.available_at <= statement_timestamp()
      and (r.available_at, r.created_at, r.id)
        >= (level.after_available_at, level.after_created_at, level.after_id)
    order by r.available_at, r.created_at, r.id
    limit %(window)s::integer
  ) due
  where not %(wide)s::boolean
), unseen as materialized (
  select max(level.priority) as priority from (
    select near.priority from near group by near.priority having count(*) >= %(window)s::integer
  ) level
), waiting (job_id) as (
  (select r.job_id from job_run r
   where r.status = 'PENDING' and %(wide)s::boolean order by r.job_id limit 1)
  union all
  select (select r.job_id from job_run r
          where r.status = 'PENDING' and r.job_id > waiting.job_id order by r.job_id limit 1)
  from waiting where waiting.job_id is not null
), open_job as materialized (
  select j.id, least(
    case when j.overlap = 'allow' then %(window)s::integer
         -- include: room
  ) as room
  from job j
  join datasource lo on lo.id = coalesce(least(j.source_id, j.sink_id),
    '00000000-0000-0000-0000-000000000000')
  join datasource hi on hi.id = coalesce(greatest(j.source_id, j.sink_id),
    '00000000-0000-0000-0000-000000000000')
  left join concurrency_key k on k.key = j.concurrency_key
  where j.id = any(array(
      select near.job_id from near
      union all
      select waiting.job_id from waiting where waiting.job_id is not null))
  -- include: open
), free_job as materialized (
  select open_job.id, open_job.room from open_job
  where not %(deep)s::boolean and open_job.room > 0
  union all
  select unlocked.id, unlocked.room from (
    select open_job.id, open_job.room
    from open_job
    join job j on j.id = open_job.id
    join datasource lo on lo.id = coalesce(least(j.source_id, j.sink_id),
      '00000000-0000-0000-0000-000000000000')
    join datasource hi on hi.id = coalesce(greatest(j.source_id, j.sink_id),
      '00000000-0000-0000-0000-000000000000')
    where %(deep)s::boolean and open_job.room > 0
    for share of j, lo, hi skip locked
  ) unlocked
), candidate as materialized (
  select placed.id from (
    select found.*, row_number() over (partition by found.job_id
      order by found.priority desc, found.available_at, found.created_at, found.id) as place
    from (
      select near.*, free_job.room from near join free_job on free_job.id = near.job_id
      where near.priority >= coalesce((select unseen.priority from unseen), near.priority)
      union all
      select due.*, free_job.room
      from free_job cross join lateral (
        select r.id, r.job_id, r.priority, r.available_at, r.created_at
        from job_run r
        where r.status = 'PENDING' and r.job_id = free_job.id and r.queue || '' = %(queue)s::text
          and r.available_at <= statement_timestamp()
        order by r.priority desc, r.available_at, r.created_at, r.id
        limit %(window)s::integer
      ) due
      where %(wide)s::boolean
    ) found
  ) placed
  where placed.place <= placed.room or %(deep)s::boolean
  order by placed.priority desc, placed.available_at, placed.created_at, placed.id
  limit %(tries)s::integer
), pick as materialized (
  -- include: picked
  where r.id = any(array(select candidate.id from candidate))
    and r.lease_token is null and r.finished_at is null
    and r.available_at <= statement_timestamp()
  -- include: open
    and (j.concurrency_key is null or k.max is not null)
  order by r.priority desc, r.available_at, r.created_at, r.id
  limit 1
  for share of j, lo, hi skip locked
  for no key update of r skip locked
-- include: claimed
select claimed.*,
  (select p.error_code from job_run p where p.id = claimed.previous_run_id) as previous_code,
  (select count(*) from notified) as notified,
  (select count(*) from near) as near,
  (select count(*) from candidate) as candidates,
  extract(epoch from clock_timestamp() - statement_timestamp())::float8 as seconds
from (select) always left join claimed on true;

-- name: beyond_this_worker
-- A due run that this worker may not take, because it does not know the handler or does not hold a
-- key of it (R-C2), while another one may; no row where the run is not to be had for other reasons.
select r.queue, r.priority, j.handler,
  not (j.handler = any(%(handlers)s::text[])) as is_unknown
from job_run r
join job j on j.id = r.job_id
-- include: sides
where r.id = %(run_id)s::uuid and r.lease_token is null and r.finished_at is null
  and r.available_at <= statement_timestamp()
  -- include: switched_on
  and not (j.handler = any(%(handlers)s::text[])
    and coalesce(s.envelope->>'key_version' = any(%(key_versions)s::text[]), true)
    and coalesce(t.envelope->>'key_version' = any(%(key_versions)s::text[]), true));

-- name: claim_by_token
-- What became of a claim whose answer was lost: the run, if it landed and is still held (R-R7).
select u.id, u.job_id, u.job_name, u.root_run_id, u.previous_run_id, u.attempt,
  u.max_attempts, u.fence, u.queue, u.priority, u.available_at, u.created_at, u.params, u.chain,
  u.exclusive, u.slot_key, u.scheduled_for, u.job_snapshot, u.source_snapshot,
  u.source_datasource_id, u.sink_snapshot, u.sink_datasource_id,
  (select p.error_code from job_run p where p.id = u.previous_run_id) as previous_code
from job_run u
where u.status in ('RUNNING', 'CANCEL_REQUESTED')
  and u.executor = %(executor)s::text and u.lease_token = %(token)s::uuid
  and u.lease_until > clock_timestamp();
