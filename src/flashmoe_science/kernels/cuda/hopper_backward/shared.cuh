// Shared memory of the backward kernel: a block's keys and values, rings of queries and output gradients with their
// rows' statistics, score gradients on their way between the consumers, and pieces of dQ on their way out.
#pragma once

#include "hopper_backward/parameters.cuh"
#include "hopper_backward/release.cuh"
#include "hopper_backward/scheduler.cuh"
#include "mma/descriptor.cuh"
#include "mma/narrow_panel.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/vector.cuh"

namespace backward {

constexpr uint32 KEY_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr uint32 KEY_PANEL_BYTES = BLOCK_N * panel::ROW_BYTES;
constexpr uint32 QUERY_BYTES = BLOCK_M * HEAD_DIM * 2;
constexpr uint32 QUERY_PANEL_BYTES = BLOCK_M * panel::ROW_BYTES;
constexpr uint32 STATISTIC_BYTES = BLOCK_M * 4;
constexpr int STAGES = 2;  // of queries, output gradients and score gradients: one ring, whose stage is also the step's parity
constexpr uint32 SCORE_PANEL_BYTES = BLOCK_N * (TRANSPOSED ? narrow_panel::ROW_BYTES : panel::ROW_BYTES);  // of all keys
constexpr uint32 SCORE_BYTES = BLOCK_N * BLOCK_M * 2;

// What is converted, where CONVERTS: half a piece in, 64 rows of 64 columns out.
constexpr uint32 HALF_BYTES = PIECE_BYTES / 2;
constexpr uint32 ROWS_BYTES = PIECE * panel::ROW_BYTES;

struct Shared {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 VALUE = KEY_BYTES;
    static constexpr uint32 QUERIES = VALUE + KEY_BYTES;
    static constexpr uint32 GRADIENTS = QUERIES + STAGES * QUERY_BYTES;
    static constexpr uint32 SCORES = GRADIENTS + STAGES * QUERY_BYTES;
    static constexpr uint32 PIECES = SCORES + STAGES * SCORE_BYTES;
    static constexpr uint32 SUMS = PIECES + CONSUMERS * PIECE_BYTES;
    static constexpr uint32 ROWS_OUT = SUMS + (CONVERTS ? 2 * HALF_BYTES : 0);
    static constexpr uint32 LSE = ROWS_OUT + (CONVERTS ? 2 * ROWS_BYTES : 0);
    static constexpr uint32 DELTA = LSE + STAGES * STATISTIC_BYTES;
    static constexpr uint32 BARRIERS = DELTA + STAGES * STATISTIC_BYTES;
    static constexpr uint32 QUERY_BARRIERS = BARRIERS + 32;
    static constexpr uint32 GRADIENT_BARRIERS = QUERY_BARRIERS + STAGES * 16;
    static constexpr uint32 PIECE_BARRIERS = GRADIENT_BARRIERS + STAGES * 16;
    static constexpr uint32 SCORE_BARRIERS = PIECE_BARRIERS + CONSUMERS * 16;
    static constexpr uint32 TILE_BARRIERS = SCORE_BARRIERS + STAGES * 8;
    static constexpr uint32 TILES = TILE_BARRIERS + STAGES * 16;
    static constexpr uint32 SUM_BARRIERS = TILES + STAGES * 16;
    static constexpr uint32 SUM_LSE = SUM_BARRIERS + 16;
    static constexpr uint32 CONVERTED = SUM_LSE + (CONVERTS ? PIECE * 4 : 0);
    static constexpr uint32 BYTES = CONVERTED + 16;

