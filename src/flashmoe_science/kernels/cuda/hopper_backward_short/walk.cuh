// The steps that a block makes: key heads, for each its blocks of keys, for each the blocks of query rows that see them.
// Producers and consumers walk alike, so nothing needs to be handed out.
#pragma once

#include "hopper_backward_short/parameters.cuh"

namespace backward {

// Heads of keys of one thread block: `index` counts those that it has had.
struct Head {
    int flat;   // batch * num_kv_heads + head
    int index;

    __device__ __forceinline__ bool inside(const Parameters& p) const { return flat < p.head_count; }
    __device__ __forceinline__ void advance() {
        flat += static_cast<int>(gridDim.x);
        ++index;
    }
    __device__ __forceinline__ int batch(const Parameters& p) const { return flat / p.num_kv_heads; }
    __device__ __forceinline__ int head(const Parameters& p) const { return flat % p.num_kv_heads; }
    // The first of the query heads that share the keys.
    __device__ __forceinline__ int query_head(const Parameters& p) const { return head(p) * (p.num_heads / p.num_kv_heads); }
};

// The first block of query rows that sees a block of keys.
__device__ __forceinline__ int first_m_block(const Parameters& p, int n_block) {
    return CAUSAL ? max(0, n_block * BLOCK_N - (p.seqlen_k - p.seqlen_q)) / BLOCK_M : 0;
}

// How many blocks of keys a block of query rows sees.
__device__ __forceinline__ int seen_blocks(const Parameters& p, int m_block) {
    if (!CAUSAL) return p.n_blocks;
    return min(p.n_blocks, ((m_block + 1) * BLOCK_M + p.seqlen_k - p.seqlen_q + BLOCK_N - 1) / BLOCK_N);
}

// Blocks of query rows, from the last of a head down to the first that sees the keys, one head of the group after another.
struct Walk {
    int m_block;
    int block;  // counted over all heads of the group
    int left;   // steps to go, this one included

    __device__ __forceinline__ Walk(const Parameters& p, int first) {
        block = m_block = p.m_blocks - 1;
        left = p.num_heads / p.num_kv_heads * (p.m_blocks - first);
    }

    __device__ __forceinline__ void advance(const Parameters& p, int first) {
        --left;
        if (m_block > first) {
            --m_block;
            --block;
        } else {
            m_block = p.m_blocks - 1;
            block += 2 * p.m_blocks - 1 - first;
        }
    }
};

}  // namespace backward
