// One tile of queries against one block of keys on the matrix unit; what tile.h does with vectors.
#pragma once

#include "amx.h"
#include "paths.h"

namespace {

template <class Path>
bool takes_amx(int64_t dimensions) {
    return HAS_AMX && Path::PAIRS && dimensions % AMX_STEP == 0;
}

#if HAS_AMX

void prepare_on_amx(const Shared& w, KeyBlock& block, int value_dim) {
    transpose_value_pairs(block.value, block.value_row, block.count, value_dim, w.value);
    block.value = (const char*)w.value;
}

// A block's sums, added to the rescaled output.
struct AmxOutputs {
    float* out;
    ptrdiff_t ld;
    const float* rescale;
    float* sums;  // 32 x 32
    static constexpr ptrdiff_t stride = 2 * AMX_ROWS;
    float* at(int, int) const { return sums; }
    void finish(int row, int column, int rows, int vectors) const {
        for (int c = 0; c < vectors; ++c) {
            const F factor = load(rescale + column + c * W);
            float* to = out + row * ld + column + c * W;
            const float* from = sums + c * W;
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r, to += ld, from += stride) store(to, madd(load(to), factor, load(from)));
        }
    }
};

void find_maxima(const float* s, ptrdiff_t ld, int keys, int columns, float* block_max) {
    for (int c = 0; c < columns; ++c) {
        // Four chains: a maximum takes longer than the load that feeds it.
        F highest[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) highest[i] = set1(-__builtin_inff());
        const float* at = s + c * W;
        for (int k = 0; k < keys; k += 4, at += 4 * ld)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) highest[i] = max(load(at + i * ld), highest[i]);
        store(block_max + c * W, max(max(highest[0], highest[1]), max(highest[2], highest[3])));
    }
}

void amx_score(const Shared& w, const float* query, const KeyBlock& block, int head_dim, int columns, int ld) {
    const AmxRows keys = {block.key, block.key_row, AMX_ROWS * block.key_row, 64};
    amx_multiply(keys, block.count, query, ld, head_dim / 2, columns * W, AmxMatrix{w.scores, ld});
}

// O^T += V^T P^T of all of the block's keys.
void amx_add_outputs(const Shared& w, float* out, const KeyBlock& block, int value_dim, int columns, int ld) {
    alignas(64) float sums[2 * AMX_ROWS * 2 * AMX_ROWS];
    const AmxRows values = {block.value, 64, 1024, value_dim / AMX_ROWS * 1024};
    amx_multiply(values, value_dim, w.pairs, ld, block.count / 2, columns * W, AmxOutputs{out, ld, w.rescale, sums});
}

#else

void prepare_on_amx(const Shared&, KeyBlock&, int) {}

#endif

}  // namespace
