// Products of a few query rows with rows of keys and values, wherever those lie: lanes lie along the head dimension, so that a
// row is read and widened once for all query rows, and nothing is copied.
//
// Memory is read about in the order in which most caches hold it: rows of all heads of a task for a few keys, then for the next
// ones. What is asked for meanwhile is a window ahead, and in another order: see FETCH_STREAMS.
#pragma once

#include "amx.h"
#include "fetch.h"
#include "problem.h"

// Beside a matrix unit a dot product of pairs takes as long as four multiply-adds: there elements are widened.
#if HAS_BF16 && !HAS_AMX
#define FEW_DOTS 1
#else
#define FEW_DOTS 0
#endif

namespace {

// Query rows that share a key/value head; more are a tile.
constexpr int MAX_FEW_ROWS = W >= 8 ? 8 : 4;
// Accumulators in flight: enough to hide a multiply-add's latency, few enough for the registers.
constexpr int FEW_SUMS = W == 16 ? 16 : 8;
// Values of a head that are multiplied before those of the next head, where there are several: so often its sums are read and
// written, and in so many rows at once memory is read. The same where elements are multiplied in several passes.
constexpr int FEW_VALUES_AT_ONCE = 4;

// A processor fetches ahead by itself to the end of a page of memory and no further. So rows of several pages are asked for by
// turns: when one page begins, and its first lines are waited for, lines of the others are under way.
constexpr int MEMORY_PAGE = 4096;
constexpr int FETCH_STREAMS = 4;
// Bytes of a window. The rows of the next one are asked for while those of one are multiplied.
constexpr int FETCH_WINDOW_BYTES = FETCH_STREAMS * MEMORY_PAGE;
constexpr int MAX_FETCH_WINDOW = 128;
constexpr int MAX_FETCH_AHEAD = 2 * MAX_FETCH_WINDOW;

// A row's elements in scratch memory, and its sums.
constexpr int few_dimension(int64_t of) { return up_to_multiple(of, 2 * W); }

// Where the rows of a block of keys, or of its values, lie for all heads of a task.
struct FewRows {
    const char* base;    // of the first head
    ptrdiff_t head_row;  // from head to head
    int heads, keys;
    int window;          // keys of a window of this block's; a power of two
    int in_window;       // where in its window the block begins
    ptrdiff_t offset[BLOCK_KEYS + MAX_FETCH_AHEAD];  // of keys; and of those to the next window's end, which need not exist
    ptrdiff_t asked[BLOCK_KEYS];                     // of what is asked for when a key is read

