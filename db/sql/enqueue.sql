-- name: enqueue
-- Create one PENDING run of a job by its name, or hand back the run that stands for it already.
-- One round trip on any connection, in the caller's transaction:
--   R-T4  each wait for another transaction ends after a second; the setting is put back
--   R-R7  a run id that is known already is the repetition of this very statement
--   R-T5  an idempotency key is stored with its run; a known one hands its run back
--   R-T6  `skip` hands back the active run; the unique index job_run_one_active keeps it
--   R-T7  the id that was asked for resolves as an alias of the run that is handed back
--   R-T8  an unknown or disabled job stores nothing; a lock keeps the job from being removed
--   R-D3  notifies where the beat cannot know of the run otherwise
--   R-X4  the audit record of the created run
-- The outcome `raced` means that another transaction committed meanwhile what this one's snapshot
-- does not show: do it again.
with moment as materialized (
  select clock_timestamp() as now,
         current_setting('lock_timeout') as lock_timeout_before,
         set_config('lock_timeout',
           case when current_setting('lock_timeout')::interval
                     between interval '1 millisecond' and interval '1 second'
                then current_setting('lock_timeout') else '1s' end, true) as lock_timeout
), asked as materialized (
  select j.id, j.name, j.enabled, j.source_enabled, j.sink_enabled, j.paused, j.max_attempts,
         coalesce(%(queue)s::text, j.queue) as queue,
         coalesce(%(priority)s::smallint, j.priority) as priority,
         coalesce(nullif(j.definition->'params', 'null'), '{}') || %(params)s::jsonb as params,
         case when %(by_schedule)s::boolean and not jsonb_exists(j.definition, 'overlap')
              then 'skip' else j.overlap end as overlap,
         greatest(moment.now, coalesce(%(eta)s::timestamptz,
           moment.now + make_interval(secs => %(countdown)s::float8))) as available_at,
         moment.now
  from moment, job j
  where j.name = %(job)s::text
  for key share of j
), same_id as materialized (
  select id, job_name, id as asked_id from job_run where id = %(run_id)s::uuid
  union all
  select r.id, r.job_name, a.id from run_alias a join job_run r on r.id = a.run_id
  where a.id = %(run_id)s::uuid
), same_key as materialized (
  select k.run_id as id
  from trigger_key k, asked
  where k.job_id = asked.id and k.key = %(key)s::text and k.expires_at > asked.now
), active as materialized (
  -- First under this policy, which the index serves, then under any other: a schedule skips where a
  -- manual trigger would queue, and a policy may have been edited.
  select coalesce(
    (select r.id from job_run r where r.skip_key = asked.id
       and r.status in ('PENDING', 'RUNNING', 'CANCEL_REQUESTED')),
    (select r.id from job_run r where r.job_id = asked.id
       and r.status in ('RUNNING', 'CANCEL_REQUESTED') limit 1),
    (select r.id from job_run r where r.job_id = asked.id and r.status = 'PENDING' limit 1)) as id
  from asked where asked.overlap = 'skip'
), admitted as materialized (
  select * from asked
  where (%(accept_disabled)s::boolean or (enabled and source_enabled and sink_enabled))
    and not exists (select from same_id) and not exists (select from same_key)
    and not exists (select from active where id is not null)
), new_key as (
  insert into trigger_key as k (job_id, key, run_id, created_at, expires_at)
  select id, %(key)s::text, %(run_id)s::uuid, now, now + make_interval(secs => %(key_seconds)s::float8)
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
    case when overlap = 'skip' then id end, now, params, %(chain)s::jsonb,
    %(schedule_id)s::uuid, %(scheduled_for)s::timestamptz, %(actor)s::text
  from admitted where %(key)s::text is null or exists (select from new_key)
  on conflict do nothing
  returning id, queue, priority, available_at > created_at as later
), audited as (
  insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
  select %(actor)s::text, 'run.trigger', 'run', asked.name, created.id, 'created',
    jsonb_strip_nulls(jsonb_build_object('schedule_id', %(schedule_id)s::uuid,
      'scheduled_for', %(scheduled_for)s::timestamptz, 'parent_run_id', %(parent_run_id)s::uuid))
  from created, asked
  returning run_id
), handed_back as materialized (
  select coalesce(same_id.id, same_key.id, active.id) as id,
         case when same_id.id is not null then 'same_id'
              when same_key.id is not null then 'same_key' else 'active' end as why,
         same_id.job_name, same_id.asked_id
  from moment
  left join same_id on true left join same_key on true
  left join active on exists (
    select from asked where %(accept_disabled)s::boolean or (enabled and source_enabled and sink_enabled))
  where coalesce(same_id.id, same_key.id, active.id) is not null
), kept as materialized (
  -- The lock that the foreign key takes later, while the deadline still holds.
  select r.id from handed_back, job_run r
  where r.id = handed_back.id and handed_back.why <> 'same_id' and %(id_handed_out)s::boolean
  for key share of r
), aliased as (
  insert into run_alias (id, run_id)
  select %(run_id)s::uuid, id from kept
  on conflict (id) do nothing
  returning id
), notified as materialized (
  select claimcheck_notify('queue:' || queue,
    case when later or %(notify)s::text = 'deadlines' then 'deadlines' else 'work' end) as done
  from created where later or %(notify)s::text is not null
)
select
  case when created.id is not null then 'created'
       when handed_back.id is not null then handed_back.why
       when asked.id is null then 'unknown'
       when not %(accept_disabled)s::boolean and not asked.enabled then 'disabled'
       when not %(accept_disabled)s::boolean and not asked.source_enabled then 'source_disabled'
       when not %(accept_disabled)s::boolean and not asked.sink_enabled then 'sink_disabled'
       else 'raced' end as outcome,
  coalesce(created.id, handed_back.id) as run_id,
  coalesce(created.queue, asked.queue) as queue,
  coalesce(created.priority, asked.priority) as priority,
  coalesce(not created.later and not asked.paused, false) as offerable,
  coalesce(handed_back.asked_id = handed_back.id, false) as is_itself,
  handed_back.job_name as other_job,
  asked.id as job_id,
  (select count(*) from new_key) as keys,
  (select count(*) from audited) + (select count(*) from aliased)
    + (select count(*) from notified) as written,
  set_config('lock_timeout', moment.lock_timeout_before, true) as lock_timeout
from moment
left join asked on true left join created on true left join handed_back on true;

-- name: forget_key
-- Take back a key whose run lost the race of R-T6: a key is stored only together with its run (R-T5).
delete from trigger_key
where job_id = %(job_id)s::uuid and key = %(key)s::text and run_id = %(run_id)s::uuid
returning key;

-- name: follow_active_run
-- Let the rest of a chain follow the active run that its step was handed back; no row where that
-- run ended meanwhile.
update job_run set chain = coalesce(chain, '[]') || %(chain)s::jsonb
where id = %(run_id)s::uuid and finished_at is null
returning id;

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
-- A step whose job is gone ends its chain, and says so (R-X4).
insert into audit_event (actor, action, subject_type, subject, run_id, outcome, detail)
values ('chain', 'run.trigger', 'run', %(job)s::text, %(run_id)s::uuid, 'refused',
  jsonb_build_object('reason', %(reason)s::text, 'after', %(after)s::uuid,
    'steps_lost', %(lost)s::integer));
