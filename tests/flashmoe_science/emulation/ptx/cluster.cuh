#pragma once
#include "types.cuh"
namespace cluster {
inline unsigned tokens[16][1024];  // of each thread of each block
inline uint32 rank() { return rank_; }
inline void open_mailbox(uint64* m, uint32 bytes) { *m = bytes; }
inline void announce() { tokens[rank_][threadIdx.x] = cluster_->bar.arrive(); }
inline void wait_for_peers() { cluster_->bar.wait(tokens[rank_][threadIdx.x]); }
inline uint32 peer_address(const void* local, uint32 r) { return (r<<24) | (uint32)((char*)local - block_->arena.data()); }
inline char* at(uint32 a) { return cluster_->blocks[a>>24]->arena.data() + (a & 0xffffff); }
inline void post(uint32 a, uint32 m, float4 x) { memcpy(at(a),&x,16); *(uint64*)at(m) -= 16; }
inline void post(uint32 a, uint32 m, float2 x) { memcpy(at(a),&x,8);  *(uint64*)at(m) -= 8; }
inline void wait_for_mail(uint64* m) { while (*(volatile uint64*)m != 0) Fibers::yield(); }
}