    __device__ uint32 key() const { return base; }
    __device__ uint32 value() const { return base + VALUE; }
    __device__ uint32 query(int stage) const { return base + QUERIES + stage * QUERY_BYTES; }
    __device__ uint32 gradient(int stage) const { return base + GRADIENTS + stage * QUERY_BYTES; }
    __device__ uint32 scores(int stage) const { return base + SCORES + stage * SCORE_BYTES; }
    __device__ uint32 piece(int consumer) const { return base + PIECES + consumer * PIECE_BYTES; }
    __device__ uint32 sums(int slot) const { return base + SUMS + slot * HALF_BYTES; }
    __device__ uint32 rows_out(int slot) const { return base + ROWS_OUT + slot * ROWS_BYTES; }
    __device__ uint32 lse(int stage) const { return base + LSE + stage * STATISTIC_BYTES; }
    __device__ uint32 delta(int stage) const { return base + DELTA + stage * STATISTIC_BYTES; }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    __device__ uint32 key_full() const { return base + BARRIERS; }
    __device__ uint32 value_full() const { return base + BARRIERS + 8; }
    __device__ uint32 keys_empty() const { return base + BARRIERS + 16; }  // of values too
    __device__ uint32 query_full(int stage) const { return base + QUERY_BARRIERS + stage * 16; }
    __device__ uint32 query_empty(int stage) const { return query_full(stage) + 8; }
    __device__ uint32 gradient_full(int stage) const { return base + GRADIENT_BARRIERS + stage * 16; }
    __device__ uint32 gradient_empty(int stage) const { return gradient_full(stage) + 8; }
    __device__ uint32 piece_full(int consumer) const { return base + PIECE_BARRIERS + consumer * 16; }
    __device__ uint32 scores_full(int stage) const { return base + SCORE_BARRIERS + stage * 8; }
    __device__ uint32 tile(int slot) const { return base + TILES + slot * 16; }
    __device__ uint32 tile_full(int slot) const { return base + TILE_BARRIERS + slot * 16; }
    __device__ uint32 tile_empty(int slot) const { return tile_full(slot) + 8; }
    __device__ uint32 piece_empty(int consumer) const { return piece_full(consumer) + 8; }
    __device__ uint32 sums_full(int slot) const { return base + SUM_BARRIERS + slot * 8; }
    __device__ uint32 sums_lse() const { return base + SUM_LSE; }
    __device__ uint32 converted() const { return base + CONVERTED; }  // the converter's tile
};
static_assert(Shared::BYTES <= 232448, "more shared memory than a block may have");

// A place in a ring of two buffers, and the parity of its current round. No `hopper::Ring`, which is two registers:
// both rings of a consumer are in one here, see `Progress`.
struct Ring {
    uint32 count = 0;  // one register, where a stage and a parity would take two

    __device__ __forceinline__ int stage() const { return static_cast<int>(count & 1); }
    __device__ __forceinline__ uint32 parity() const { return count >> 1 & 1; }
    __device__ __forceinline__ void advance() { ++count; }
};
static_assert(STAGES == 2, "a ring's count is its stage and its parity");

// Both rings of a consumer, steps and tiles, in one register.
struct Progress {
    uint32 bits = 0;

    __device__ __forceinline__ Ring steps() const { return {bits >> 2}; }
    __device__ __forceinline__ Ring tiles() const { return {bits & 3}; }
    __device__ __forceinline__ void step() { bits += 4; }
    __device__ __forceinline__ void tile() { bits = (bits & ~3u) | ((bits + 1) & 3); }
};

__device__ __forceinline__ void initialise(const Shared& shared) {
    ptx::mbarrier_init(shared.key_full(), 1);
    ptx::mbarrier_init(shared.value_full(), 1);
    ptx::mbarrier_init(shared.keys_empty(), CONSUMERS * RELEASES);
    for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(shared.query_full(stage), 1);
        ptx::mbarrier_init(shared.query_empty(stage), CONSUMERS * RELEASES);
        ptx::mbarrier_init(shared.gradient_full(stage), 1);
        ptx::mbarrier_init(shared.gradient_empty(stage), CONSUMERS * RELEASES);
    }
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
        ptx::mbarrier_init(shared.piece_full(consumer), RELEASES);
        ptx::mbarrier_init(shared.piece_empty(consumer), 1);
        ptx::mbarrier_init(shared.sums_full(consumer), 1);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(shared.scores_full(stage), CONSUMERS * RELEASES);
        ptx::mbarrier_init(shared.tile_full(stage), 1);
        ptx::mbarrier_init(shared.tile_empty(stage), CONSUMERS * (RELEASES + 1) + CONVERTS * RELEASES_OF_WARP);
    }
    ptx::mbarrier_init_fence();
}

__device__ __forceinline__ void publish_tile(const Shared& shared, Ring& slot, const Tile& tile) {
    ptx::mbarrier_wait(shared.tile_empty(slot.stage()), slot.parity() ^ 1);
    store_shared(shared.tile(slot.stage()),
                 Chunk{static_cast<uint32>(tile.n_block), static_cast<uint32>(tile.head), static_cast<uint32>(tile.batch),
                       static_cast<uint32>(tile.first)});
    ptx::mbarrier_arrive(shared.tile_full(slot.stage()));
    slot.advance();
}

// The tile that is published in a slot; does not wait.
__device__ __forceinline__ Tile read_tile(const Shared& shared, int slot) {
    const Chunk tile = load_shared(shared.tile(slot));
    return {static_cast<int>(tile.x), static_cast<int>(tile.y), static_cast<int>(tile.z), static_cast<int>(tile.w)};
}

}  // namespace backward
