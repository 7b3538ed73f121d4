// The query rows of a segment on their way to shared memory.
#pragma once
#include "decode/tiles.cuh"
#include "ptx/cp_async.cuh"

namespace {

constexpr int kQueryChunks = 32 * ROW_TILES * kChunks;  // of one set of rows

// Starts copying a segment's queries to shared memory, in the order in which lanes read them. Rows past the end are zero.
__device__ __forceinline__ void copy_queries(const Parameters& p, const Segment& segment, Chunk* to) {
    for (int i = threadIdx.x; i < kQueryChunks; i += 32 * WARPS) {
        const int lane = i % 32, chunk = i / 32 % kChunks, tile = i / (32 * kChunks);
        const int row = segment.first_row + 8 * tile + lane / 4, dim = first_dim<kKeyPairs, 4>(chunk, lane % 4);
        const bool valid = row < segment.rows && (32 * chunk + 32 <= HEAD_DIM || dim < HEAD_DIM);
        const Row at = locate(valid ? row : 0, p);
        const uint64 token = static_cast<uint32>(segment.query_start + at.position);
        const uint64 head = static_cast<uint32>(segment.head * p.group + at.head);
        const uint64 offset = token * p.query_row + head * p.query_head + (valid ? dim * kElementBytes : 0);
        copy_chunk(shared_address(&to[i]), p.query + offset, valid);
    }
    if (!QUEUE) copy_commit();  // else with the keys that come next
}

}  // namespace
