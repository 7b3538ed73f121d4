// Which experts were chosen and by whom, found by every block for itself in shared memory: no kernel of its own, no
// device memory. A group is up to kColumns slots of one expert.
//
// DIRECT (macro): 1: at most 32 slots, each of them a group, no sorting (an expert that is chosen twice is read twice).
#pragma once
#include "moe/few_parameters.cuh"

constexpr int kMaxExperts = 512;
constexpr uint16 kNoExpert = 0xffff;

struct Group {
    uint16 expert;  // or kNoExpert
    uint16 first;   // index of its first slot in `sorted`
    uint16 rows;
    uint16 unused;
};

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int kMaxGroups = smaller(MAX_SLOTS, kMaxExperts + MAX_SLOTS / kColumns);

// The expert of a slot, or kNoExpert.
__device__ __forceinline__ uint16 expert_of(const Parameters& p, int slot) {
    const int64 id = p.ids64 ? static_cast<const int64*>(p.topk_ids)[slot] : static_cast<const int*>(p.topk_ids)[slot];
    return id >= 0 && id < p.experts ? static_cast<uint16>(id) : kNoExpert;
}

#if DIRECT

struct Routing {
    static constexpr int kBytes = 0;
    static constexpr int kScratchBytes = 0;
    int groups;
    int own;  // the expert of this lane's slot

    __device__ __forceinline__ Routing(const Parameters& p, char*, char*) : groups(p.slots) {
        const int lane = threadIdx.x % 32;
        own = lane < p.slots ? expert_of(p, lane) : kNoExpert;
    }

    __device__ __forceinline__ Group group(int index) const {
        const int expert = __shfl_sync(0xffffffffu, own, index);
        return {static_cast<uint16>(expert), static_cast<uint16>(index),
                static_cast<uint16>(expert != kNoExpert), 0};
    }

    __device__ __forceinline__ int slot(int position) const { return position; }
};

#else

// A stable counting sort: all blocks must agree on which slots are a group. Every warp counts a stretch of the slots.
struct Routing {
    static constexpr int kBytes = kMaxGroups * 8 + MAX_SLOTS * 2 + 128;
    static constexpr int kScratchBytes = WARPS * kMaxExperts * 2 + MAX_SLOTS * 4;
    static constexpr int kBatch = smaller(8, (MAX_SLOTS + kThreads - 1) / kThreads);
    int groups;
    const Group* table;
    const uint16* sorted;

    // `memory` stays in use; `scratch` is free again afterwards. All threads.
    __device__ __forceinline__ Routing(const Parameters& p, char* memory, char* scratch) {
        Group* const table_out = reinterpret_cast<Group*>(memory);
        uint16* const sorted_out = reinterpret_cast<uint16*>(memory + kMaxGroups * 8);
        uint32* const totals = reinterpret_cast<uint32*>(memory + kMaxGroups * 8 + MAX_SLOTS * 2);
        uint16* const counts = reinterpret_cast<uint16*>(scratch);  // [warp][expert]
        uint16* const experts = counts + WARPS * kMaxExperts;       // of every slot
        uint16* const ranks = experts + MAX_SLOTS;                  // among those of its expert that its warp counts
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint16* const own = counts + warp * kMaxExperts;

        // Several ids are on their way at a time.
        for (int base = threadIdx.x; base < p.slots; base += kBatch * kThreads) {
            uint16 batch[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                batch[i] = base + i * kThreads < p.slots ? expert_of(p, base + i * kThreads) : kNoExpert;
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (base + i * kThreads < p.slots) experts[base + i * kThreads] = batch[i];
        }
        for (int i = threadIdx.x; i < WARPS * kMaxExperts / 2; i += kThreads) reinterpret_cast<uint32*>(counts)[i] = 0;
        __syncthreads();
        const int stretch = (p.slots + kThreads - 1) / kThreads * 32;
        const int end = min(p.slots, (warp + 1) * stretch);
        for (int base = warp * stretch; base < end; base += 32) {
            const int slot = base + lane;
            const uint16 expert = slot < end ? experts[slot] : kNoExpert;
            const uint32 same = __match_any_sync(0xffffffffu, static_cast<uint32>(expert));
            const int rank = __popc(same & ((1u << lane) - 1));
            const uint16 before = expert != kNoExpert ? own[expert] : 0;
            __syncwarp();
            if (expert != kNoExpert && rank == 0) own[expert] = static_cast<uint16>(before + __popc(same));
            if (slot < end) ranks[slot] = static_cast<uint16>(before + rank);
            __syncwarp();
        }
        __syncthreads();

        // Running sums over experts: slots in the low half, groups in the high half.
        uint32 before = 0;
        for (int base = 0; base < p.experts; base += kThreads) {
            const int e = base + threadIdx.x;
            uint32 count = 0;
            if (e < p.experts)
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const uint32 of_warp = counts[w * kMaxExperts + e];
                    counts[w * kMaxExperts + e] = static_cast<uint16>(count);
                    count += of_warp;
                }
            const uint32 both = count | ((count + kColumns - 1) / kColumns) << 16;
            uint32 sum = both;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const uint32 other = __shfl_up_sync(0xffffffffu, sum, distance);
                if (lane >= distance) sum += other;
            }
            if (lane == 31) totals[warp] = sum;
            __syncthreads();
            uint32 start = before + sum - both;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w < warp) start += totals[w];
                before += totals[w];
            }
            if (e < p.experts) {
                const uint32 first = start & 0xffff;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) counts[w * kMaxExperts + e] += static_cast<uint16>(first);
                for (uint32 done = 0, at = start >> 16; done < count; done += kColumns, ++at)
                    table_out[at] = {static_cast<uint16>(e), static_cast<uint16>(first + done),
                                     static_cast<uint16>(smaller(count - done, kColumns)), 0};
            }
            __syncthreads();
        }
        for (int slot = warp * stretch + lane; slot < end; slot += 32)
            if (experts[slot] != kNoExpert) sorted_out[own[experts[slot]] + ranks[slot]] = static_cast<uint16>(slot);
        __syncthreads();
        groups = static_cast<int>(before >> 16);
        table = table_out;
        sorted = sorted_out;
    }

    __device__ __forceinline__ Group group(int index) const { return table[index]; }
    __device__ __forceinline__ int slot(int position) const { return sorted[position]; }
};

#endif
