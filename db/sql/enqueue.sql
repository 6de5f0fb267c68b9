-- fragment: patience
-- Each wait of the statement for another transaction ends after a second, or sooner where the caller
-- says so; the last of it puts the setting back (R-T4).
         current_setting('lock_timeout') as lock_timeout_before,
         set_config('lock_timeout',
           case when current_setting('lock_timeout')::interval
                     between interval '1 millisecond' and interval '1 second'
                then current_setting('lock_timeout') else '1s' end, true) as lock_timeout

-- name: enqueue
-- Create one PENDING run of a job by its name, in one round trip and the caller's transaction. Where
-- `id` comes back as null none was created, and `stand_in` tells why.
--   R-T4  each wait for another transaction ends after a second; the setting is put back
--   R-T5  an idempotency key is stored with its run, and an expired one is taken over
--   R-T6  `skip` creates no second active run; the unique index job_run_one_active keeps it
--   R-T7  an id that is an alias of another run already creates none, nor does a known run's id
--   R-T8  an unknown or disabled job stores nothing; a lock keeps the job from being removed
--   R-D3  notifies where the beat cannot know of the run otherwise
--   R-X4  the audit record of the created run
-- The shape is lean on purpose: to start a plan costs by its nodes, and this is the way of every run.
with moment as materialized (
  select clock_timestamp() as now,
  -- include: patience
), asked as materialized (
  select j.id, j.name, j.paused, j.max_attempts, moment.now,
         coalesce(%(queue)s::text, j.queue) as queue,
         coalesce(%(priority)s::smallint, j.priority) as priority,
         coalesce(nullif(j.definition->'params', 'null'), '{}') || %(params)s::jsonb as params,
         j.overlap = 'skip' or (%(by_schedule)s::boolean
           and not jsonb_exists(j.definition, 'overlap')) as skips,
         greatest(moment.now, coalesce(%(eta)s::timestamptz,
           moment.now + make_interval(secs => %(countdown)s::float8))) as available_at
  from moment, job j
  where j.name = %(job)s::text
    and (%(accept_disabled)s::boolean or (j.enabled and j.source_enabled and j.sink_enabled))
    and (j.handler <> %(parameterless)s::text or %(params)s::jsonb = '{}')
  for key share of j
), admitted as materialized (
  -- Active under any policy: a schedule skips where a manual trigger queues, and policies change.
  select * from asked
  where not exists (select from run_alias where id = %(run_id)s::uuid)
    and (not skips or not (
      exists (select from job_run r where r.job_id = asked.id and r.status = 'PENDING')
      or exists (select from job_run r where r.job_id = asked.id
        and r.started_at is not null and r.finished_at is null)))
), new_key as (
  insert into trigger_key as k (job_id, key, run_id, created_at, expires_at)
  select id, %(key)s::text, %(run_id)s::uuid, now,
    now + make_interval(secs => %(key_seconds)s::float8)
  from admitted where %(key)s::text is not null
  on conflict (job_id, key) do update
    set run_id = excluded.run_id, created_at = excluded.created_at, expires_at = excluded.expires_at
    where k.expires_at <= excluded.created_at
  returning k.run_id
), created as (
  insert into job_run (id, job_id, job_name, root_run_id, parent_run_id, max_attempts, queue,
    priority, available_at, offered_at, offer_count, skip_key, created_at, params, chain,
    schedule_id, scheduled_for, triggered_by)
  select %(run_id)s::uuid, id, name, %(run_id)s::uuid, %(parent_run_id)s::uuid, max_attempts, queue,
    priority, available_at,
    case when %(offered)s::boolean and available_at <= now and not paused then now end,
    case when %(offered)s::boolean and available_at <= now and not paused then 1 else 0 end,
    case when skips then id end, now, params, %(chain)s::jsonb,
    %(schedule_id)s::uuid, %(scheduled_for)s::timestamptz, %(actor)s::text
  from admitted where %(key)s::text is null or exists (select from new_key)
  on conflict do nothing
  returning id, job_name, queue, priority, available_at > created_at as later
), audited as (
  insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
  select %(actor)s::text, 'run.trigger', 'run', job_name, id, 'created', %(detail)s::jsonb
  from created
  returning run_id
)
select created.id, created.queue, created.priority, not created.later and not asked.paused as offerable,
  asked.id as job_id,
  case when created.later or (created.id is not null and %(notify)s::text is not null) then
    claimcheck_notify('queue:' || created.queue,
      case when created.later then 'deadlines' else %(notify)s::text end) end as notified,
  (select count(*) from audited) as audited,
  (select count(*) from new_key) as keys,
  set_config('lock_timeout', moment.lock_timeout_before, true) as lock_timeout
from moment left join asked on true left join created on true;

