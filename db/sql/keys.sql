-- fragment: from_there_on
-- The next rows by id after one, or the first. A bound that may be null is none for an index.
where id >= coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
  and id is distinct from %(after)s::uuid
order by id limit %(batch)s::integer

-- name: datasource_versions
-- How many envelopes of datasources need each key version (R-X3).
select envelope->>'key_version' as key_version, count(*) as envelopes
from datasource where envelope is not null group by 1;

-- name: snapshot_versions
-- The same of the snapshots in the next attempts by id, with the last id that was looked at: no
-- index knows of keys, so a long history is counted piece by piece. No row where none is left.
with looked as materialized (
  select id, source_snapshot->>'key_version' as source, sink_snapshot->>'key_version' as sink
  from job_run
  -- include: from_there_on
)
select one.key_version, count(*) as envelopes,
  (select id from looked order by id desc limit 1) as last
from looked cross join lateral (values (source), (sink)) as one (key_version)
group by 1;

-- name: sealed
-- All envelopes of datasources, to see whether a keyring's keys are those that sealed them (R-X3).
select name, envelope from datasource where envelope is not null order by name;

-- name: datasources_to_rewrap
-- The next datasources, each with whether its data key is wrapped under another version. Passes over
-- what a claim or an edit holds (R-X3).
with looked as materialized (
  select id from datasource
  -- include: from_there_on
), other as materialized (
  select id, name, envelope from datasource
  where id = any(array(select looked.id from looked))
    and envelope->>'key_version' <> %(current)s::text
  for no key update skip locked
)
select id, other.id is not null as to_rewrap, other.name, other.envelope
from looked left join other using (id) order by id;

-- name: runs_to_rewrap
-- The next attempts by id, so that one pass looks at each once and no statement at many; those that
-- have ended with a snapshot under another version are to be rewrapped. A run that a claim holds
-- keeps its snapshot until it has ended.
with looked as materialized (
  select id from job_run
  -- include: from_there_on
), other as materialized (
  select id, job_name, source_snapshot, sink_snapshot from job_run
  where id = any(array(select looked.id from looked)) and finished_at is not null
    and (source_snapshot->>'key_version' <> %(current)s::text
         or sink_snapshot->>'key_version' <> %(current)s::text)
  for update skip locked
)
select id, other.id is not null as to_rewrap, other.job_name, other.source_snapshot,
  other.sink_snapshot
from looked left join other using (id) order by id;

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
