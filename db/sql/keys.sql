-- name: versions_in_use
-- How many retained envelopes need each key version: of datasources, and of snapshots (R-X3).
select 'datasources' as kind, envelope->>'key_version' as key_version, count(*) as envelopes
from datasource where envelope is not null group by 2
union all
select 'snapshots', snapshot->>'key_version', count(*)
from job_run cross join lateral (values (source_snapshot), (sink_snapshot)) as one (snapshot)
where snapshot is not null group by 2
order by 1, 2;

-- name: sealed
-- All envelopes of datasources, to see whether a keyring's keys are those that sealed them (R-X3).
select name, envelope from datasource where envelope is not null order by name;

-- name: datasources_to_rewrap
-- The next datasources whose data key is wrapped under another version. Passes over what a claim
-- or an edit holds (R-X3).
select id, name, envelope from datasource
where envelope->>'key_version' <> %(current)s::text
  and (%(after)s::uuid is null or id > %(after)s::uuid)
order by id limit %(batch)s::integer
for no key update skip locked;

-- name: runs_to_rewrap
-- The next finished attempts with a snapshot under another version, in order of their ids, so that
-- one pass reads each row once. A run that a claim holds keeps its snapshot until it has ended.
select id, job_name, source_snapshot, sink_snapshot from job_run
where finished_at is not null
  and (source_snapshot->>'key_version' <> %(current)s::text
       or sink_snapshot->>'key_version' <> %(current)s::text)
  and (%(after)s::uuid is null or id > %(after)s::uuid)
order by id limit %(batch)s::integer
for update skip locked;

-- name: rewrap_datasource
-- Only the version and the wrapped key change (R-X3); the datasource itself was not edited.
update datasource
set envelope = envelope || jsonb_build_object(
  'key_version', %(key_version)s::text, 'wrapped_key', %(wrapped_key)s::text)
where id = %(id)s::uuid;

-- name: rewrap_snapshots
-- The same in the snapshots of one attempt; null leaves one as it is.
update job_run
set source_snapshot = source_snapshot || %(source)s::jsonb,
  sink_snapshot = sink_snapshot || %(sink)s::jsonb
where id = %(id)s::uuid;

-- name: record_reencryption
-- The audit record of a re-encryption that changed something (R-X4).
insert into audit_event (actor, action, subject_type, subject, outcome, detail)
values (%(actor)s::text, 'keyring.reencrypt', 'keyring', %(current)s::text, 'rewrapped',
  %(detail)s::jsonb);
