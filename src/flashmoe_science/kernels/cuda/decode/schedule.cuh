// Which keys of which sequences a block takes, from lengths in device memory.
//
// All tiles of 16 keys that the grid goes through are counted sequence by sequence, and in one, key/value head by head (and
// set of query rows by set). They are dealt out to blocks in equal shares of consecutive units of some tiles, so that a
// block shares at most its first and its last set with others. A unit is a power of two up to a pass of the block: the
// fewer keys there are, the smaller. Sequences without work have no units.
//
// In batch-invariant mode a unit is `split_tiles`, begins at a multiple of them, and is summed by itself.
#pragma once
#include "decode/parameters.cuh"
#include "ptx/redux.cuh"

namespace {

// Consecutive keys of one set of query rows: what a block does at a time.
struct Segment {
    int sequence, head;        // of keys and values
    int first_row, rows;       // packed query rows of the set; all rows of the sequence
    int query_start;           // row of query at which the sequence begins
    int past;                  // query i stands at position i + past
    int key_start;             // where its keys begin, if they are packed
    int tile;                  // the first
    int first_key, last_key;   // of the segment, one past
    int all_begin, all_end;    // keys that all rows see
    int passes;                // 0: there is no such segment
    int slot;                  // where its result is left; -1: it is the whole set, and is written
    int first_block, blocks;   // those that share the set
    int first_unit, pieces;    // partial results of the set
    int meets;                 // whether the block has left all that it has of the set
};

// The block's place in its share. Only one lane reads and writes it.
struct Cursor {
    int unit, end;         // of the grid
    int share;             // units of a block
    int unit_tiles;
    int sequence, before;  // units of all sequences before
};

// What a sequence asks for.
struct Extent {
    int rows, past, first_key, keys;

    __device__ __forceinline__ Extent(const Parameters& p, int sequence) {
        const int queries = p.query_starts[sequence + 1] - p.query_starts[sequence];
        keys = p.key_lengths != nullptr ? p.key_lengths[sequence] : p.key_starts[sequence + 1] - p.key_starts[sequence];
        rows = queries * p.group;
        past = keys - queries;
        first_key = max(0, past - p.left);
        // The last query sees the most keys; without `right` all.
        if (rows <= 0 || first_key >= keys) rows = 0;
    }

    __device__ __forceinline__ int first_tile(const Parameters& p) const {
        const int tile = first_key / kTileKeys;
        return p.split_tiles > 0 ? tile - tile % p.split_tiles : tile;
    }
    __device__ __forceinline__ int tiles(const Parameters& p) const {
        return rows == 0 ? 0 : (keys + kTileKeys - 1) / kTileKeys - first_tile(p);
    }
    __device__ __forceinline__ int sets(const Parameters& p) const { return p.kv_heads * ((rows + kRows - 1) / kRows); }
};

__device__ __forceinline__ int sum_of_warp(int x) {
    return static_cast<int>(over_lanes<32>(static_cast<uint32>(x), [](uint32 a, uint32 b) { return a + b; }));
}

constexpr int kUnitSizes = kPass >= 16 ? 5 : kPass >= 8 ? 4 : kPass >= 4 ? 3 : kPass >= 2 ? 2 : 1;

// All lanes of a warp: where the block begins.
__device__ __forceinline__ void begin_share(const Parameters& p, Cursor& cursor, int lane) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int each = (p.batch + 31) / 32;
    const int from = min(lane * each, p.batch), to = min(from + each, p.batch);
    int counts[kUnitSizes] = {};  // units of the lane's sequences, for each size of a unit
    int longest = 0;
    for (int sequence = from; sequence < to; ++sequence) {
        const Extent extent(p, sequence);
        const int sets = extent.sets(p), tiles = extent.tiles(p);
        longest = max(longest, tiles);
        if (p.split_tiles > 0) {
            counts[0] += sets * ((tiles + p.split_tiles - 1) / p.split_tiles);
        } else {
#pragma unroll
            for (int i = 0; i < kUnitSizes; ++i) counts[i] += sets * ((tiles + (1 << i) - 1) >> i);
        }
    }
    int own = counts[0], unit_tiles = p.split_tiles;
    if (p.split_tiles == 0) {
        const int all_tiles = sum_of_warp(counts[0]);
        longest = static_cast<int>(most<32>(static_cast<uint32>(longest)));
        unit_tiles = 1;
#pragma unroll
        for (int i = 1; i < kUnitSizes; ++i) {
            // A tile takes a block about five times as long to read as one more partial result takes to combine: that is
            // the least where a block has the square root of a fifth of a set's tiles.
            const int less = 1 << (i - 1);
            if (less * blocks < all_tiles || 4 * less * less < longest) {
                unit_tiles = 2 * less;
                own = counts[i];
            }
        }
    }
    int up_to = own;  // and with all lanes before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int x = __shfl_up_sync(0xffffffffu, up_to, distance);
        if (lane >= distance) up_to += x;
    }
    const int all = __shfl_sync(0xffffffffu, up_to, 31);
    const int share = max(1, (all + blocks - 1) / blocks);
    const int begin = min(block * share, all);
    if (lane == 0) {
        cursor.share = share;
        cursor.unit_tiles = unit_tiles;
        cursor.unit = begin;
        cursor.end = min(begin + share, all);
    }
    const int before = up_to - own;
    if (before <= begin && begin < up_to) {  // one lane, unless there is nothing to do
        cursor.sequence = from;
        cursor.before = before;
    }
    __syncwarp();
}

