// One buffer a thread, kept between calls and freed when the thread ends.
#pragma once

#include <pthread.h>
#include <stdlib.h>

namespace {

struct Scratch {
    void* memory;
    size_t bytes;
};
thread_local Scratch scratch;
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

void make_scratch_key() { pthread_key_create(&scratch_key, free); }

// This thread's buffer, with room for so many numbers; null if there is no memory.
float* reserve_scratch(size_t floats) {
    const size_t bytes = floats * sizeof(float);
    if (bytes > scratch.bytes) {
        pthread_once(&scratch_once, make_scratch_key);
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, bytes) != 0) return nullptr;
        free(scratch.memory);
        scratch.memory = memory;
        scratch.bytes = bytes;
        pthread_setspecific(scratch_key, memory);
    }
    return (float*)scratch.memory;
}

}  // namespace
