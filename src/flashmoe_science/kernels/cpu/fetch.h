// Asking for memory before it is read.
#pragma once

constexpr int CACHE_LINE = 64;

// Into the second-level cache: the first has room for fewer requests at a time than it takes to keep memory busy. The
// addresses need not exist.
static inline __attribute__((always_inline)) void fetch_row(const char* row, int bytes) {
    for (int at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(row + at, 0, 2);
}
