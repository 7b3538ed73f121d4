// Shared memory of the Hopper kernel for decode steps: rings of keys and values, the queries of a set, what the warpgroups
// leave each other, and barriers.
//
// Macros: HEAD_DIM, VALUE_DIM, STAGES, PAGES, CONSUMERS.
#pragma once

#include "decode/schedule.cuh"
#include "hopper/ring.cuh"
#include "mma/descriptor.cuh"
#include "ptx/tma.cuh"

namespace {

struct Maps {
    ptx::TensorMap key;    // (head_dim, rows, key heads, 1), or (head_dim, slots of a page, key heads, pages); with PAGES 2 not read
    ptx::TensorMap value;
};

constexpr int kWarpgroup = 128;
constexpr int kConsumers = CONSUMERS;                     // warpgroups
constexpr int kConsumerThreads = kConsumers * kWarpgroup;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kThreads = kConsumerThreads + kWarpgroup;   // and the warps that load; some may only leave registers
// Of a thread; the launch has 168 for each. Threads that copy rows hold addresses.
constexpr int kProducerRegisters = PAGES == 2 ? 88 : 40, kConsumerRegisters = PAGES == 2 ? 208 : 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168, "a claim waits until registers are there");
constexpr int kProductRows = 64;                          // wgmma's M; the first kRows of them are of the set
constexpr int kKeyPanels = HEAD_DIM / panel::PANEL_COLUMNS;
constexpr int kValuePanels = VALUE_DIM / panel::PANEL_COLUMNS;
// With TMA a warp for each panel, whose first lane arrives; else each thread that copies.
constexpr int kLoadingWarps = PAGES == 2 ? 4 : kKeyPanels + kValuePanels;
constexpr int kKeyArrivals = PAGES == 2 ? kWarpgroup : kKeyPanels, kValueArrivals = PAGES == 2 ? kWarpgroup : kValuePanels;
constexpr uint32 kPanelBytes = kTileKeys * panel::ROW_BYTES;
constexpr uint32 kKeyBytes = kKeyPanels * kPanelBytes;
constexpr uint32 kValueBytes = kValuePanels * kPanelBytes;
constexpr uint32 kQueryBytes = kKeyPanels * kProductRows * panel::ROW_BYTES;
constexpr int kSlots = 4;                                 // of segments
// A warpgroup sees all rounds of its own stages: a barrier's parity tells neighbouring rounds apart, and no others.
static_assert(STAGES % kConsumers == 0, "a stage belongs to one warpgroup");

// Addresses of 32 bits. What wgmma and TMA read begins at multiples of 1024.
struct Shared {
    uint32 base;

    static constexpr uint32 VALUES = STAGES * kKeyBytes;
    static constexpr uint32 QUERIES = VALUES + STAGES * kValueBytes;
    static constexpr uint32 RESULTS = QUERIES + kQueryBytes;
    static constexpr uint32 GATHERED = RESULTS + kConsumers * kQuads * 32 * 16;  // see parts.cuh
    static constexpr uint32 GATHERED_BYTES = PARTS > 1 ? kQuads * 32 * 16 + PARTS * kRows * 8 : 0;
    static constexpr uint32 BARRIERS = GATHERED + GATHERED_BYTES;
    static constexpr uint32 BYTES = BARRIERS + (2 * STAGES + kSlots + 1) * 16;

    __device__ uint32 key(int stage) const { return base + stage * kKeyBytes; }
    __device__ uint32 value(int stage) const { return base + VALUES + stage * kValueBytes; }
    __device__ uint32 query() const { return base + QUERIES; }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    static constexpr uint32 EMPTY = 8;  // from `full` to it
    __device__ uint32 key_full(int stage) const { return base + BARRIERS + stage * 16; }
    __device__ uint32 key_empty(int stage) const { return key_full(stage) + EMPTY; }
    __device__ uint32 value_full(int stage) const { return key_full(STAGES + stage); }
    __device__ uint32 value_empty(int stage) const { return value_full(stage) + EMPTY; }
    __device__ uint32 segment_full(int slot) const { return key_full(2 * STAGES + slot); }
    __device__ uint32 segment_empty(int slot) const { return segment_full(slot) + EMPTY; }
    __device__ uint32 gathered_full() const { return key_full(2 * STAGES + kSlots); }
    __device__ uint32 gathered_empty() const { return gathered_full() + EMPTY; }
};

static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

// By one thread.
__device__ __forceinline__ void initialise(const Shared& shared) {
    for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(shared.key_full(stage), kKeyArrivals);
        ptx::mbarrier_init(shared.key_empty(stage), kConsumerWarps / kConsumers);  // one warpgroup takes a tile
        ptx::mbarrier_init(shared.value_full(stage), kValueArrivals);
        ptx::mbarrier_init(shared.value_empty(stage), kConsumerWarps / kConsumers);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
        ptx::mbarrier_init(shared.segment_full(slot), 1);
        ptx::mbarrier_init(shared.segment_empty(slot), kConsumerWarps + kLoadingWarps - 1);  // all but the one that finds them
    }
    ptx::mbarrier_init(shared.gathered_full(), 1);
    ptx::mbarrier_init(shared.gathered_empty(), PARTS * kConsumerWarps);
    ptx::mbarrier_init_fence();
}

// Of a segment. Tiles begin at multiples of kTileKeys, whatever its first key is.
__device__ __forceinline__ int tiles_of_segment(const Segment& segment) {
    return (segment.last_key + kTileKeys - 1) / kTileKeys - segment.tile;
}

}  // namespace