    const char* of_head(int head) const { return base + head * head_row; }
    // Then these are read by turns, key after key, and lie in as many pages.
    bool heads_apart() const { return heads > 1 && head_row >= MEMORY_PAGE; }
    // How many keys more than its own a block may ask for.
    int ahead() const { return up_to_multiple(keys + in_window, window) - in_window + window - keys; }
};

// The windows of a block of a part's keys [first, last).
void divide_into_windows(FewRows& rows, int64_t row_bytes, int64_t first, int64_t last) {
    rows.keys = (int)(last - first);
    rows.window = FETCH_STREAMS;
    while (rows.window < MAX_FETCH_WINDOW && 2 * rows.window * rows.heads * row_bytes <= FETCH_WINDOW_BYTES) rows.window *= 2;
    rows.in_window = (int)(first & (rows.window - 1)) / FETCH_STREAMS * FETCH_STREAMS;
}

// What is asked for, from the offsets.
void choose_asked(FewRows& rows) {
    const int streams = rows.heads_apart() ? 1 : FETCH_STREAMS, run = rows.window / streams;
    for (int done = 0, in_window = rows.in_window; done < rows.keys; in_window = 0) {
        const int here = smaller(rows.window - in_window, BLOCK_KEYS - done);
        const ptrdiff_t* const next = rows.offset + done - in_window + rows.window + in_window / streams;
        ptrdiff_t* const asked = rows.asked + done;
        if (streams == FETCH_STREAMS)
            for (int i = 0; i < here / FETCH_STREAMS; ++i)
                for (int stream = 0; stream < FETCH_STREAMS; ++stream) asked[i * FETCH_STREAMS + stream] = next[i + stream * run];
        else
            memcpy(asked, next, here * sizeof *asked);
        done += here;
    }
}

// Calls step(d, count, its number in a line) for all elements of a row, STEP at a time and the rest at the end, and fetch(d) for
// each line.
template <class T, int STEP, class Fetch, class Function>
INLINE void for_elements(int count, Fetch fetch, Function step) {
    constexpr int OF_LINE = CACHE_LINE / (int)sizeof(T), AT_ONCE = larger(STEP, OF_LINE);
    int d = 0;
#pragma GCC unroll 8
    for (; d + AT_ONCE <= count; d += AT_ONCE) {
#pragma GCC unroll 16
        for (int i = 0; i < AT_ONCE; i += OF_LINE) fetch(d + i);
#pragma GCC unroll 16
        for (int i = 0; i < AT_ONCE; i += STEP) step(d + i, STEP, i / STEP);
    }
    if (d == count) return;
    fetch(d);
    for (; d + STEP <= count; d += STEP) step(d, STEP, 0);
    if (d < count) step(d, count - d, 0);
}

// How the numbers of a row become vectors of fp32: VECTORS of them from one load.
template <class T>
struct FewNumbers {
    static constexpr int VECTORS = 1;
    INLINE void load_some(const T* row, int count, F x[1]) { x[0] = load_first(row, count); }
};
// Pairs as they lie in memory, taken apart: all even elements of 2 * W, then all odd ones.
template <>
struct FewNumbers<BFloat16> {
    static constexpr int VECTORS = 2;
    INLINE void load_some(const BFloat16* row, int count, F x[2]) {
        const F pairs = load_pairs(row, count);
        x[0] = low_of_pairs(pairs);
        x[1] = high_of_pairs(pairs);
    }
};

// Whether values are multiplied as pairs of two keys, with weights rounded to bf16. One row alone is read from memory no faster.
template <class T, int R>
constexpr bool FEW_PAIRS = false;
#if FEW_DOTS
template <int R>
constexpr bool FEW_PAIRS<BFloat16, R> = R > 1;
#endif

// Where the sums of element d of a row are.
template <class T, bool PAIRS>
INLINE int few_position(int d) {
    const int step = d / (2 * W) * (2 * W), in_step = d % (2 * W);
    if constexpr (PAIRS) return step + in_step % 8 / 4 * W + in_step / 8 * 4 + in_step % 4;
    if constexpr (FewNumbers<T>::VECTORS == 2) return step + in_step % 2 * W + in_step / 2;
    return d;
}

// The same for the products of queries and keys, which may be pairs as they lie in memory: STEP elements of a row at a time.
template <class T>
struct FewKeys : FewNumbers<T> {
    static constexpr int STEP = FewNumbers<T>::VECTORS * W;
    // Where vector v of a query's elements from d on is.
    static constexpr int place(int d, int v) { return d + v * W; }
    INLINE F accumulate(F sum, F key, F query) { return madd(key, query, sum); }
};
#if FEW_DOTS
template <>
struct FewKeys<BFloat16> {
    static constexpr int VECTORS = 1;
    static constexpr int STEP = 2 * W;
    static constexpr int place(int d, int) { return d / 2; }
    INLINE void load_some(const BFloat16* row, int count, F x[1]) { x[0] = load_pairs(row, count); }
    INLINE F accumulate(F sum, F key, F query) { return dot_pairs(sum, key, query); }
};
#endif

// A query as score_few multiplies it.
template <class T>
void load_few_query(const char* from, int head_dim, float* to) {
    typedef FewKeys<T> Keys;
    for (int d = 0; d < head_dim; d += Keys::STEP, to += Keys::VECTORS * W) {
        F x[Keys::VECTORS];
        Keys::load_some((const T*)from + d, head_dim - d, x);
        for (int v = 0; v < Keys::VECTORS; ++v) store(to + v * W, x[v]);
    }
}

// One key/value head of a task: its rows' queries, and what is summed.
struct FewHead {
    float* query;   // [rows][dimension, up to a multiple of 2 * W]
    float* out;     // the same: sums over all blocks so far, and
    float* block;   // over this one, before they are added to those
    float* scores;  // [rows][BLOCK_KEYS]
    float maximum[MAX_FEW_ROWS], rescale[MAX_FEW_ROWS];
    float sum[MAX_FEW_ROWS][W];  // lanes have each their own part of it
    bool strange;                // this block has hidden keys, and values that are not all finite
};

// See score_few. One or two rows: keys' rows one after another, a few keys of a head and then of the next one, so that pages take
// turns in what is asked for.
template <class T, int R>
INLINE void score_rows_in_order(const FewHead* head, const FewRows& rows, int head_dim) {
    typedef FewKeys<T> Keys;
    constexpr int AT_ONCE = W / R;
    // In short vectors a sum has so many terms that it would be less exact than PyTorch's.
    constexpr int CHAINS = W < 8 ? 4 : 1;
    const int query_row = few_dimension(head_dim);
    const int together = rows.heads_apart() ? 1 : FETCH_STREAMS;
    int k = 0, h = 0, begin = 0;
    for (int left = rows.keys * rows.heads; left > 0; left -= AT_ONCE) {
        F x[W];
        float* to[AT_ONCE];
#pragma GCC unroll 16
        for (int i = 0; i < AT_ONCE; ++i) {
            const char* const of_head = rows.of_head(h);
            const T* const row = (const T*)(of_head + rows.offset[k]);
            const float* const query = head[h].query;
            F sum[CHAINS][R];
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; ++c)
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) sum[c][r] = set1(0.0f);
            const auto step = [&](int d, int count, int number) __attribute__((always_inline)) {
                F element[Keys::VECTORS];
                Keys::load_some(row + d, count, element);
#pragma GCC unroll 2
                for (int v = 0; v < Keys::VECTORS; ++v)
#pragma GCC unroll 2
                    for (int r = 0; r < R; ++r)
                        sum[number % CHAINS][r] = Keys::accumulate(
                            sum[number % CHAINS][r], element[v], load(query + r * query_row + Keys::place(d, v)));
            };
            const char* const ahead = of_head + rows.asked[k];
            for_elements<T, Keys::STEP>(head_dim, [&](int d) __attribute__((always_inline)) {
                fetch_line(ahead + d * sizeof(T));
            }, step);
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r)
                x[r * AT_ONCE + i] = CHAINS == 1 ? sum[0][r]
                                                 : add(add(sum[0][r], sum[1 % CHAINS][r]),
                                                       add(sum[2 % CHAINS][r], sum[3 % CHAINS][r]));
            to[i] = head[h].scores + k;
            // The last ones fill up the vector.
            if (i + 1 >= left) continue;
            if (++k < smaller(begin + together, rows.keys)) continue;
            if (++h == rows.heads) h = 0, begin = k;
            k = begin;
        }
        float total[W];
        store(total, sum_lanes(x));
        const int here = smaller(AT_ONCE, left);
        for (int i = 0; i < here; ++i)
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) to[i][r * BLOCK_KEYS] = total[r * AT_ONCE + i];
    }
}

