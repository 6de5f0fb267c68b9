-- name: look
-- The next obligations of what is stored, in one read (R-D3): of each part the seconds from now,
-- negative where it is overdue. Parts and scope are chosen by the caller (R-D6).
--   schedule   the next fire of a schedule, or the end of its back-off
--   lease      the next lease to expire, but for runs whose recovery is set aside (R-D9)
--   retention  the first lineage to outlive its retention, by the attempt that ended it, and its
--              idempotency key (R-T5): the first that ended, or the first that no key keeps longer
--   offer      one row for each queue, job and number of offers that has waiting runs of a job that
--              may run, with how many of them may start now
-- `waiting` steps through job_run_offer_due from one such triple to the next, so the cost grows with
-- the triples and not with the runs; a disabled or paused job costs one step (R-C3, R-D7). Behind a
-- full slot only a time to come counts, since the transition that frees the slot offers the rest
-- (R-D7); so it is for a job that runs one at a time while a wake-up of it is under way in the same
-- queue. One in another queue may wait there for ever.
with recursive waiting (queue, job_id, level) as (
  select first.queue, first.job_id, first.level
  from (
    select r.queue, r.job_id, least(r.offer_count, 14) as level
    from job_run r
    where r.status = 'PENDING' and r.queue >= coalesce(%(queue)s::text, '')
    order by r.queue, r.job_id, least(r.offer_count, 14)
    limit 1
  ) first
  where first.queue = coalesce(%(queue)s::text, first.queue)
  union all
  select next.queue, next.job_id, next.level
  from waiting cross join lateral (
    select r.queue, r.job_id, least(r.offer_count, 14) as level
    from job_run r
    where r.status = 'PENDING' and (r.queue, r.job_id, least(r.offer_count, 14))
      > (waiting.queue, waiting.job_id, waiting.level)
    order by r.queue, r.job_id, least(r.offer_count, 14)
    limit 1
  ) next
  where next.queue = coalesce(%(queue)s::text, next.queue)
), open_job as materialized (
  select j.id, j.name, j.overlap <> 'allow' as exclusive, greatest(0, least(
    case when j.overlap = 'allow' then 1000000
         -- include: room
  )) as room
  from job j
  -- include: sides
  left join concurrency_key k on k.key = j.concurrency_key
  where j.id = any(array(select waiting.job_id from waiting))
    and j.name = coalesce(%(job)s::text, j.name)
    -- include: switched_on
), offer as materialized (
  select waiting.queue, open_job.id as job_id, open_job.name as job, waiting.level,
    case when open_job.exclusive and waiting.level = 0 and exists (
           select from waiting w
           where w.job_id = open_job.id and w.queue = waiting.queue and w.level > 0) then 0
         else open_job.room end as room,
    extract(epoch from first.since - clock_timestamp())::float8 + case waiting.level when 0 then 0
      else least(%(grace_cap)s::float8, %(grace)s::float8 * 2 ^ (waiting.level - 1)) end as seconds
  from waiting
  join open_job on open_job.id = waiting.job_id
  cross join lateral (
    select coalesce(r.offered_at, r.available_at) as since
    from job_run r
    where r.status = 'PENDING' and r.queue = waiting.queue and r.job_id = waiting.job_id
      and least(r.offer_count, 14) = waiting.level
    order by coalesce(r.offered_at, r.available_at)
    limit 1
  ) first
)
select 'schedule' as part, null as queue, null::uuid as job_id, null as job, 0 as level,
  0::bigint as room, extract(epoch from due.at - clock_timestamp())::float8 as seconds
