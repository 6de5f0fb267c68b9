-- name: lock_due_schedule
-- The next due schedule, locked, so that of any number of beats one settles it (R-D1). Passes over
-- what another transaction holds, and over a job that is being removed. A beat that stops in the
-- middle lets go after ten seconds.
select s.id, s.name, j.name as job, s.cron, s.timezone, s.every_seconds, s.anchor_at, s.misfire,
  s.next_fire_at, clock_timestamp() as now,
  set_config('idle_in_transaction_session_timeout', '10s', true) as patience
from job_schedule s
join job j on j.id = s.job_id
where s.next_fire_at is not null
  and greatest(s.next_fire_at, s.retry_at) <= statement_timestamp()
  and s.id <> all(%(passed)s::uuid[])
order by greatest(s.next_fire_at, s.retry_at)
limit 1
for no key update of s skip locked
for key share of j skip locked;

-- name: lock_schedule
-- One schedule, locked, to settle what is due before it is changed (R-D2).
select s.id, s.name, j.name as job, s.cron, s.timezone, s.every_seconds, s.anchor_at, s.misfire,
  s.next_fire_at, clock_timestamp() as now
from job_schedule s
join job j on j.id = s.job_id
where s.id = %(schedule_id)s::uuid
for no key update of s;

-- name: settled_slots
-- Which of these slots have been settled already (R-D1): a time that was moved back by hand.
select fire_at from schedule_slot
where schedule_id = %(schedule_id)s::uuid and fire_at = any(%(slots)s::timestamptz[]);

-- name: record_slots
-- Settle slots, each with its run or with why there is none (R-D1).
insert into schedule_slot (schedule_id, fire_at, outcome, reason, run_id)
select %(schedule_id)s::uuid, slot.fire_at, slot.outcome, slot.reason, slot.run_id
from unnest(%(fire_at)s::timestamptz[], %(outcome)s::text[], %(reason)s::text[], %(run_id)s::uuid[])
  as slot (fire_at, outcome, reason, run_id)
on conflict (schedule_id, fire_at) do nothing;

-- name: move_schedule
-- Move a schedule on to its next slot, in the transaction that settled the ones before (R-D1).
update job_schedule
set next_fire_at = %(next_fire_at)s::timestamptz, failures = 0, retry_at = null,
  last_fire_at = greatest(last_fire_at, %(last_fire_at)s::timestamptz)
where id = %(schedule_id)s::uuid;

-- name: back_off_schedule
-- A schedule that cannot be settled is tried again later, at most once an hour (R-D9).
update job_schedule
set failures = failures + 1,
  retry_at = clock_timestamp() + make_interval(secs => least(3600, 10 * 2.0 ^ least(failures, 20)))
where id = %(schedule_id)s::uuid and next_fire_at = %(next_fire_at)s::timestamptz
returning failures, retry_at;