// See score_few. More rows: a few keys of a head at a time, so that a part of a query is read once for all of them.
template <class T, int R>
INLINE void score_keys_together(const FewHead* head, const FewRows& rows, int head_dim) {
    typedef FewKeys<T> Keys;
    constexpr int AT_ONCE = W / R;
    const int query_row = few_dimension(head_dim);
    for (int k = 0; k < rows.keys; k += AT_ONCE)
        for (int h = 0; h < rows.heads; ++h) {
            const char* const of_head = rows.of_head(h);
            const T* row[AT_ONCE];
            const char* ahead[AT_ONCE];
            F x[W];
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; ++i) {
                row[i] = (const T*)(of_head + rows.offset[smaller(k + i, rows.keys - 1)]);
                ahead[i] = of_head + rows.asked[smaller(k + i, rows.keys - 1)];
            }
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) x[i] = set1(0.0f);
            const float* const query = head[h].query;
            const auto step = [&](int d, int count, int) __attribute__((always_inline)) {
                F element[AT_ONCE][Keys::VECTORS];
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i) Keys::load_some(row[i] + d, count, element[i]);
#pragma GCC unroll 2
                for (int v = 0; v < Keys::VECTORS; ++v)
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const F of_row = load(query + r * query_row + Keys::place(d, v));
#pragma GCC unroll 4
                        for (int i = 0; i < AT_ONCE; ++i)
                            x[r * AT_ONCE + i] = Keys::accumulate(x[r * AT_ONCE + i], element[i][v], of_row);
                    }
            };
            for_elements<T, Keys::STEP>(head_dim, [&](int d) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i) fetch_line(ahead[i] + d * sizeof(T));
            }, step);
            float total[W];
            store(total, sum_lanes(x));
            const int here = smaller(AT_ONCE, rows.keys - k);
            for (int r = 0; r < R; ++r)
                memcpy(head[h].scores + r * BLOCK_KEYS + k, total + r * AT_ONCE, here * sizeof(float));
        }
}

