// How the operands of the backward pass come to its products for each element type; Path is one of these throughout.
#pragma once

#include "backward_problem.h"
#include "gemm.h"
#include "layout.h"

namespace {

// In place if the rows are contiguous float32 and whole vectors, else a copy. Rows far apart would share a few sets of the
// first-level cache.
template <class T>
const float* float_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* copy) {
    if constexpr (sizeof(T) == sizeof(float))
        if (stride == head_dim * (ptrdiff_t)sizeof(float) && head_dim % W == 0) return (const float*)from;
    widen_rows<T>(from, stride, rows, head_dim, copy);
    return copy;
}

// fp32, and 16-bit elements through fp32.
template <class T>
struct FloatBackwardPath {
    typedef T Element;
    typedef FloatProduct Product;
    static constexpr bool PAIRS = false;
    static constexpr int STEP = 1;  // numbers of the depth in one step of a product

    static void prepare_block(const BackwardJob& job, const BackwardWorkspace& w, BackwardBlock& block) {
        const int d = (int)job.problem->head_dim;
        block.key_rows = float_rows<T>(block.key, block.key_row, block.count, d, w.key);
        block.key = (const char*)block.key_rows;
        block.key_row = d * 4;
        block.key_step = d;
        if (!job.needs_score_gradients) return;
        block.value = (const char*)float_rows<T>(block.value, block.value_row, block.count, d, w.value);
        block.value_row = d * 4;
    }

    static void load_columns(const char* const* row, int rows, int head_dim, float* to, ptrdiff_t ld, int columns) {
        load_queries<T>(row, rows, head_dim, 1.0f, to, ld, columns);
    }

    static const float* load_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* copy) {
        return float_rows<T>(from, stride, rows, head_dim, copy);
    }
};

#ifdef __AVX512BF16__
struct PairBackwardPath {
    typedef BFloat16 Element;
    typedef PairProduct Product;
    static constexpr bool PAIRS = true;
    static constexpr int STEP = 2;

    static void prepare_block(const BackwardJob& job, const BackwardWorkspace& w, BackwardBlock& block) {
        const int d = (int)job.problem->head_dim;
        block.key_step = d;
        block.key_rows = w.key;
        if (job.grad_query) interleave_rows(block.key, block.key_row, block.count, d, w.key);
    }

    static void load_columns(const char* const* row, int rows, int head_dim, float* to, ptrdiff_t ld, int columns) {
        load_query_pairs(row, rows, head_dim, 1.0f, to, ld, columns);
    }

    static const float* load_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* copy) {
        interleave_rows(from, stride, rows, head_dim, copy);
        return copy;
    }
};
typedef PairBackwardPath BFloat16BackwardPath;
#else
typedef FloatBackwardPath<BFloat16> BFloat16BackwardPath;
#endif

}  // namespace
