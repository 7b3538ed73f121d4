#pragma once
#include "ptx/cluster_barrier.cuh"
namespace ptx {
template <class T> void post_vector(uint32 address, uint32 barrier, const T& x) { as_block(address >> 24, [&] { memcpy(block_->arena.data() + (address & 0xffffff), &x, sizeof x); mbarrier_complete(barrier & 0xffffff, sizeof x); }); }
inline void post(uint32 address, uint32 barrier, const float4& x) { post_vector(address, barrier, x); }
inline void post(uint32 address, uint32 barrier, const float2& x) { post_vector(address, barrier, x); }
inline void mbarrier_wait_for_posts(uint32 barrier, uint32 parity) { mbarrier_wait(barrier, parity); }
}
