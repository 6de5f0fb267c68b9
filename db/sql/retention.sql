-- name: forget_runs
-- Remove one batch of lineages that ended longer ago than their retention, with all that hangs on
-- them (R-S3). A lineage goes as a whole, so that each of its ids resolves as long as one is kept: it
-- is known by its last attempt, the only one that is not RETRY_SCHEDULED, so that the attempts of a
-- lineage that lives on stand in front of nothing. The lock keeps a manual retry from going on with
-- it meanwhile. A batch counts attempts; the lineage in which it gets full still goes with it. None
-- goes before its idempotency key, which is the first attempt's: a repeated trigger still gets that
-- run (R-T5).
with ended as materialized (
  select r.id, r.root_run_id, r.finished_at
  from job_run r
  where r.finished_at < statement_timestamp() - make_interval(secs => %(seconds)s::float8)
    and r.status <> 'RETRY_SCHEDULED'
    and not exists (select from trigger_key k
      where k.run_id = r.root_run_id and k.expires_at > statement_timestamp())
  order by r.finished_at
  limit %(batch)s::integer
  for update skip locked
), counted as materialized (
  select ended.root_run_id,
    sum(lineage.attempts) over (order by ended.finished_at, ended.id) - lineage.attempts as before
  from ended cross join lateral (
    select count(*) as attempts from job_run x where x.root_run_id = ended.root_run_id
  ) lineage
), forgotten as (
  delete from job_run
  where root_run_id = any(array(
    select counted.root_run_id from counted where counted.before < %(batch)s::integer))
  returning id, chain
), lost as (
  -- A step that a broken chain lost has a record and no run: it goes with the run before it.
  select (later.step->>'run_id')::uuid as run_id
  from forgotten
  cross join lateral jsonb_array_elements(forgotten.chain) as following (steps)
  cross join lateral jsonb_array_elements(following.steps) as later (step)
), unaudited as (
  delete from audit_event where run_id = any(array(select forgotten.id from forgotten))
  returning id
), unlost as (
  delete from audit_event
  where run_id = any(array(select lost.run_id from lost)) and outcome = 'lost'
    and detail->>'after' = any(array(select forgotten.id::text from forgotten))
  returning id
)
select (select count(*) from forgotten) as removed,
  (select count(*) from unaudited) + (select count(*) from unlost) as records;

-- name: record_prune
-- Note in the one record of a prune that somebody asked for how many runs it has removed so far, in
-- the transaction of each batch (R-X4): one that is interrupted has told the truth.
with begun as (
  insert into audit_event (actor, action, subject_type, subject, outcome, detail)
  select %(actor)s::text, 'db.prune', 'db', 'job_run', 'removed',
    jsonb_build_object('runs', %(runs)s::bigint, 'days', %(days)s::float8)
  where %(record)s::bigint is null
  returning id
), grown as (
  update audit_event
  set detail = detail || jsonb_build_object('runs', (detail->>'runs')::bigint + %(runs)s::bigint)
  where id = %(record)s::bigint
  returning id
)
select id from begun union all select id from grown;

-- name: forget_slots
-- Remove one batch of slots that lie longer ago than the retention of runs.
with old as materialized (
  select slot.schedule_id, slot.fire_at
  from job_schedule
  cross join lateral (
    select x.schedule_id, x.fire_at from schedule_slot x
    where x.schedule_id = job_schedule.id
      and x.fire_at < statement_timestamp() - make_interval(secs => %(seconds)s::float8)
    order by x.fire_at
    limit %(batch)s::integer
  ) slot
  limit %(batch)s::integer
), forgotten as (
  delete from schedule_slot x using old
  where x.schedule_id = old.schedule_id and x.fire_at = old.fire_at
  returning x.fire_at
)
select count(*) as removed from forgotten;

-- name: forget_keys
-- Remove one batch of idempotency keys that are honoured no more (R-T5).
with old as materialized (
  select k.job_id, k.key from trigger_key k
  where k.expires_at < statement_timestamp()
  order by k.expires_at
  limit %(batch)s::integer
  for update skip locked
), forgotten as (
  delete from trigger_key k using old
  where k.job_id = old.job_id and k.key = old.key
  returning k.key
)
select count(*) as removed from forgotten;
