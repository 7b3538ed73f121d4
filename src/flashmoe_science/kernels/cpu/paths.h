// How keys and values of each element type come to the products; Path is one of these throughout.
#pragma once

#include "amx.h"
#include "gemm.h"
#include "layout.h"
#include "problem.h"

namespace {

// What a thread sets up while it works: nothing.
struct NoSession {
    NoSession() {}
};

// fp32 from the user's memory.
struct DirectPath {
    typedef NoSession Session;
    typedef float Element;
    typedef FloatProduct Product;
    static constexpr bool PAIRS = false;

    static void prepare(const Shared& w, KeyBlock& block, int head_dim, int value_dim) {
        // Rows a multiple of a large power of two apart would share a few sets of the first-level cache.
        if (block.key_row != head_dim * 4) {
            widen_rows<float>(block.key, block.key_row, block.count, head_dim, w.key);
            block.key = (const char*)w.key;
            block.key_row = head_dim * 4;
        }
        if (block.value_row != value_dim * 4) {
            widen_rows<float>(block.value, block.value_row, block.count, value_dim, w.value);
            block.value = (const char*)w.value;
            block.value_row = value_dim * 4;
        }
    }
};

// 16-bit elements through fp32.
template <class T>
struct WidenPath {
    typedef NoSession Session;
    typedef T Element;
    typedef FloatProduct Product;
    static constexpr bool PAIRS = false;

    static void prepare(const Shared& w, KeyBlock& block, int head_dim, int value_dim) {
        widen_rows<T>(block.key, block.key_row, block.count, head_dim, w.key);
        widen_rows<T>(block.value, block.value_row, block.count, value_dim, w.value);
        block.key = (const char*)w.key;
        block.value = (const char*)w.value;
        block.key_row = head_dim * 4;
        block.value_row = value_dim * 4;
    }
};

#if HAS_BF16
struct PairPath {
    typedef AmxSession Session;
    typedef BFloat16 Element;
    typedef PairProduct Product;
    static constexpr bool PAIRS = true;

    static void prepare(const Shared& w, KeyBlock& block, int, int value_dim) {
        interleave_rows(block.value, block.value_row, block.count, value_dim, w.value);
        block.value = (const char*)w.value;
        block.value_row = value_dim * 4;
    }
};
typedef PairPath BFloat16Path;
#else
typedef WidenPath<BFloat16> BFloat16Path;
#endif

}  // namespace
