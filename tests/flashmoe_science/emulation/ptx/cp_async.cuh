// COPIES_LATE: 1 copies when the group is waited for, as late as the hardware may; 0 at once, as early as it may.
#pragma once
#include "types.cuh"
#include <deque>
struct Copy { uint32 shared; const char* global; bool valid; };
inline thread_local std::vector<Copy> open_copies; inline thread_local std::deque<std::vector<Copy>> copy_groups;
inline void perform(Copy c) { char* to = block_->arena.data()+c.shared; if (c.valid) memcpy(to,c.global,16); else memset(to,0,16); }
inline void copy_chunk(uint32 shared, const char* global, bool valid) {
  if (COPIES_LATE) open_copies.push_back({shared,global,valid}); else perform({shared,global,valid});
}
inline void copy_commit() { copy_groups.push_back(std::move(open_copies)); open_copies.clear(); }
template <int Pending> void copy_wait() {
  while (copy_groups.size() > Pending) { for (Copy c : copy_groups.front()) perform(c); copy_groups.pop_front(); }
}
