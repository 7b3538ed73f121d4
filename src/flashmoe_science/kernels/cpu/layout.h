// Between the user's row-major rows and the kernel's layout, which has the queries in lanes.
#pragma once

#include "vector.h"

// to[d][query]: `rows` query rows become columns [0, columns * W) as fp32, each times `sign`; columns past
// the last row are zero.
template <class T>
static void load_queries(
    const char* const* row, int rows, int head_dim, float sign, float* to, ptrdiff_t ld, int columns) {
    for (int c = 0; c < columns; ++c)
        for (int d = 0; d < head_dim; d += W) {
            const int count = head_dim - d < W ? head_dim - d : W;
            F x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) {
                const int r = c * W + i;
                x[i] = r < rows ? mul(load_first((const T*)row[r] + d, count), set1(sign)) : set1(0.0f);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
                if (i < count) store(to + (d + i) * ld + c * W, x[i]);
        }
}

// Rows of the result from its transpose from[d][query], each query's column divided by its `by`, or times it.
template <class T, bool DIVIDE>
static void store_outputs(
    const float* from, ptrdiff_t ld, const float* by, char* const* row, int rows, int head_dim, int columns) {
    for (int c = 0; c < columns; ++c) {
        const F scale = load(by + c * W);
        for (int d = 0; d < head_dim; d += W) {
            const int count = head_dim - d < W ? head_dim - d : W;
            F x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) {
                const F sum = i < count ? load(from + (d + i) * ld + c * W) : set1(0.0f);
                x[i] = DIVIDE ? div(sum, scale) : mul(sum, scale);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
                if (c * W + i < rows) store_first((T*)row[c * W + i] + d, x[i], count);
        }
    }
}

// Rows of keys or values as contiguous fp32 rows.
template <class T>
static void widen_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* to) {
    for (int r = 0; r < rows; ++r, from += stride, to += head_dim)
        for (int d = 0; d < head_dim; d += W) {
            const int count = head_dim - d < W ? head_dim - d : W;
            const F x = load_first((const T*)from + d, count);
            if (count == W)
                store(to + d, x);
            else
                store_first(to + d, x, count);
        }
}

#if HAS_BF16
// load_queries for bf16 pairs, factor 1, -1 or 0: to[d / 2][query] holds elements d and d + 1.
static void load_query_pairs(
    const char* const* row, int rows, int head_dim, float factor, float* to, ptrdiff_t ld, int columns) {
    const __m512i flip = _mm512_set1_epi32(factor < 0 ? (int)0x80008000u : 0);
    const int pairs = head_dim / 2;
    for (int c = 0; c < columns; ++c)
        for (int d = 0; d < pairs; d += W) {
            const int count = pairs - d < W ? pairs - d : W;
            F x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) {
                const int r = c * W + i;
                x[i] = r < rows ? load_first((const float*)row[r] + d, count) : set1(0.0f);
                x[i] = factor == 0 ? times_zero_pairs(x[i])
                                   : _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x[i]), flip));
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
                if (i < count) store(to + (d + i) * ld + c * W, x[i]);
        }
}

// to[k / 2][d] holds rows k and k + 1 of the values; an odd last row is paired with zeros.
static void interleave_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* to) {
    for (int k = 0; k < rows; k += 2, to += head_dim) {
        const BFloat16* low = (const BFloat16*)(from + k * stride);
        const BFloat16* high = k + 1 < rows ? (const BFloat16*)(from + (k + 1) * stride) : nullptr;
        for (int d = 0; d < head_dim; d += W) {
            const int count = head_dim - d < W ? head_dim - d : W;
            store_first(to + d, interleave_first(low + d, high ? high + d : nullptr, count), count);
        }
    }
}
#endif

// Whether any element of these rows is infinite or NaN.
template <class T>
static bool has_nonfinite(const char* from, ptrdiff_t stride, int rows, int head_dim) {
    unsigned found = 0;
    for (int r = 0; r < rows; ++r, from += stride) {
        const T* x = (const T*)from;
        for (int d = 0; d < head_dim; ++d) found |= is_nonfinite(x[d]);
    }
    return found != 0;
}
