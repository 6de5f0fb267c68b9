-- fragment: sides
-- The datasources of a job, of which a handler's job has none.
left join datasource s on s.id = j.source_id
left join datasource t on t.id = j.sink_id

-- fragment: switched_on
-- What lets the runs of a job be claimed, whichever worker asks: its switches and its sides' (R-C2).
  and j.enabled and not j.paused and j.source_enabled and j.sink_enabled
  and coalesce(s.enabled, true) and coalesce(t.enabled, true)

-- fragment: room
-- Behind what a job has that may run beside itself: how many more of another one may run, and how
-- many more of its concurrency key (R-C8).
         when exists (select from job_run x where x.job_id = j.id
           and x.started_at is not null and x.finished_at is null) then 0
         else 1 end,
    case when k.key is not null then k.max - (select count(*) from job_run x
      where x.slot_key = k.key and x.finished_at is null) end

-- fragment: has_room
-- Whether one more run may run, beside the others of its job and of its concurrency key (R-C8).
    and (j.overlap = 'allow' or not exists (select from job_run x
      where x.job_id = j.id and x.started_at is not null and x.finished_at is null))
    and (j.concurrency_key is null or k.max > (select count(*) from job_run x
      where x.slot_key = k.key and x.finished_at is null))
