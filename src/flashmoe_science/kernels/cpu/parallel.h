// One function on several threads.
//
// PyTorch's CPU build has loaded an OpenMP runtime whose GOMP_parallel is visible to the whole process;
// calling it by its name (a weak symbol: no -fopenmp, nothing to link) puts us on the same threads that
// PyTorch's own operators use. With a second pool the two would fight for the cores: an idle OpenMP worker
// spins for milliseconds. Where there is no such runtime a small pool of our own takes its place.
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

// Below this many multiply-adds waking another thread costs more than it saves.
constexpr double MIN_PARALLEL_WORK = 2e5;

extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);

namespace pool {

constexpr int MAX_HELPERS = 255;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;
static void (*job)(void*) = nullptr;
static void* job_data = nullptr;
static int places = 0;   // helpers that may still join the job
static int running = 0;  // helpers that are in it
static int helpers = 0;
static bool atfork_registered = false;

static void* help(void*) {
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (places == 0) pthread_cond_wait(&work, &mutex);
        --places;
        ++running;
        void (*const function)(void*) = job;
        void* const data = job_data;
        pthread_mutex_unlock(&mutex);
        function(data);
        pthread_mutex_lock(&mutex);
        if (--running == 0) pthread_cond_signal(&done);
    }
    return nullptr;
}

// A forked child has this memory but none of these threads.
static void forget_threads() {
    pthread_mutex_t fresh_mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t fresh_condition = PTHREAD_COND_INITIALIZER;
    mutex = fresh_mutex;
    work = done = fresh_condition;
    job = nullptr;
    places = running = helpers = 0;
}

// The caller takes part itself and never waits for a helper that has not started. A second caller at the same
// time runs alone.
static void run(void (*function)(void*), void* data, int threads) {
    pthread_mutex_lock(&mutex);
    const bool free = job == nullptr;
    if (free) {
        if (!atfork_registered) atfork_registered = pthread_atfork(nullptr, nullptr, forget_threads) == 0;
        while (helpers < threads - 1 && helpers < MAX_HELPERS) {
            pthread_t thread;
            if (pthread_create(&thread, nullptr, help, nullptr) != 0) break;
            pthread_detach(thread);
            ++helpers;
        }
        job = function;
        job_data = data;
        places = threads - 1 < helpers ? threads - 1 : helpers;
        pthread_cond_broadcast(&work);
    }
    pthread_mutex_unlock(&mutex);
    function(data);
    if (!free) return;
    pthread_mutex_lock(&mutex);
    places = 0;
    while (running > 0) pthread_cond_wait(&done, &mutex);
    job = nullptr;
    pthread_mutex_unlock(&mutex);
}

}  // namespace pool

// OpenMP's team ends when all of its threads have taken part, also one that other programs keep from beginning: a call of
// 0.04 ms then takes time slices of theirs, and so does the next one. The pool above does not wait for who has not begun.
// So where a thread of the team begins late, calls go to the pool for twice as long, and for longer each time that it is
// late again. They come back, because on a quiet machine PyTorch's idle workers would keep a core from the pool.
namespace team {

constexpr int64_t LATE_NS = 1000000;  // a worker that sleeps wakes within a tenth of this
constexpr int64_t LEAST = 2, MOST = 128;

static int64_t away_until = 0;   // by now_ns()
static int64_t factor = LEAST;   // of the next lateness; callers at once may set either

struct Job {
    void (*function)(void*);
    void* data;
    int64_t began;
    int64_t late;
};

static inline int64_t now_ns() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline void take_part(void* data) {
    Job* const job = (Job*)data;
    const int64_t late = now_ns() - job->began;
    if (late > LATE_NS) __atomic_store_n(&job->late, late, __ATOMIC_RELAXED);
    job->function(job->data);
}

static inline bool is_away(int64_t now) { return now < __atomic_load_n(&away_until, __ATOMIC_RELAXED); }

static inline void run(void (*function)(void*), void* data, int threads, int64_t now) {
    Job job = {function, data, now, 0};
    GOMP_parallel(take_part, &job, (unsigned)threads, 0);
    const int64_t before = __atomic_load_n(&factor, __ATOMIC_RELAXED);
    if (job.late == 0) {
        if (before != LEAST) __atomic_store_n(&factor, LEAST, __ATOMIC_RELAXED);
        return;
    }
    __atomic_store_n(&away_until, now_ns() + before * job.late, __ATOMIC_RELAXED);
    if (before < MOST) __atomic_store_n(&factor, 2 * before, __ATOMIC_RELAXED);
}

}  // namespace team

// Calls function(data) once on each of `threads` threads, this one among them, and waits for all: for what has to run on
// every one of them, as where it is measured what they can do.
static inline void run_on_every_thread(void (*function)(void*), void* data, int threads) {
    if (threads <= 1)
        function(data);
    else if (GOMP_parallel)
        GOMP_parallel(function, data, (unsigned)threads, 0);
    else
        pool::run(function, data, threads);
}

// Calls function(data) once on each of at most `threads` threads, this one among them, and waits for those that began.
static inline void run_on_threads(void (*function)(void*), void* data, int threads) {
    if (threads <= 1) return function(data);
    const int64_t now = team::now_ns();
    if (GOMP_parallel && !team::is_away(now))
        team::run(function, data, threads, now);
    else
        pool::run(function, data, threads);
}
