// Shared memory of the Hopper kernel of grouped products: a ring of operand tiles, their barriers, a ring of tiles to do.
#pragma once

#include "hopper/ring.cuh"
#include "moe/hopper_parameters.cuh"
#include "ptx/cluster_barrier.cuh"
#include "ptx/multicast.cuh"

namespace moe {

using hopper::release;
using hopper::Ring;

// A product to do: 256 rows of an expert's weight with up to TOKENS of the rows sorted to it.
struct Tile {
    int expert;
    int weight_tile;
    int first;  // position of the first row
    int count;  // of rows; NO_TILE: there are no more tiles
};
constexpr int NO_TILE = CLUSTER == 1 ? 0 : -1;  // the second block of a cluster may have no rows

constexpr int TILE_SLOTS = 2;
constexpr int TILE_BYTES = 16;
constexpr int TICKET_SLOTS = CLUSTER == 1 ? 0 : 2;
constexpr uint32 WEIGHT_BYTES = WEIGHT_ROWS * ROW_BYTES;
constexpr uint32 TOKEN_BYTES = TOKENS * ROW_BYTES;

// Which panel's kept columns come in which turn: the consumers', two each, by turns.
__device__ __forceinline__ int panel_of_turn(int turn) { return turn % 2 * 2 + turn / 2; }

struct Shared {
    uint32 base;  // on 1024 bytes

    static constexpr uint32 TOKEN_TILES = STAGES * WEIGHT_BYTES;
    static constexpr uint32 BARRIERS = TOKEN_TILES + STAGES * TOKEN_BYTES;
    static constexpr uint32 TILE_BARRIERS = BARRIERS + STAGES * 16;
    static constexpr uint32 TICKET_BARRIERS = TILE_BARRIERS + TILE_SLOTS * 16;
    static constexpr uint32 TILES = TICKET_BARRIERS + TICKET_SLOTS * 16;
    static constexpr uint32 TICKETS = TILES + TILE_SLOTS * TILE_BYTES;
    static constexpr uint32 BYTES = TICKETS + TICKET_SLOTS * 16;

    __device__ uint32 weights(int stage) const { return base + stage * WEIGHT_BYTES; }
    __device__ uint32 tokens(int stage) const { return base + TOKEN_TILES + stage * TOKEN_BYTES; }
    __device__ uint32 full(int stage) const { return base + BARRIERS + stage * 16; }
    __device__ uint32 empty(int stage) const { return full(stage) + 8; }
    __device__ uint32 tile_full(int slot) const { return base + TILE_BARRIERS + slot * 16; }
    __device__ uint32 tile_empty(int slot) const { return tile_full(slot) + 8; }
    __device__ uint32 tile(int slot) const { return base + TILES + slot * TILE_BYTES; }

    // What the first block of a cluster tells the second: `full` and the ticket in the second, `empty` in the first.
    __device__ uint32 ticket_full(int slot) const { return base + TICKET_BARRIERS + slot * 16; }
    __device__ uint32 ticket_empty(int slot) const { return ticket_full(slot) + 8; }
    __device__ uint32 ticket(int slot) const { return base + TICKETS + slot * 16; }
};
static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(shared.full(stage), GATHER ? 1 + WARPGROUP : 1);
        ptx::mbarrier_init(shared.empty(stage), CONSUMER_WARPS * CLUSTER);
    }
    for (int slot = 0; slot < TILE_SLOTS; ++slot) {
        ptx::mbarrier_init(shared.tile_full(slot), 1);
        ptx::mbarrier_init(shared.tile_empty(slot), CONSUMER_WARPS + (GATHER ? 3 : 0));
    }
    for (int slot = 0; slot < TICKET_SLOTS; ++slot) {
        ptx::mbarrier_init(shared.ticket_full(slot), 1);
        ptx::mbarrier_init(shared.ticket_empty(slot), 1);
    }
    ptx::mbarrier_init_fence();
}

