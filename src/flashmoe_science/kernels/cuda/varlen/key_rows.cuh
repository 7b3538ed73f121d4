// Where the keys and values of a block lie. Packed: one row after another. In pages: a thread for each row looks its page
// up in the table, once, and leaves its place in shared memory for the threads that copy the row.
#pragma once
#include "portable/copier.cuh"
#include "ptx/index.cuh"
#include "varlen/work_tile.cuh"

struct KeyRow {
    int64 key;  // bytes from the head's first page
#if SAME_STRIDES
    __device__ __forceinline__ int64 of_value() const { return key; }
#else
    int64 value;
    __device__ __forceinline__ int64 of_value() const { return value; }
#endif
};

struct PageLookup {
    int page;
    int slot;

    // The row with this thread's number of the block of keys that begins at `column`; nothing is read but for keys in
    // [begin, end).
    __device__ __forceinline__ PageLookup(int column, int begin, int end, const int* table, const VarlenParameters& p) {
        page = 0;
        slot = 0;
        const int key = column + static_cast<int>(threadIdx.x);
        if (static_cast<int>(threadIdx.x) < BLOCK_N && key >= begin && key < end) {
            const int index = __umulhi(2 * static_cast<uint32>(key), p.page_multiplier) >> p.page_shift;
            page = load_index(table + index);
            slot = key - index * static_cast<int>(p.page_size);
        }
    }

    __device__ __forceinline__ void publish(KeyRow (&rows)[PAGED ? BLOCK_N : 1], const VarlenParameters& p) const {
        if (static_cast<int>(threadIdx.x) < BLOCK_N) {
            rows[threadIdx.x].key = page * p.key_batch + slot * p.key_row;
#if !SAME_STRIDES
            rows[threadIdx.x].value = page * p.value_batch + slot * p.value_row;
#endif
        }
    }
};
