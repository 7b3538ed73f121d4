// Trees of draft tokens: which of the keys of its sequence's own queries a row sees.
//
// A row has a word of 64 bits, of which bit j says whether it sees the key of the sequence's query j, within what it sees
// without. Sequences of more queries have no tree.
#pragma once
#include "ptx/redux.cuh"
#include "types.cuh"

namespace {

constexpr int kTreeQueries = 64;
constexpr int kNoTree = 0x7fffffff;  // in place of the first query's key, which it is behind

// Of bits of the queries' keys, those of 64 keys from `first` on, which is counted from the key of the sequence's first query.
__device__ __forceinline__ uint64 bits_from(uint64 bits, int first) {
    if (first <= -kTreeQueries || first >= kTreeQueries) return 0;
    return first < 0 ? bits << -first : bits >> first;
}

// What a row's word hides of these keys.
__device__ __forceinline__ uint64 hidden_from(uint64 word, int first) { return bits_from(~word, first); }

__device__ __forceinline__ uint32 bits_of_any_lane(uint32 x) {
#if NATIVE_REDUX
    uint32 y;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
#else
    return over_lanes<32>(x, [](uint32 a, uint32 b) { return a | b; });
#endif
}

// All lanes of a warp: the keys of a sequence's queries, at most 64, that none of them sees: bits of no query are zero. Each sees
// `right` keys behind its own at most.
__device__ __forceinline__ uint64 unseen_by_all(const uint64* words, int queries, int right, int lane) {
    uint64 seen = 0;
    for (int i = lane; i < queries; i += 32) {
        const int behind = max(0, kTreeQueries - 1 - i - right);
        seen |= words[i] << behind >> behind;
    }
    const uint32 low = bits_of_any_lane(static_cast<uint32>(seen));
    const uint32 high = bits_of_any_lane(static_cast<uint32>(seen >> 32));
    const uint64 all = static_cast<uint64>(high) << 32 | low;
    return queries == 0 ? 0 : ~all << (kTreeQueries - queries) >> (kTreeQueries - queries);
}

}  // namespace
