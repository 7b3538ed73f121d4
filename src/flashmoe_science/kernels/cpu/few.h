// A few query rows against blocks of keys: their online softmax between the products of few_products.h, and what is left of a
// part of the keys.
#pragma once

#include "few_products.h"
#include "softmax.h"

namespace {

constexpr int MAX_FEW_VALUE_DIM = 512;

template <int R>
struct MostRows {
    static constexpr int rows = R;
};

// Calls the code that is made for the fewest rows that these do not exceed.
template <class Function>
void with_few_rows(int rows, Function attend) {
    if (rows == 1)
        attend(MostRows<1>());
    else if (rows == 2)
        attend(MostRows<2>());
    else if (rows <= 4)
        attend(MostRows<4>());
    else
        attend(MostRows<MAX_FEW_ROWS>());
}

// Scratch of one head, in floats.
size_t few_head_floats(int64_t head_dim, int64_t value_dim) {
    return MAX_FEW_ROWS * (size_t)(few_dimension(head_dim) + 2 * few_dimension(value_dim) + BLOCK_KEYS);
}

void arrange_few_head(FewHead& head, float* at, int64_t head_dim, int64_t value_dim) {
    head.query = at;
    head.out = head.query + MAX_FEW_ROWS * few_dimension(head_dim);
    head.block = head.out + MAX_FEW_ROWS * few_dimension(value_dim);
    head.scores = head.block + MAX_FEW_ROWS * few_dimension(value_dim);
}

// Nothing summed yet; rows up to R without a query have one of zeros.
template <class T, int R>
void start_few(FewHead& head, const char* const* query_row, int rows, int head_dim, int value_dim) {
    const int row = few_dimension(head_dim);
    memset(head.query, 0, R * row * sizeof(float));
    memset(head.out, 0, R * few_dimension(value_dim) * sizeof(float));
    for (int r = 0; r < R; ++r) {
        head.maximum[r] = -__builtin_inff();
        head.rescale[r] = 1.0f;
        memset(head.sum[r], 0, sizeof head.sum[r]);
        if (r < rows) load_few_query<T>(query_row[r], head_dim, head.query + r * row);
    }
    head.strange = false;
}

// Vectors whose weights are computed at once: one after another each would wait for its own powers.
constexpr int FEW_WEIGHTS_AT_ONCE = 4;

// Weights 2^(scale * (s - base)) of N vectors from k on, and their sum.
template <bool PAIRS, int N>
INLINE F weigh_vectors(float* s, int k, float base, float scale) {
    F t[N], weight[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) t[i] = mul(sub(load(s + k + i * W), set1(base)), set1(scale));
    weights_of<6, N>(t, weight);
    F total = set1(0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) total = add(total, store_few_weights<PAIRS>(s, k + i * W, weight[i]));
    return total;
}

// Scores of row r become weights, as store_few_weights leaves them; what was summed before is to be multiplied by rescale[r].
// Scores behind the last key, up to a multiple of W, are minus infinity.
template <bool PAIRS>
void weigh_few_row(FewHead& head, int r, int keys, float scale) {
    float* const s = head.scores + r * BLOCK_KEYS;
    F highest = set1(head.maximum[r]);
    for (int k = 0; k < keys; k += W) highest = max(load(s + k), highest);
    const float most = highest_lane(highest);
    // As in raise_maxima: where there is nothing but minus infinity weights are 0, and where it did not move the factor is 1.
    const float base = most == -__builtin_inff() ? 0.0f : most;
    if (most == head.maximum[r]) {
        head.rescale[r] = 1.0f;
    } else {
        const F t = set1((head.maximum[r] - base) * scale);
        F factor;
        exp2_to_zero<6, 1>(&t, &factor);
        float lane[W];
        store(lane, factor);
        head.rescale[r] = lane[0];
        head.maximum[r] = most;
    }
    F total = set1(0.0f);
    int k = 0;
    for (; k + FEW_WEIGHTS_AT_ONCE * W <= keys; k += FEW_WEIGHTS_AT_ONCE * W)
        total = add(total, weigh_vectors<PAIRS, FEW_WEIGHTS_AT_ONCE>(s, k, base, scale));
    for (; k < keys; k += W) total = add(total, weigh_vectors<PAIRS, 1>(s, k, base, scale));
    store(head.sum[r], madd(load(head.sum[r]), set1(head.rescale[r]), total));
}

float sum_of_lanes(const float lane[W]) {
    float sum = 0.0f;
    for (int i = 0; i < W; ++i) sum += lane[i];
    return sum;
}

// Sums of a part of the keys for one head as other threads see them: [rows][out_row], then maxima, then sums.
size_t few_part_floats(int64_t value_dim, int64_t rows) { return rows * (few_dimension(value_dim) + 2); }

void store_few_part(const FewHead& head, int rows, int out_row, float* to) {
    memcpy(to, head.out, (size_t)rows * out_row * sizeof(float));
    memcpy(to + rows * out_row, head.maximum, rows * sizeof(float));
    for (int r = 0; r < rows; ++r) to[rows * out_row + rows + r] = sum_of_lanes(head.sum[r]);
}

// A part's sums added to those of the parts before it.
void add_few_part(float* total, const float* part, int rows, int out_row, float scale) {
    for (int r = 0; r < rows; ++r) {
        float* const maximum = total + rows * out_row + r;
        const float before = *maximum, here = part[rows * out_row + r];
        const float highest = here > before ? here : before;
        const float base = highest == -__builtin_inff() ? 0.0f : highest;
        const F t[2] = {set1((before - base) * scale), set1((here - base) * scale)};
        F factor[2];
        exp2_to_zero<6, 2>(t, factor);
        if (before == highest) factor[0] = set1(1.0f);
        if (here == highest) factor[1] = set1(1.0f);
        const auto add_to = [&](float* to, const float* x) {
            store(to, madd(load(x), factor[1], mul(load(to), factor[0])));
        };
        for (int d = 0; d < out_row; d += W) add_to(total + r * out_row + d, part + r * out_row + d);
        float old[W], more[W];
        store(old, mul(set1(maximum[rows]), factor[0]));
        store(more, madd(set1(part[rows * out_row + rows + r]), factor[1], load(old)));
        maximum[rows] = more[0];
        *maximum = highest;
    }
}

// A row of the result from its sums, [out_row]. `by` is what they are divided by, or with DIVIDE false its inverse.
template <class T, bool PAIRS, bool DIVIDE>
void write_few_row(const float* sums, float by, int value_dim, T* out) {
    float row[MAX_FEW_VALUE_DIM];
    for (int d = 0; d < value_dim; ++d) row[d] = sums[few_position<T, PAIRS>(d)];
    for (int d = 0; d < value_dim; d += W) {
        const F x = load_first(row + d, value_dim - d);
        store_first(out + d, DIVIDE ? div(x, set1(by)) : mul(x, set1(by)), value_dim - d);
    }
}

}  // namespace
