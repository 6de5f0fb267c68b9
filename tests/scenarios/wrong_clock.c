/* A wall clock that is wrong by WRONG_CLOCK_SECONDS, for a process that preloads this.
 * The monotonic clock stays right: a process with a wrong clock has that too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long wrong(void) {
  const char *given = getenv("WRONG_CLOCK_SECONDS");
  return given ? atol(given) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*right)(clockid_t, struct timespec *);
  if (!right) right = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = right(clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec += wrong();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *stored) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (stored) *stored = found.tv_sec;
  return found.tv_sec;
}