// head[h].scores[r][k] = query r of head h * key k, for R rows of all heads. With one or two rows the usual dimensions have code
// of their own, without loops for each key: where keys come from a cache that is faster, and with more rows it is not.
template <class T, int R>
__attribute__((noinline)) void score_few(const FewHead* head, const FewRows& rows, int head_dim) {
    if constexpr (R > 2)
        score_keys_together<T, R>(head, rows, head_dim);
    else if (head_dim == 128)
        score_rows_in_order<T, R>(head, rows, 128);
    else if (head_dim == 64)
        score_rows_in_order<T, R>(head, rows, 64);
    else
        score_rows_in_order<T, R>(head, rows, head_dim);
}

// Keys [first, last) of a block's: what they add to the sums of the block, which begin with its first key and are added to the
// output with its last one.
struct FewSpan {
    int first, last;
    bool begins, ends;
};

// C vectors of R rows.
template <int R, int C>
INLINE void load_few_sums(const FewSpan& span, const float* block, int out_row, F* sum) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r * C + c] = span.begins ? set1(0.0f) : load(block + r * out_row + c * W);
}

// They become out[r] = out[r] * rescale[r] + sum[r] where the block ends.
template <int R, int C>
INLINE void store_few_sums(const FewSpan& span, const F* sum, const float* rescale, float* block, float* out, int out_row) {
    if (!span.ends) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) store(block + r * out_row + c * W, sum[r * C + c]);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            float* const to = out + r * out_row + c * W;
            store(to, madd(load(to), set1(rescale[r]), sum[r * C + c]));
        }
}

// Sums of weights[r][k] * value k for C vectors of R rows from element d on, `count` elements at most.
template <class T, int R, int C>
INLINE void add_few(
    const FewHead& head, int row, const char* of_head, const FewRows& rows, const FewSpan& span, int d, int count, int out_row) {
    typedef FewNumbers<T> Numbers;
    constexpr int BYTES = C * W * (int)sizeof(T);
    F sum[R * C];
    load_few_sums<R, C>(span, head.block + row * out_row + d, out_row, sum);
    const float* const weights = head.scores + row * BLOCK_KEYS;
    const char* const base = of_head + d * sizeof(T);
    const ptrdiff_t *offset = rows.offset + span.first, *ahead = rows.asked + span.first;
    // Where several calls share a line, or several of rows a key, the first asks for it.
    const bool asks = row == 0 && (BYTES >= CACHE_LINE || d * sizeof(T) % CACHE_LINE == 0);
    for (int k = span.first; k < span.last; ++k) {
        const T* const from = (const T*)(base + *offset++);
        const char* const later = base + *ahead++;
        if (asks)
#pragma GCC unroll 8
            for (int at = 0; at < BYTES; at += CACHE_LINE) fetch_line(later + at);
        F element[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c += Numbers::VECTORS) Numbers::load_some(from + c * W, count - c * W, element + c);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F weight = set1(weights[r * BLOCK_KEYS + k]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r * C + c] = madd(weight, element[c], sum[r * C + c]);
        }
    }
    store_few_sums<R, C>(
        span, sum, head.rescale + row, head.block + row * out_row + d, head.out + row * out_row + d, out_row);
}