from (
  select greatest(s.next_fire_at, s.retry_at) as at
  from job_schedule s
  where s.next_fire_at is not null and %(schedules)s::boolean
    and (%(job)s::text is null or s.job_id = (select id from job where name = %(job)s::text))
  order by greatest(s.next_fire_at, s.retry_at)
  limit 1
) due
union all
select 'lease', null, null, null, 0, 0, extract(epoch from due.at - clock_timestamp())::float8
from (
  select r.lease_until as at
  from job_run r
  where r.status in ('RUNNING', 'CANCEL_REQUESTED') and %(leases)s::boolean
    and r.id <> all(%(set_aside)s::uuid[])
  order by r.lease_until
  limit 1
) due
union all
select 'retention', null, null, null, 0, 0,
  extract(epoch from due.at - clock_timestamp())::float8
from (
  select min(first.at) as at
  from (
    (select greatest(r.finished_at + make_interval(secs => %(retention)s::float8),
        (select max(k.expires_at) from trigger_key k where k.run_id = r.root_run_id)) as at
     from job_run r
     where r.finished_at is not null and r.status <> 'RETRY_SCHEDULED'
       and %(retention)s::float8 > 0
     order by r.finished_at
     limit 1)
    union all
    (select r.finished_at + make_interval(secs => %(retention)s::float8)
     from job_run r
     where r.finished_at is not null and r.status <> 'RETRY_SCHEDULED'
       and %(retention)s::float8 > 0
       and not exists (select from trigger_key k where k.run_id = r.root_run_id
         and k.expires_at > r.finished_at + make_interval(secs => %(retention)s::float8))
     order by r.finished_at
     limit 1)
  ) first
) due
where due.at is not null
union all
select 'offer', offer.queue, offer.job_id, offer.job, offer.level, offer.room, offer.seconds
from offer where offer.room > 0 or (offer.level = 0 and offer.seconds > 0);

-- name: offer_candidates
-- The runs of one queue that are to be offered now: of each given job and number of offers those that
-- have waited longest, whatever their priority, since a wake-up may be lost for any of them (R-D5); of
-- all these the first in the order of claims (R-C3), at most as many as the queue has room for. So
-- its directed claim (R-C1) may take an older run of a job ahead of one with a higher priority.
select due.id, due.queue, due.priority, due.offer_count
from unnest(%(jobs)s::uuid[], %(levels)s::integer[], %(rooms)s::bigint[])
  as triple (job_id, level, room)
cross join lateral (
  select r.id, r.queue, r.priority, r.available_at, r.created_at, r.offer_count
  from job_run r
  where r.status = 'PENDING' and r.queue = %(queue)s::text and r.job_id = triple.job_id
    and least(r.offer_count, 14) = triple.level
    and coalesce(r.offered_at, r.available_at) <= statement_timestamp() - make_interval(secs =>
      case when triple.level = 0 or %(regardless)s::boolean then 0
      else least(%(grace_cap)s::float8, %(grace)s::float8 * 2 ^ (triple.level - 1)) end)
    and r.available_at <= statement_timestamp()
    and r.id <> all(%(set_aside)s::uuid[])
  order by coalesce(r.offered_at, r.available_at)
  limit least(triple.room, %(room)s::bigint)
) due
order by due.priority desc, due.available_at, due.created_at, due.id
limit %(room)s::bigint;

-- name: mark_offered
-- Mark candidates as offered, before they are published. One that another beat has marked since, or
-- that someone holds locked, is on its way already.
with locked as materialized (
  select r.id
  from unnest(%(run_ids)s::uuid[], %(offer_counts)s::integer[]) as candidate (id, offer_count)
  join job_run r on r.id = candidate.id
  where r.lease_token is null and r.finished_at is null and r.offer_count = candidate.offer_count
  for no key update of r skip locked
)
update job_run u
set offered_at = clock_timestamp(), offer_count = u.offer_count + 1
where u.id = any(array(select locked.id from locked))
returning u.id;

-- name: unmark_offered
-- The broker took none of these: the attempt does not count, so that the grace does not grow while
-- the broker is away.
update job_run
set offer_count = offer_count - 1, offered_at = case when offer_count > 1 then offered_at end
where id = any(%(run_ids)s::uuid[]) and lease_token is null and finished_at is null
  and offer_count > 0;
