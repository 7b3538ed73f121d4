// Blocks of a cluster: what one does to another is done as that one. An address in another block has its rank in the top byte.
#pragma once
#include "ptx/mbarrier.cuh"
namespace ptx {
inline uint32 cluster_rank() { return rank_; }
inline uint32 in_block(uint32 address, uint32 rank) { return rank << 24 | address; }
template <class Do> void as_block(uint32 rank, Do act) { Block* own = block_; block_ = cluster_->blocks[rank].get(); act(); block_ = own; }
inline void mbarrier_arrive_at(uint32 barrier) { as_block(barrier >> 24, [&] { mbarrier_arrive(barrier & 0xffffff); }); }
inline void post(uint32 address, uint32 barrier, int value) { as_block(address >> 24, [&] { memcpy(block_->arena.data() + (address & 0xffffff), &value, 4); mbarrier_complete(barrier & 0xffffff, 4); }); }
inline void cluster_sync() { cluster_->bar.arrive_and_wait(); }
template <class T> void post_vector(uint32 address, uint32 barrier, const T& x) { as_block(address >> 24, [&] { memcpy(block_->arena.data() + (address & 0xffffff), &x, sizeof x); mbarrier_complete(barrier & 0xffffff, sizeof x); }); }
inline void post(uint32 address, uint32 barrier, const float4& x) { post_vector(address, barrier, x); }
inline void post(uint32 address, uint32 barrier, const float2& x) { post_vector(address, barrier, x); }
inline void mbarrier_wait_for_posts(uint32 barrier, uint32 parity) { mbarrier_wait(barrier, parity); }
}