__device__ __forceinline__ int unit_count(int tiles, int unit_tiles) { return (tiles + unit_tiles - 1) / unit_tiles; }

// One lane: the next segment of the block's share. `cursor` goes past it.
__device__ __forceinline__ void next_segment(const Parameters& p, Cursor& cursor, Segment& segment) {
    const int unit = cursor.unit, unit_tiles = cursor.unit_tiles, share = cursor.share;
    if (unit >= cursor.end) {
        segment.passes = 0;
        return;
    }
    int sequence = cursor.sequence, before = cursor.before, sets, units;
    while (true) {
        const Extent extent(p, sequence);
        sets = extent.sets(p);
        units = unit_count(extent.tiles(p), unit_tiles);
        if (unit - before < sets * units) break;
        before += sets * units;
        ++sequence;
    }
    const Extent extent(p, sequence);
    const int set = (unit - before) / units;
    const int within = unit - before - set * units;
    const int row_blocks = sets / p.kv_heads;
    const int taken = p.split_tiles > 0 ? 1 : min(units - within, cursor.end - unit);
    const int first_unit = unit - within;
    const int tile = extent.first_tile(p) + within * unit_tiles;
    const int end_tile = min(tile + taken * unit_tiles, (extent.keys + kTileKeys - 1) / kTileKeys);
    const int first_block = first_unit / share, last_block = (first_unit + units - 1) / share;

    segment.sequence = sequence;
    segment.head = set / row_blocks;
    segment.first_row = (set - segment.head * row_blocks) * kRows;
    segment.rows = extent.rows;
    segment.query_start = p.query_starts[sequence];
    segment.past = extent.past;
    segment.key_start = p.key_starts != nullptr ? p.key_starts[sequence] : 0;
    segment.tile = tile;
    segment.first_key = max(extent.first_key, kTileKeys * tile);
    segment.last_key = min(extent.keys, kTileKeys * end_tile);
    // The first row of the set sees the fewest keys to the right, the last one the fewest to the left.
    const int first_position = segment.first_row / p.group + extent.past;
    const int last_position = (min(segment.first_row + kRows, extent.rows) - 1) / p.group + extent.past;
    segment.all_begin = max(segment.first_key, last_position - p.left);
    segment.all_end = min(segment.last_key, first_position + p.right + 1);
    segment.passes = (end_tile - tile + kPass - 1) / kPass;
    segment.first_block = first_block;
    segment.blocks = last_block - first_block + 1;
    segment.first_unit = first_unit;
    if (p.split_tiles > 0) {
        segment.pieces = units;
        segment.slot = units > 1 ? unit : -1;
        segment.meets = within == units - 1 || unit + 1 == cursor.end;
    } else {
        segment.pieces = segment.blocks;
        segment.slot = segment.blocks > 1 ? 2 * static_cast<int>(blockIdx.x) + (within == 0 ? 1 : 0) : -1;
        segment.meets = 1;
    }
    cursor.unit = unit + taken;
    cursor.sequence = sequence;
    cursor.before = before;
}

// Where piece `i` of the set was left. A block has two slots: for the set that it goes on with, and for the one it begins.
__device__ __forceinline__ int slot_of_piece(const Parameters& p, const Segment& segment, int i) {
    if (p.split_tiles > 0) return segment.first_unit + i;
    return 2 * (segment.first_block + i) + (i == 0 ? 1 : 0);
}

}  // namespace