// All threads, once the barriers are initialised, and at the end: the other block of a cluster still arrives at them.
__device__ __forceinline__ void meet() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        ptx::cluster_sync();
    }
}

__device__ __forceinline__ int rank_in_cluster() { return CLUSTER == 1 ? 0 : static_cast<int>(ptx::cluster_rank()); }

// Marks a stage, into which all blocks of the cluster write, as free here.
__device__ __forceinline__ void release_stage(uint32 barrier) {
    if constexpr (CLUSTER == 1) {
        release(barrier);
    } else {
        __syncwarp();
        const uint32 lane = threadIdx.x % 32;
        if (lane < CLUSTER) ptx::mbarrier_arrive_at(ptx::in_block(barrier, lane));
    }
}

// A box of a tensor, into all blocks of the cluster.
template <class... At>
__device__ __forceinline__ void load_for_cluster(const ptx::TensorMap& map, uint32 to, uint32 barrier, At... at) {
    if constexpr (CLUSTER == 1) {
        ptx::tma_load(map, to, barrier, at...);
    } else {
        ptx::tma_load_to_both(map, to, barrier, at...);
    }
}

// The first thread's ticket, drawn one ahead. The first block of a cluster draws, and tells the second.
struct Tickets {
    Ring<TICKET_SLOTS == 0 ? 1 : TICKET_SLOTS> told;
    int ticket = blockIdx.x / CLUSTER;  // the first thread's counts

    // By the whole first warp. `counter`: zero at the start.
    __device__ __forceinline__ int next(int* counter, const Shared& shared, int rank) {
        int drawn;
        if (rank == 0) {
            drawn = __shfl_sync(0xffffffff, ticket, 0);
            if constexpr (CLUSTER == 2) {
                ptx::mbarrier_wait(shared.ticket_empty(told.stage), told.parity ^ 1);
                if (threadIdx.x == 0) {
                    ptx::post(ptx::in_block(shared.ticket(told.stage), 1), ptx::in_block(shared.ticket_full(told.stage), 1),
                              drawn);
                }
            }
            if (threadIdx.x == 0) ticket = atomicAdd(counter, 1) + static_cast<int>(gridDim.x) / CLUSTER;
        } else {
            if (threadIdx.x == 0) ptx::mbarrier_expect_bytes(shared.ticket_full(told.stage), sizeof(int));
            __syncwarp();
            ptx::mbarrier_wait(shared.ticket_full(told.stage), told.parity);
            drawn = static_cast<int>(load_shared(shared.ticket(told.stage)).x);
            __syncwarp();
            if (threadIdx.x == 0) ptx::mbarrier_arrive_at(ptx::in_block(shared.ticket_empty(told.stage), 0));
        }
        if constexpr (CLUSTER == 2) told.advance();
        return drawn;
    }
};

// By the whole of the only warp that publishes.
__device__ __forceinline__ void publish(const Shared& shared, Ring<TILE_SLOTS>& ring, const Tile& tile) {
    ptx::mbarrier_wait(shared.tile_empty(ring.stage), ring.parity ^ 1);
    if (threadIdx.x == 0) {
        hopper::store_tile(shared.tile(ring.stage), tile.expert, tile.weight_tile, tile.first, tile.count);
        ptx::mbarrier_arrive(shared.tile_full(ring.stage));
    }
    ring.advance();
}

// The next tile, by a whole warp that only reads them.
__device__ __forceinline__ Tile next_tile(const Shared& shared, Ring<TILE_SLOTS>& ring) {
    ptx::mbarrier_wait(shared.tile_full(ring.stage), ring.parity);
    Tile tile;
    hopper::load_tile(shared.tile(ring.stage), tile.expert, tile.weight_tile, tile.first, tile.count);
    release(shared.tile_empty(ring.stage));
    ring.advance();
    return tile;
}

}  // namespace moe
