-- The table of examples/flights.yaml, as `make demo` makes it on both sides.
create table if not exists public.flights (
  id bigint primary key,
  year smallint not null,
  month smallint not null,
  day smallint not null,
  dep_time smallint,
  sched_dep_time smallint not null,
  dep_delay smallint,
  arr_time smallint,
  sched_arr_time smallint not null,
  arr_delay smallint,
  carrier text not null,
  flight integer not null,
  tailnum text,
  origin text not null,
  dest text not null,
  air_time smallint,
  distance integer not null,
  hour smallint not null,
  minute smallint not null,
  time_hour timestamptz not null
);
create table if not exists public.late_departures (
  id bigint primary key,
  carrier text not null,
  flight integer not null,
  origin text not null,
  dest text not null,
  dep_delay smallint not null,
  time_hour timestamptz not null
);
