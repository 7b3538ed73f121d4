// Loaded ahead of all libraries by late_threads.py and split_keys.py: a team of OpenMP's whose threads begin late, by a clock of its own.
#include <dlfcn.h>
#include <stdint.h>
#include <time.h>

extern "C" {
int64_t passed_ns = 1000000000, late_ns = 0;
int teams = 0, members = 0;  // calls, and how many threads the last one asked for

int clock_gettime(clockid_t clock, struct timespec* time) {
    static auto real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
    if (clock != CLOCK_MONOTONIC) return real(clock, time);
    time->tv_sec = passed_ns / 1000000000;
    time->tv_nsec = passed_ns % 1000000000;
    return 0;
}

// The caller's part, and that of a thread which other programs keep from beginning.
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned) {
    ++teams;
    members = (int)threads;
    function(data);
    passed_ns += late_ns;
    function(data);
}
}
