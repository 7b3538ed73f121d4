// Copies that complete a barrier, of TMA or of a thread. COPIES_LATE: 1 does some at once and others when no thread can go on without, these in any order,
// as a GPU may; 0 all at once. So a thread that takes an old round of a barrier for its own finds what was there before.
#pragma once
#include "types.cuh"
struct Late { Block* block; void (*copy)(const uint64*); uint64 with[9]; };
inline std::vector<Late> late_copies;
inline uint32 drawn = 1;
inline uint32 draw() { return drawn = drawn * 1664525 + 1013904223, drawn >> 16; }
inline bool copy_late() {
  if (late_copies.empty()) return false;
  const size_t at = draw() % late_copies.size(); const Late late = late_copies[at]; late_copies.erase(late_copies.begin() + at);
  Block* own = block_; block_ = late.block; late.copy(late.with); block_ = own;
  return true;
}
inline void copy_sooner_or_later(const Late& late) {
  if (!COPIES_LATE || draw() % 2) return late.copy(late.with);
  Fibers::beside = copy_late, late_copies.push_back(late);
}
// Of a thread, from shared memory to global. COPIES_LATE: 1 reads what is stored when the thread waits for that, others having gone on before, and
// writes it when it waits for all; a thread that does not is an error. Boxes alone: ptx/bulk.cuh does others at once. `write` gets what was read and `with`.
struct LateStore { Block* block; uint32 thread; uint32 from, size; void (*write)(const char*, const uint64*); uint64 with[9]; std::vector<char> bytes; };
inline std::vector<LateStore> late_stores;
inline void store_later(LateStore store) {
  Fibers::at_end = [] { if (!late_stores.empty()) abort(); };
  if (COPIES_LATE) late_stores.push_back(std::move(store)); else store.write(store.block->arena.data() + store.from, store.with);
}
inline bool is_own(const LateStore& store) { return store.block == block_ && store.thread == threadIdx.x; }
inline bool is_unread(const LateStore& store) { return is_own(store) && store.bytes.empty(); }
inline void read_stores() {
  for (int turn = 0; turn < 100 && std::any_of(late_stores.begin(), late_stores.end(), is_unread); turn++) {
    Fibers::yield();
    if (turn % 8 == 0) copy_late();
  }
  for (LateStore& store : late_stores) if (is_unread(store)) {
    const char* from = store.block->arena.data() + store.from; store.bytes.assign(from, from + store.size);
  }
}
inline void write_stores() {
  for (size_t i = 0; i < late_stores.size();) {
    if (!is_own(late_stores[i])) { i++; continue; }
    const LateStore store = std::move(late_stores[i]); late_stores.erase(late_stores.begin() + i); store.write(store.bytes.data(), store.with);
  }
}
