// Bulk copies. COPIES_LATE: 1 takes its time where a thread waits until they are complete; 0 does them at once. Loads: ptx/late.cuh.
#pragma once
#include "ptx/late.cuh"
#include "ptx/mbarrier.cuh"
namespace ptx {
inline void fence_async_shared() {} inline void fence_async_global() {}
inline void copy_bytes(const uint64* with) { memcpy(block_->arena.data()+with[0],(const void*)with[1],with[2]); mbarrier_complete(with[3], with[2]); }
inline void bulk_load(uint32 to, const void* from, uint32 bytes, uint32 barrier) { if ((to | (uint64)from | bytes) % 16) abort(); copy_sooner_or_later({block_, copy_bytes, {to, (uint64)from, bytes, barrier}}); }
inline void bulk_store(void* to, uint32 from, uint32 bytes) { if (((uint64)to | from | bytes) % 16) abort(); memcpy(to,block_->arena.data()+from,bytes); }
inline void bulk_add(void* to, uint32 from, uint32 bytes) { if (((uint64)to | from | bytes) % 16) abort(); for (uint32 i=0;i<bytes/4;i++) ((float*)to)[i] += ((const float*)(block_->arena.data()+from))[i]; }
inline void bulk_commit() {} inline void bulk_wait_read() { read_stores(); }
inline void bulk_wait() { read_stores(); write_stores(); if (COPIES_LATE) for (int turn = 0; turn < 1000; turn++) Fibers::yield(); }
}
