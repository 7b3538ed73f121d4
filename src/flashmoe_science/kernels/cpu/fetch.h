// Asking for memory before it is read.
#pragma once

constexpr int CACHE_LINE = 64;

// The address need not exist.
static inline __attribute__((always_inline)) void fetch_line(const char* at) { __builtin_prefetch(at, 0, 3); }

// The same, into the second-level cache.
static inline __attribute__((always_inline)) void fetch_line_for_later(const char* at) { __builtin_prefetch(at, 0, 2); }
