// Rows of new keys and values into slots of a paged cache, and queries beside them: the norm of each head, rotary embedding,
// quantisation and the write, row by row, in float32.

#include <math.h>

#include "numbers.h"
#include "parallel.h"
#include "problem.h"
#include "python_call.h"

namespace {

constexpr int MOST_DIM = 576;
constexpr float LARGEST_FP8 = 448.0f, SMALLEST_SCALE = 0x1p-100f;
constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;

// Mirrored by flashmoe_science.varlen.append_arguments. Rows (token, head); strides in bytes.
struct Rows {
    const char* data;
    int64_t token, head;
};

enum CacheForm : int64_t { SAME_TYPE, SCALE_GIVEN, SCALE_CHOSEN };

struct Cache {
    char* data;
    float* scale;
    int64_t page, slot, head;                    // strides in bytes
    int64_t scale_page, scale_slot, scale_head;  // in elements
    int64_t form;
};

struct AppendProblem {
    Rows query, key, value;  // query: looked at where there are heads
    Cache key_cache, value_cache;
    char* query_out;                        // (tokens, heads, head_dim)
    const void *slots, *positions;          // (tokens); a negative slot: the row is not written
    const void* cos_sin;                    // (rows, rotary_dim): cosines, then sines; null: nothing is rotated
    const void *query_norm, *key_norm;      // (head_dim); null: no norm
    int64_t cos_sin_row, cos_sin_rows;      // stride in elements; how many
    int32_t tokens, heads, kv_heads, head_dim, value_dim, rotary_dim, page_size;
    int32_t interleaved;
    int32_t wide_slots, wide_positions;                       // 1: int64, 0: int32
    int32_t float_cos_sin, float_query_norm, float_key_norm;  // 1: float32, 0: the elements' type
    float eps;
};

struct AppendJob {
    const AppendProblem* problem;
    int64_t next_token;
};

int64_t integer_at(const void* from, int64_t index, int wide) {
    return wide ? ((const int64_t*)from)[index] : ((const int32_t*)from)[index];
}

template <class T>
void widen_numbers(const void* from, bool is_float, int count, float* to) {
    if (is_float)
        memcpy(to, from, count * sizeof(float));
    else
        for (int i = 0; i < count; ++i) to[i] = widen(((const T*)from)[i]);
}

// To e4m3, rounded to nearest even; what is beyond the largest becomes the largest, NaN stays NaN.
uint8_t fp8_of(float x) {
    const uint32_t sign = bits_of(x) >> 24 & 0x80;
    if (x != x) return (uint8_t)(sign | 0x7f);
    float magnitude = fabsf(x);
    if (magnitude > LARGEST_FP8) magnitude = LARGEST_FP8;
    // Below the smallest normal number, 2^-6, codes count multiples of 2^-9, and so does the last bit of 2^14 + x.
    if (magnitude < 0x1p-6f) return (uint8_t)(sign | (bits_of(magnitude + 0x1p14f) & 0xf));
    const uint32_t m = bits_of(magnitude);
    return (uint8_t)(sign | (((m + 0x7ffff + (m >> 20 & 1)) >> 20) - (120 << 3)));
}

template <class T>
void norm(float* row, int dim, const void* weight, bool is_float, float eps) {
    float weights[MOST_DIM];
    widen_numbers<T>(weight, is_float, dim, weights);
    double squares = 0;
    for (int i = 0; i < dim; ++i) squares += (double)row[i] * row[i];
    const float factor = 1.0f / sqrtf((float)(squares / dim) + eps);
    for (int i = 0; i < dim; ++i) row[i] = row[i] * factor * weights[i];
}

void rotate(const AppendProblem& p, const float* angles, float* row) {
    const int half = p.rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
        const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + half;
        const float x = row[first], y = row[second];
        row[first] = x * angles[i] - y * angles[half + i];
        row[second] = y * angles[i] + x * angles[half + i];
    }
}

template <class T>
void narrow_row(const float* row, int dim, char* to) {
    for (int i = 0; i < dim; ++i) narrow((T*)to + i, row[i]);
}

