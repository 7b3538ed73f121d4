// COPIES_LATE: 1 copies when the group is waited for, as late as the hardware may; 0 at once, as early as it may.
#pragma once
#include "types.cuh"
struct Copy { uint32 shared; const char* global; bool valid; };
struct Copies { std::vector<Copy> open; std::vector<std::vector<Copy>> groups; };
inline std::vector<Copies> all_copies(16 * 1024);  // of the blocks of a cluster
inline Copies& copies() { return all_copies[rank_*1024+threadIdx.x]; }
inline void perform(Copy c) { char* to = block_->arena.data()+c.shared; if (c.valid) memcpy(to,c.global,16); else memset(to,0,16); }
inline void copy_chunk(uint32 shared, const char* global, bool valid) {
  if (COPIES_LATE) copies().open.push_back({shared,global,valid}); else perform({shared,global,valid});
}
inline void copy_commit() { copies().groups.push_back(std::move(copies().open)); copies().open.clear(); }
template <int Pending> void copy_wait() {
  auto& groups = copies().groups;
  while (groups.size() > Pending) { for (Copy c : groups.front()) perform(c); groups.erase(groups.begin()); }
}
inline uint64 evict_first_policy() { return 0; }
inline void copy_chunk(uint32 shared, const char* global, bool valid, uint64) { copy_chunk(shared, global, valid); }
