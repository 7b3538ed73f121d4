#pragma once
#include "types.cuh"
namespace cluster {
inline thread_local std::barrier<>::arrival_token* token;
inline uint32 rank() { return rank_; }
inline void open_mailbox(uint64* m, uint32 bytes) { *m = bytes; }
inline void announce() { token = new std::barrier<>::arrival_token(cluster_->bar.arrive()); }
inline void wait_for_peers() { cluster_->bar.wait(std::move(*token)); delete token; }
inline uint32 peer_address(const void* local, uint32 r) { return (r<<24) | (uint32)((char*)local - block_->arena.data()); }
inline char* at(uint32 a) { return cluster_->blocks[a>>24]->arena.data() + (a & 0xffffff); }
inline void post(uint32 a, uint32 m, float4 x) { memcpy(at(a),&x,16); std::atomic_ref<uint64>(*(uint64*)at(m)) -= 16; }
inline void post(uint32 a, uint32 m, float2 x) { memcpy(at(a),&x,8);  std::atomic_ref<uint64>(*(uint64*)at(m)) -= 8; }
inline void wait_for_mail(uint64* m) { while (std::atomic_ref<uint64>(*m).load() != 0) std::this_thread::yield(); }
}