template <class T>
void write(const float* row, int dim, const Cache& cache, int64_t slot, int head, int page_size) {
    const int64_t page = slot / page_size, within = slot % page_size;
    char* const to = cache.data + page * cache.page + within * cache.slot + head * cache.head;
    if (cache.form == SAME_TYPE) {
        narrow_row<T>(row, dim, to);
        return;
    }
    float scale = 1.0f;
    if (cache.form == SCALE_GIVEN) {
        if (cache.scale) scale = cache.scale[head * cache.scale_head];
    } else {
        float largest = 0.0f;
        bool nan = false;
        for (int i = 0; i < dim; ++i) {
            largest = fabsf(row[i]) > largest ? fabsf(row[i]) : largest;
            nan |= row[i] != row[i];
        }
        scale = largest / LARGEST_FP8 > SMALLEST_SCALE ? largest / LARGEST_FP8 : SMALLEST_SCALE;
        if (nan) scale = __builtin_nanf("");
        cache.scale[page * cache.scale_page + within * cache.scale_slot + head * cache.scale_head] = scale;
    }
    for (int i = 0; i < dim; ++i) to[i] = (char)fp8_of(row[i] / scale);
}

template <class T>
void append_token(const AppendProblem& p, int64_t token) {
    float row[MOST_DIM], angles[MOST_DIM];
    if (p.cos_sin) {
        int64_t position = integer_at(p.positions, token, p.wide_positions);
        if (position < 0) position += p.cos_sin_rows;  // as indices of a tensor count
        const size_t size = p.float_cos_sin ? sizeof(float) : sizeof(T);
        widen_numbers<T>((const char*)p.cos_sin + position * p.cos_sin_row * size, p.float_cos_sin, p.rotary_dim, angles);
    }
    const auto load = [&](const Rows& rows, int head, int dim) {
        widen_numbers<T>(rows.data + token * rows.token + head * rows.head, false, dim, row);
    };
    const auto transform = [&](const void* weight, bool is_float) {
        if (weight) norm<T>(row, p.head_dim, weight, is_float, p.eps);
        if (p.cos_sin) rotate(p, angles, row);
    };
    for (int head = 0; head < p.heads; ++head) {
        load(p.query, head, p.head_dim);
        transform(p.query_norm, p.float_query_norm);
        narrow_row<T>(row, p.head_dim, p.query_out + (token * p.heads + head) * p.head_dim * sizeof(T));
    }
    const int64_t slot = integer_at(p.slots, token, p.wide_slots);
    for (int head = 0; head < p.kv_heads && slot >= 0; ++head) {
        load(p.key, head, p.head_dim);
        transform(p.key_norm, p.float_key_norm);
        write<T>(row, p.head_dim, p.key_cache, slot, head, p.page_size);
        load(p.value, head, p.value_dim);
        write<T>(row, p.value_dim, p.value_cache, slot, head, p.page_size);
    }
}

template <class T>
void work(void* data) {
    AppendJob& job = *(AppendJob*)data;
    for (;;) {
        const int64_t token = __atomic_fetch_add(&job.next_token, 1, __ATOMIC_RELAXED);
        if (token >= job.problem->tokens) return;
        append_token<T>(*job.problem, token);
    }
}

}  // namespace

// `element_type`: see problem.h. What is checked is checked by flashmoe_science.varlen.append.
EXPORTED void flashmoe_paged_append(const AppendProblem* problem, int element_type, int threads) {
    const AppendProblem& p = *problem;
    AppendJob job = {problem, 0};
    const int64_t elements = (int64_t)p.tokens * (p.heads + 2 * p.kv_heads) * p.head_dim;
    if (elements < MIN_PARALLEL_ELEMENTS) threads = 1;
    if (threads > p.tokens) threads = p.tokens;
    run_on_threads(for_element(element_type, work<float>, work<BFloat16>, work<Half>), &job, threads);
}

static int append_and_return(const AppendProblem* problem, int element_type, int threads) {
    flashmoe_paged_append(problem, element_type, threads);
    return SUCCESS;
}

PYTHON_METHOD(flashmoe_paged_append_method, "paged_append", PythonCall<append_and_return>::call)
