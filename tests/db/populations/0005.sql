-- A database of version 0004 in use: datasources, jobs, schedules, and a run in each state.
insert into datasource (id, name, connector, envelope) values
  ('00000000-0000-0000-0000-00000000000a', 'shop', 'postgresql', '{"format": 1, "datasource": "00000000-0000-0000-0000-00000000000a"}'),
  ('00000000-0000-0000-0000-00000000000b', 'warehouse', 'postgresql', '{"format": 1, "datasource": "00000000-0000-0000-0000-00000000000b"}');
insert into concurrency_key values ('warehouse', 2);
insert into job (id, name, handler, overlap, source_id, sink_id, concurrency_key, definition) values
  ('00000000-0000-0000-0000-0000000000a1', 'orders', 'replicate', 'allow',
   '00000000-0000-0000-0000-00000000000a', '00000000-0000-0000-0000-00000000000b', 'warehouse', '{"mode": "complete"}'),
  ('00000000-0000-0000-0000-0000000000a2', 'report', 'report', 'queue', null, null, null, '{}');
insert into job_schedule (id, job_id, name, cron, timezone, next_fire_at) values
  ('00000000-0000-0000-0000-0000000000c1', '00000000-0000-0000-0000-0000000000a1', 'orders-1', '*/15 * * * *', 'Europe/Madrid', now());
insert into job_run (id, job_id) select ('00000000-0000-0000-0000-0000000001' || lpad(n::text, 2, '0'))::uuid,
  '00000000-0000-0000-0000-0000000000a1' from generate_series(1, 7) n;
-- 1 stays PENDING; 2 is cancelled before a claim; 3 to 7 are claimed.
update job_run set status = 'CANCELLED', cancel_requested_at = now(), finished_at = now()
  where id = '00000000-0000-0000-0000-000000000102';
update job_run set status = 'RUNNING', lease_token = gen_random_uuid(), executor = 'host:1:nonce:2',
  lease_until = now(), heartbeat_at = now(), fence = nextval('fence_seq'), started_at = now(), job_snapshot = '{}',
  datasources_resolved_at = now() where id > '00000000-0000-0000-0000-000000000102';
update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()
  where id = '00000000-0000-0000-0000-000000000104';
update job_run set status = 'SUCCEEDED', finished_at = now(), rows_processed = 12, result = '{"rows": 12}'
  where id = '00000000-0000-0000-0000-000000000105';
update job_run set status = 'FAILED', finished_at = now(), error_code = 'handler_error', error_message = 'boom'
  where id = '00000000-0000-0000-0000-000000000106';
update job_run set status = 'RETRY_SCHEDULED', finished_at = now(), error_code = 'lease_expired'
  where id = '00000000-0000-0000-0000-000000000107';
insert into job_run (id, job_id, previous_run_id, root_run_id, attempt) values ('00000000-0000-0000-0000-000000000108',
  '00000000-0000-0000-0000-0000000000a1', '00000000-0000-0000-0000-000000000107', '00000000-0000-0000-0000-000000000107', 2);
insert into run_alias values ('00000000-0000-0000-0000-000000000201', '00000000-0000-0000-0000-000000000105');
insert into trigger_key (job_id, key, run_id, expires_at) values ('00000000-0000-0000-0000-0000000000a1', 'once',
  '00000000-0000-0000-0000-000000000105', now());
insert into schedule_slot (schedule_id, fire_at, outcome, run_id) values
  ('00000000-0000-0000-0000-0000000000c1', '2026-11-01 00:00Z', 'run', '00000000-0000-0000-0000-000000000105');
insert into run_log (run_id, head) values ('00000000-0000-0000-0000-000000000105', 'a line');
insert into audit_event (actor, action, subject_type, subject, run_id, outcome) values
  ('somebody', 'run.trigger', 'job', 'orders', '00000000-0000-0000-0000-000000000105', 'PENDING');
