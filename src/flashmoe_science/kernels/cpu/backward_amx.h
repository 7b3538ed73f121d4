// The products of backward_tile.h on the matrix unit. Registers are whole: past the last row and the last key are zeros.
//
// S^T = K Q^T and dP^T = V dO^T read both operands as the dot products of pairs do, and so do dV += P^T dO and dK += dS^T Q. The
// fifth is transposed, dQ^T += K^T dS^T, as the outputs of amx_tile.h are.
#pragma once

#include "amx.h"
#include "backward_problem.h"
#include "layout.h"

namespace {

bool takes_amx(const AttentionBackwardProblem& p) {
    return HAS_AMX && p.element_type == BFLOAT16 && p.head_dim % AMX_STEP == 0;
}

#if HAS_AMX

// Keys of the block that some row of the tile sees, in whole registers.
int padded_keys(const QueryTile& tile, const BackwardBlock& block) {
    return up_to_multiple(visible_keys(tile, block, tile.rows), AMX_STEP);
}

// Rows of the block, copied with zeros behind them.
void pad_block(const BackwardBlock& block, const char*& rows, ptrdiff_t& stride, int row_bytes, char* to) {
    for (int k = 0; k < block.count; ++k) memcpy(to + k * row_bytes, rows + k * stride, row_bytes);
    memset(to + block.count * row_bytes, 0, (block.padded - block.count) * row_bytes);
    rows = to;
    stride = row_bytes;
}

void prepare_on_amx(const BackwardJob& job, const BackwardWorkspace& w, BackwardBlock& block) {
    const int d = (int)job.problem->head_dim, row_bytes = d * (int)sizeof(BFloat16);
    if (block.padded > block.count) {
        // The transposed pairs take half of w.key.
        pad_block(block, block.key, block.key_row, row_bytes, (char*)(w.key + BLOCK_KEYS * d / 2));
        if (job.needs_score_gradients) pad_block(block, block.value, block.value_row, row_bytes, (char*)w.value);
    }
    if (job.grad_query) transpose_value_pairs(block.key, block.key_row, block.padded, d, w.key);
}

// Zeros behind the tile's rows, where they are summed over.
void pad_rows(const BackwardJob& job, const QueryTile& tile) {
    const ptrdiff_t d = job.problem->head_dim;
    const ptrdiff_t from = (tile.rows + 1) / 2 * d, end = up_to_multiple(tile.rows, AMX_STEP) / 2 * d;
    if (job.grad_key) memset(tile.query_copy + from, 0, (end - from) * sizeof(float));
    if (job.grad_value) memset(tile.grad_copy + from, 0, (end - from) * sizeof(float));
}

void score_on_amx(
    const BackwardJob& job, const BackwardWorkspace& w, const QueryTile& tile, const BackwardBlock& block, int columns,
    ptrdiff_t ld) {
    const int keys = padded_keys(tile, block), pairs = (int)job.problem->head_dim / 2;
    const AmxRows of_keys = {block.key, block.key_row, AMX_ROWS * block.key_row, 64};
    amx_multiply(of_keys, keys, tile.query_columns, ld, pairs, columns * W, AmxMatrix{w.scores, ld});
    if (!job.needs_score_gradients) return;
    const AmxRows of_values = {block.value, block.value_row, AMX_ROWS * block.value_row, 64};
    amx_multiply(of_values, keys, tile.grad_columns, ld, pairs, columns * W, AmxMatrix{w.gradients, ld});
}

// Weights and gradients of keys that a column of queries does not see, and of lanes behind the last row, become zeros.
void clear_padding(
    const BackwardJob& job, const BackwardWorkspace& w, const QueryTile& tile, const BackwardBlock& block, int columns,
    ptrdiff_t ld) {
    const int keys = padded_keys(tile, block);
    const auto clear = [&](int key, int lane, int lanes) {
        const ptrdiff_t at = key * ld + lane;
        memset((BFloat16*)w.weight_pairs + at, 0, lanes * sizeof(BFloat16));
        if (job.needs_score_gradients) memset((BFloat16*)w.gradient_pairs + at, 0, lanes * sizeof(BFloat16));
    };
    for (int c = 0; c < columns; ++c) {
        const int seen = visible_keys(tile, block, smaller((c + 1) * W, tile.rows));
        for (int k = seen; k < keys; ++k) clear(k, c * W, W);
        if (job.needs_score_gradients)
            for (int pair = (seen + 1) / 2; pair < keys / 2; ++pair)
                store(w.gradient_key_pairs + pair * ld + c * W, set1(0.0f));
    }
    const int lanes = up_to_multiple(tile.rows, AMX_STEP) - tile.rows;
    for (int k = 0; lanes > 0 && k < keys; ++k) clear(k, tile.rows, lanes);
}

void add_products_on_amx(
    const BackwardJob& job, const BackwardWorkspace& w, const QueryTile& tile, const BackwardBlock& block, int columns,
    ptrdiff_t ld) {
    const int d = (int)job.problem->head_dim, keys = padded_keys(tile, block);
    const int row_pairs = up_to_multiple(tile.rows, AMX_STEP) / 2;
    const auto by_keys = [&](const float* pairs) {
        const ptrdiff_t row = ld * sizeof(BFloat16);
        return AmxRows{(const char*)pairs, row, AMX_ROWS * row, 64};
    };
    if (block.grad_value)
        amx_multiply<true>(by_keys(w.weight_pairs), keys, tile.grad_rows, d, row_pairs, d, AmxMatrix{block.grad_value, d});
    if (block.grad_key)
        amx_multiply<true>(by_keys(w.gradient_pairs), keys, tile.query_rows, d, row_pairs, d, AmxMatrix{block.grad_key, d});
    if (job.grad_query)
        amx_multiply<true>(
            {(const char*)w.key, 64, 1024, d / AMX_ROWS * 1024}, d, w.gradient_key_pairs, ld, keys / 2, columns * W,
            AmxMatrix{tile.grad_query, ld});
}

#else

[[maybe_unused]] void prepare_on_amx(const BackwardJob&, const BackwardWorkspace&, BackwardBlock&) {}
void pad_rows(const BackwardJob&, const QueryTile&) {}
void score_on_amx(const BackwardJob&, const BackwardWorkspace&, const QueryTile&, const BackwardBlock&, int, ptrdiff_t) {}
void clear_padding(const BackwardJob&, const BackwardWorkspace&, const QueryTile&, const BackwardBlock&, int, ptrdiff_t) {}
void add_products_on_amx(const BackwardJob&, const BackwardWorkspace&, const QueryTile&, const BackwardBlock&, int, ptrdiff_t) {}

#endif

}  // namespace
