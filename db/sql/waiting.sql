-- name: obstacles
-- What stands between a waiting run and its claim (R-C2), for a person who asks why it waits. No row
-- where the run does not wait.
select r.queue, r.available_at, r.available_at > clock_timestamp() as is_later,
  r.attempt, p.attempt as previous_attempt, p.error_code as previous_code,
  clock_timestamp() - greatest(r.available_at, r.created_at) as due_for,
  j.name as job, j.handler, j.enabled, j.paused, j.source_enabled, j.sink_enabled,
  s.name as source, s.enabled as source_open, s.envelope->>'key_version' as source_key,
  t.name as sink, t.enabled as sink_open, t.envelope->>'key_version' as sink_key,
  j.concurrency_key, k.max as slots,
  array(select x.id::text from job_run x
    where x.slot_key = k.key and x.finished_at is null order by x.started_at limit 20) as holders,
  held.id::text as held_by, held.status as held_status, ahead.runs as ahead, ahead.first as ahead_first,
  (select count(*) from pg_stat_activity where starts_with(application_name, 'claimcheck-beat')
    and datname = current_database()) as beats
from job_run r
join job j on j.id = r.job_id
left join job_run p on p.id = r.previous_run_id
left join datasource s on s.id = j.source_id
left join datasource t on t.id = j.sink_id
left join concurrency_key k on k.key = j.concurrency_key
left join lateral (
  select x.id, x.status from job_run x
  where j.overlap <> 'allow' and x.job_id = j.id
    and x.started_at is not null and x.finished_at is null
  limit 1
) held on true
left join lateral (
  select count(*) as runs, (array_agg(due.id::text))[1] as first from (
    select x.id from job_run x
    where j.overlap <> 'allow' and x.job_id = j.id and x.status = 'PENDING'
      and x.available_at <= clock_timestamp() and x.queue = r.queue
      and (x.priority > r.priority or (x.priority = r.priority
        and (x.available_at, x.created_at, x.id) < (r.available_at, r.created_at, r.id)))
    order by x.priority desc, x.available_at, x.created_at, x.id
    limit 1000
  ) due
) ahead on true
where r.id = %(run_id)s::uuid and r.status = 'PENDING';