-- name: stand_in
-- Why a trigger created no run: the run that stands for it, or the refusal. What was handed out as
-- this trigger's id becomes an alias of that run (R-T7). The outcome `raced` means that what stood
-- in the way has gone meanwhile: enqueue again.
with moment as materialized (
  select
  -- include: patience
), asked as materialized (
  select j.id, j.queue, j.priority,
         j.handler = %(parameterless)s::text and %(params)s::jsonb <> '{}' as takes_no_params,
         j.enabled or %(accept_disabled)s::boolean as enabled,
         j.source_enabled or %(accept_disabled)s::boolean as source_enabled,
         j.sink_enabled or %(accept_disabled)s::boolean as sink_enabled,
         j.overlap = 'skip' or (%(by_schedule)s::boolean
           and not jsonb_exists(j.definition, 'overlap')) as skips
  from job j where j.name = %(job)s::text
), standing as materialized (
  -- R-R7: a run under the same id is this very trigger, repeated.
  select 1 as rank, 'same_id' as outcome, r.id, r.job_name
  from job_run r where r.id = %(run_id)s::uuid
  union all
  select 1, 'same_id', r.id, r.job_name
  from run_alias a join job_run r on r.id = a.run_id where a.id = %(run_id)s::uuid
  union all
  select 2, 'same_key', r.id, r.job_name
  from asked join trigger_key k on k.job_id = asked.id join job_run r on r.id = k.run_id
  where k.key = %(key)s::text and k.expires_at > clock_timestamp()
  union all
  select 3, 'active', r.id, r.job_name
  from asked cross join lateral (
    -- Two branches, because each has an index of its own.
    (select held.id, held.job_name from job_run held where held.job_id = asked.id
       and held.started_at is not null and held.finished_at is null limit 1)
    union all
    (select next.id, next.job_name from job_run next where next.job_id = asked.id
       and next.status = 'PENDING' limit 1)
    limit 1
  ) r
  where asked.skips and asked.enabled and asked.source_enabled and asked.sink_enabled
), chosen as materialized (
  select * from standing
  where not exists (select from asked where takes_no_params) order by rank limit 1
), kept as materialized (
  -- The lock that the foreign key takes later, while the deadline still holds.
  select r.id from chosen join job_run r on r.id = chosen.id
  where chosen.outcome <> 'same_id' and %(id_handed_out)s::boolean
  for key share of r
), aliased as (
  insert into run_alias (id, run_id) select %(run_id)s::uuid, id from kept
  on conflict (id) do nothing
  returning id
)
select
  case when asked.takes_no_params then 'takes_no_params'
       when chosen.id is not null then chosen.outcome
       when asked.id is null then 'unknown'
       when not asked.enabled then 'disabled'
       when not asked.source_enabled then 'source_disabled'
       when not asked.sink_enabled then 'sink_disabled'
       else 'raced' end as outcome,
  chosen.id as run_id, asked.queue, asked.priority, chosen.job_name as other_job,
  (select count(*) from aliased) as aliased,
  set_config('lock_timeout', moment.lock_timeout_before, true) as lock_timeout
from moment left join asked on true left join chosen on true;

-- name: forget_key
-- Take back a key whose run lost the race of R-T6: a key is stored only together with its run (R-T5).
delete from trigger_key
where job_id = %(job_id)s::uuid and key = %(key)s::text and run_id = %(run_id)s::uuid
returning key;

-- name: follow_active_run
-- Let the rest of a chain follow the active run that its step was handed back; `id` is null where
-- that run ended meanwhile.
with moment as materialized (
  select
  -- include: patience
), followed as (
  update job_run r set chain = coalesce(r.chain, '[]') || %(chain)s::jsonb
  from moment
  where r.id = %(run_id)s::uuid and r.finished_at is null
  returning r.id
)
select followed.id, set_config('lock_timeout', moment.lock_timeout_before, true) as lock_timeout
from moment left join followed on true;

-- name: job_names
-- What a misspelt job may have meant.
select name from job order by name limit 10000;

-- name: chain_jobs
-- The jobs of a chain's later steps, which are refused as the first one is (R-T8).
select asked.name, j.id is not null as known, coalesce(j.enabled, false) as enabled,
       coalesce(j.source_enabled, false) as source_enabled,
       coalesce(j.sink_enabled, false) as sink_enabled
from unnest(%(names)s::text[]) with ordinality as asked (name, position)
left join job j on j.name = asked.name
order by asked.position;

-- name: record_broken_chain
-- A step that cannot be created ends its chain: each step that is lost has one record under the id
-- that was handed out for it, so that whoever asks for that id is told why (R-X4, R-T7).
insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
select 'chain', 'run.trigger', 'run', lost.step->>'job', (lost.step->>'run_id')::uuid, 'lost',
  jsonb_build_object('reason', %(reason)s::text, 'after', %(after)s::uuid,
    'steps_lost', jsonb_array_length(%(lost)s::jsonb))
from jsonb_array_elements(%(lost)s::jsonb) with ordinality as lost (step, position)
order by lost.position;

-- name: broken_chains
-- Where the chain of a run broke, or the chains: after it or later on, or before the step that this
-- id was handed out for.
with step as materialized (
  select %(run_id)s::uuid as run_id
  union
  select (later.step->>'run_id')::uuid
  from job_run r
  cross join lateral jsonb_array_elements(r.chain) as following (steps)
  cross join lateral jsonb_array_elements(following.steps) as later (step)
  where r.id = %(run_id)s::uuid
)
select a.detail->>'after' as after, a.detail->>'reason' as reason,
  (a.detail->>'steps_lost')::integer as steps_lost
from audit_event a
where a.run_id = any(array(select step.run_id from step))
  and a.action = 'run.trigger' and a.outcome = 'lost'
group by a.detail
order by min(a.id);
