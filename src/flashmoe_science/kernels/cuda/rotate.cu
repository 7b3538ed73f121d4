// Rotation of queries and keys by their positions: halves x, y of a head become x cos - y sin, y cos + x sin.
//
// Bound by memory: a thread reads 16 bytes of both halves of GROUP heads, which one token's cosines and sines serve, before it
// computes. In float32, rounded once. The inverse, which is also the gradient's, turns the other way.
//
// Compile-time configuration: ELEMENT_BITS (32 or 16), ELEMENT_BF16, MMA_K, GROUP, THREADS, DEPENDENT
// (ptx/dependent_launch.cuh).
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "ptx/global.cuh"
#include "ptx/element.cuh"
#include "ptx/vector.cuh"
#include "types.cuh"

struct Heads {
    const char* from;
    char* to;
};

struct HeadStrides {  // bytes
    int64 from_batch, from_head, from_token, to_batch, to_head, to_token;
};

struct RotateParameters {
    const char* query;
    const char* key;
    const char* cosine;  // (batch or 1, tokens, head_dim or half of it)
    const char* sine;
    char* rotated_query;
    char* rotated_key;
    HeadStrides of_query, of_key;
    int64 cosine_batch, cosine_token, sine_batch, sine_token;  // bytes
    int64 threads;     // batch * tokens * groups * vectors
    int tokens;        // of a sequence
    int query_heads;
    int heads;         // of queries and keys
    int vectors;       // of 16 bytes in half a head
    int half;          // bytes from a head's first half to its second
    int table_half;    // the same of cosines and sines; 0 where both halves have one table
    int inverse;
};

constexpr int kLanes = 128 / ELEMENT_BITS;  // elements of 16 bytes

struct Vector {
    float x[kLanes];
};

__device__ __forceinline__ Vector widen(const Chunk& c) {
    const uint32 words[4] = {c.x, c.y, c.z, c.w};
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if ELEMENT_BITS == 32
        v.x[i] = __int_as_float(static_cast<int>(words[i]));
#else
        const float2 pair = unpack(words[i]);
        v.x[2 * i] = pair.x;
        v.x[2 * i + 1] = pair.y;
#endif
    }
    return v;
}

__device__ __forceinline__ Chunk narrow(const Vector& v) {
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if ELEMENT_BITS == 32
        words[i] = __float_as_uint(v.x[i]);
#else
        words[i] = pack(v.x[2 * i], v.x[2 * i + 1]);
#endif
    }
    return Chunk{words[0], words[1], words[2], words[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ RotateParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int64 own = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (own >= p.threads) return;
    uint32 rest = static_cast<uint32>(own);  // there are fewer than 2^31
    const auto next = [&](int size) {
        const uint32 whole = rest / static_cast<uint32>(size), left = rest - whole * static_cast<uint32>(size);
        rest = whole;
        return static_cast<int>(left);
    };
    const int64 column = 16 * next(p.vectors);
    const int first = GROUP * next((p.heads + GROUP - 1) / GROUP);
    const int64 token = next(p.tokens), batch = rest;

    const auto addresses = [&](int head) {
        const bool is_query = head < p.query_heads;
        const HeadStrides& by = is_query ? p.of_query : p.of_key;
        const int64 in_own = is_query ? head : head - p.query_heads;
        return Heads{
            (is_query ? p.query : p.key) + batch * by.from_batch + in_own * by.from_head + token * by.from_token + column,
            (is_query ? p.rotated_query : p.rotated_key) + batch * by.to_batch + in_own * by.to_head +
                token * by.to_token + column};
    };
    Chunk upper[GROUP], lower[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        if (first + i < p.heads) {
            const char* from = addresses(first + i).from;
            upper[i] = load_once(from);
            lower[i] = load_once(from + p.half);
        }
    }
    const char* const cosines = p.cosine + batch * p.cosine_batch + token * p.cosine_token + column;
    const char* const sines = p.sine + batch * p.sine_batch + token * p.sine_token + column;
    const Vector cosine = widen(load_global(cosines)), other_cosine = widen(load_global(cosines + p.table_half));
    Vector sine = widen(load_global(sines)), other_sine = widen(load_global(sines + p.table_half));
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
        const float x = sine.x[i], y = other_sine.x[i];
        sine.x[i] = p.inverse ? -y : x;
        other_sine.x[i] = p.inverse ? -x : y;
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        if (first + i < p.heads) {
            const Vector x = widen(upper[i]), y = widen(lower[i]);
            Vector turned, other;
#pragma unroll
            for (int j = 0; j < kLanes; ++j) {
                turned.x[j] = fmaf(x.x[j], cosine.x[j], -(y.x[j] * sine.x[j]));
                other.x[j] = fmaf(y.x[j], other_cosine.x[j], x.x[j] * other_sine.x[j]);
            }
            char* const to = addresses(first + i).to;
            store_global(to, narrow(turned));
            store_global(to + p.half, narrow(other));
        }
    }
}
