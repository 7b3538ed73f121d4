// Rows of new keys and values into slots of a paged cache, and queries beside them: the norm of each head, rotary embedding,
// quantisation and the write, in one launch.
//
// A warp takes a head's row of a token through shared memory. Arithmetic is that of flashmoe_science/varlen/transform.py in
// float32, each product and sum rounded: without a norm, whose sum has another order, results have its bits.
//
// Macros: ELEMENT_BF16, MMA_K (types.cuh).
#include "append/parameters.cuh"
#include "ptx/element.cuh"
#include "ptx/redux.cuh"

namespace {

constexpr int kWarps = 4;
constexpr float kLargestFp8 = 448.0f;

// A code of e4m3, rounded to nearest even, in integer arithmetic that every GPU has. What is beyond the largest becomes the largest;
// NaN stays NaN.
__device__ __forceinline__ uint32 fp8_of(float x) {
    const uint32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const float magnitude = fminf(fabsf(x), kLargestFp8);
    if (x != x) return sign | 0x7f;
    // Below the smallest normal number, 2^-6, codes count multiples of 2^-9, and so does the last bit of 2^14 + x.
    if (magnitude < 0.015625f) return sign | (__float_as_uint(magnitude + 16384.0f) & 0xf);
    const uint32 m = __float_as_uint(magnitude);
    return sign | (((m + 0x7ffff + (m >> 20 & 1)) >> 20) - (120 << 3));
}

__device__ __forceinline__ int64 load_integer(const void* from, int index, int wide) {
    return wide ? static_cast<const int64*>(from)[index] : static_cast<const int*>(from)[index];
}

// A number of a tensor in float32, or in the elements' type.
__device__ __forceinline__ float load_number(const void* from, int64 index, int is_float) {
    return is_float ? static_cast<const float*>(from)[index] : load_element(static_cast<const uint16*>(from) + index);
}

// A row in shared memory becomes row * rsqrt(mean(row^2) + eps) * weight. `squares`: of this lane's elements.
__device__ __forceinline__ void norm(float* row, int dim, float squares, const void* weight, int is_float, float eps, int lane) {
    const float sum = over_lanes<32>(squares, [](float a, float b) { return a + b; });
    const float factor = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
    for (int i = lane; i < dim; i += 32) row[i] = __fmul_rn(__fmul_rn(row[i], factor), load_number(weight, i, is_float));
    __syncwarp();
}

__device__ __forceinline__ void rotate(float* row, const AppendParameters& p, int token, int lane) {
    int64 position = load_integer(p.positions, token, p.wide_positions);
    if (position < 0) position += p.cos_sin_rows;  // as indices of a tensor count
    const int64 angles = position * p.cos_sin_row;
    const int half = p.rotary_dim / 2;
    for (int i = lane; i < half; i += 32) {
        const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + half;
        const float cosine = load_number(p.cos_sin, angles + i, p.float_cos_sin);
        const float sine = load_number(p.cos_sin, angles + half + i, p.float_cos_sin);
        const float x = row[first], y = row[second];
        row[first] = __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
        row[second] = __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
    }
    __syncwarp();
}

__device__ __forceinline__ void store_row(const float* row, int dim, char* to, int lane) {
    for (int i = lane; i < dim; i += 32) store_element(to + i * kElementBytes, row[i]);
}

// What a row's elements are divided by: a scale that is given, or chosen and written.
__device__ __forceinline__ float scale_of(const float* row, int dim, const AppendCache& cache, int64 page, int64 within, int head,
                                          int lane) {
    if (cache.form == kScaleGiven) return cache.scale == nullptr ? 1.0f : cache.scale[head * cache.scale_head];
    float largest = 0.0f;
    bool nan = false;
    for (int i = lane; i < dim; i += 32) {
        largest = fmaxf(largest, fabsf(row[i]));
        nan |= row[i] != row[i];
    }
    largest = over_lanes<32>(largest, [](float a, float b) { return fmaxf(a, b); });
    const float scale = __any_sync(0xffffffffu, nan) ? __int_as_float(0x7fc00000) : fmaxf(largest / kLargestFp8, kSmallestScale);
    if (lane == 0) cache.scale[page * cache.scale_page + within * cache.scale_slot + head * cache.scale_head] = scale;
    return scale;
}

__device__ __forceinline__ void store_in_cache(const float* row, int dim, const AppendCache& cache, int64 slot, int head,
                                               int page_size, int lane) {
    const int64 page = slot / page_size, within = slot - page * page_size;
    char* const to = cache.data + page * cache.page + within * cache.slot + head * cache.head;
    if (cache.form == kSameType) {
        store_row(row, dim, to, lane);
        return;
    }
    const float scale = scale_of(row, dim, cache, page, within, head, lane);
    for (int i = lane; i < dim; i += 32) to[i] = static_cast<char>(fp8_of(row[i] / scale));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
paged_append(const __grid_constant__ AppendParameters p) {
    __shared__ float rows[kWarps][kMostDim];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int of_token = p.heads + 2 * p.kv_heads;
    const int number = blockIdx.x * kWarps + warp;
    const int token = number / of_token;
    if (token >= p.tokens) return;
    const int index = number - token * of_token;
    const bool is_query = index < p.heads, is_key = !is_query && index < p.heads + p.kv_heads;
    const int head = is_query ? index : is_key ? index - p.heads : index - p.heads - p.kv_heads;
    const int64 slot = is_query ? 0 : load_integer(p.slots, token, p.wide_slots);
    if (slot < 0) return;

    const AppendRows& source = is_query ? p.query : is_key ? p.key : p.value;
    const uint16* const from = reinterpret_cast<const uint16*>(source.data + token * source.token + head * source.head);
    const int dim = is_query || is_key ? p.head_dim : p.value_dim;
    float* const row = rows[warp];
    float squares = 0.0f;
    for (int i = lane; i < dim; i += 32) {
        const float x = load_element(from + i);
        row[i] = x;
        squares = fmaf(x, x, squares);
    }
    __syncwarp();
    if (is_query || is_key) {
        const void* const weight = is_query ? p.query_norm : p.key_norm;
        if (weight != nullptr) norm(row, dim, squares, weight, is_query ? p.float_query_norm : p.float_key_norm, p.eps, lane);
        if (p.cos_sin != nullptr) rotate(row, p, token, lane);
    }
    if (is_query) {
        store_row(row, dim, p.query_out + (static_cast<int64>(token) * p.heads + head) * dim * kElementBytes, lane);
    } else {
        store_in_cache(row, dim, is_key ? p.key_cache : p.value_cache, slot, head, p.page_size, lane);
    }
}