#if HAS_BF16
// The same with weights in bf16, two keys at a time; an odd last one is paired with zeros.
template <int R, int C>
INLINE void add_few_pairs(
    const FewHead& head, int row, const char* of_head, const FewRows& rows, const FewSpan& span, int d, int count, int out_row) {
    constexpr int BYTES = C * W * (int)sizeof(BFloat16);
    F sum[R * C];
    load_few_sums<R, C>(span, head.block + row * out_row + d, out_row, sum);
    const float* const weights = head.scores + row * BLOCK_KEYS;
    const char* const base = of_head + d * sizeof(BFloat16);
    const ptrdiff_t *offset = rows.offset + span.first, *ahead = rows.asked + span.first;
    const auto add_keys = [&](int k, bool both) __attribute__((always_inline)) {
        const BFloat16* const low = (const BFloat16*)(base + offset[0]);
        const BFloat16* const high = (const BFloat16*)(base + offset[both]);
        if (row == 0)
#pragma GCC unroll 8
            for (int at = 0; at < BYTES; at += CACHE_LINE) {
                fetch_line(base + ahead[0] + at);
                if (both) fetch_line(base + ahead[1] + at);
            }
        offset += 2;
        ahead += 2;
        F element[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c += 2)
            pair_rows(
                load_pairs(low + c * W, count - c * W), both ? load_pairs(high + c * W, count - c * W) : set1(0.0f),
                element + c);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float pair = 0.0f;
            memcpy(&pair, (const BFloat16*)(weights + r * BLOCK_KEYS) + k, both ? 4 : 2);
            const F weight = set1(pair);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r * C + c] = dot_pairs(sum[r * C + c], element[c], weight);
        }
    };
    int k = span.first;
    for (; k + 2 <= span.last; k += 2) add_keys(k, true);
    if (k < span.last) add_keys(k, false);
    store_few_sums<R, C>(
        span, sum, head.rescale + row, head.block + row * out_row + d, head.out + row * out_row + d, out_row);
}
#endif

// Rows and vectors of a row that are multiplied in one pass over the keys: no more than there are accumulators.
template <class T, int R>
constexpr int FEW_PASS_ROWS = smaller(R, FEW_SUMS / FewNumbers<T>::VECTORS);
template <class T, int R>
constexpr int FEW_PASS_VECTORS = smaller(
    FEW_SUMS / FEW_PASS_ROWS<T, R> / FewNumbers<T>::VECTORS * FewNumbers<T>::VECTORS, 8);

// The same for all elements of R rows from `row` on.
template <class T, int R, bool PAIRS>
__attribute__((noinline)) void add_values_of_span(
    const FewHead& head, int row, const char* of_head, const FewRows& rows, const FewSpan& span, int value_dim) {
    const int out_row = few_dimension(value_dim);
    constexpr int VECTORS = FewNumbers<T>::VECTORS;
    constexpr int ROWS = FEW_PASS_ROWS<T, R>, C = FEW_PASS_VECTORS<T, R>;
    int d = 0;
#if HAS_BF16
    if constexpr (PAIRS) {
        for (; d + C * W <= value_dim; d += C * W) add_few_pairs<ROWS, C>(head, row, of_head, rows, span, d, C * W, out_row);
        for (; d < value_dim; d += 2 * W) add_few_pairs<ROWS, 2>(head, row, of_head, rows, span, d, value_dim - d, out_row);
    }
#endif
    if constexpr (!PAIRS) {
        for (; d + C * W <= value_dim; d += C * W) add_few<T, ROWS, C>(head, row, of_head, rows, span, d, C * W, out_row);
        for (; d < value_dim; d += VECTORS * W)
            add_few<T, ROWS, VECTORS>(head, row, of_head, rows, span, d, value_dim - d, out_row);
    }
    if constexpr (R > ROWS)
        add_values_of_span<T, R - ROWS, PAIRS>(head, row + ROWS, of_head, rows, span, value_dim);
}

// head[h].out[r] = out[r] * rescale[r] + the sum over the block's keys of weights[r][k] * value k, for R rows of all heads but
// the strange ones.
template <class T, int R, bool PAIRS>
void add_values_few(const FewHead* head, const FewRows& rows, int value_dim) {
    const bool in_order = R == 1 && rows.heads == 1 && value_dim <= FEW_PASS_VECTORS<T, R> * W;
    const int at_once = in_order ? BLOCK_KEYS : FEW_VALUES_AT_ONCE;
    for (int k = 0; k < rows.keys; k += at_once) {
        const int last = smaller(k + at_once, rows.keys);
        const FewSpan span = {k, last, k == 0, last == rows.keys};
        for (int h = 0; h < rows.heads; ++h)
            if (!head[h].strange) add_values_of_span<T, R, PAIRS>(head[h], 0, rows.of_head(h), rows, span, value_dim);
    }
}

// Weights of a row's keys in the place of which they are: as they are multiplied with values.
template <bool PAIRS>
INLINE F store_few_weights(float* weights, int k, F x) {
#if HAS_BF16
    if constexpr (PAIRS) {
        // Behind what is read next: two bytes a key in place of four.
        store_rounded((BFloat16*)weights + k, x);
        return rounded_to_bf16(x);
    }
#endif
    store(weights + k, x);
    return x;
}

}  // namespace
