// Arrivals, bytes and the phase of a barrier in eight bytes of shared memory.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/late.cuh"
namespace ptx {
struct Mbarrier { uint16 expected, pending; int bytes_and_phase; };
inline Mbarrier& mbarrier_at(uint32 a) { return *(Mbarrier*)(block_->arena.data()+a); }
inline void mbarrier_settle(Mbarrier& b) { if (b.pending == 0 && b.bytes_and_phase >> 1 == 0) { b.bytes_and_phase ^= 1; b.pending = b.expected; } }
inline void mbarrier_complete(uint32 a, int bytes) { Mbarrier& b = mbarrier_at(a); b.bytes_and_phase -= 2*bytes; mbarrier_settle(b); }
inline void mbarrier_init(uint32 a, uint32 arrivals) { mbarrier_at(a) = {(uint16)arrivals,(uint16)arrivals,0}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32 a) { Mbarrier& b = mbarrier_at(a); if (b.pending == 0) abort(); b.pending--; mbarrier_settle(b); }
inline void mbarrier_expect_bytes(uint32 a, uint32 bytes) { mbarrier_at(a).bytes_and_phase += 2*bytes; mbarrier_arrive(a); }
// `with`: copies, which it deletes, and the barrier.
inline void copy_and_arrive(const uint64* with) {
  auto* const open = (std::vector<Copy>*)with[0]; for (Copy c : *open) perform(c);
  delete open; mbarrier_arrive(with[1]);
}
inline void mbarrier_arrive_after_copies(uint32 a) {
  auto* const open = new std::vector<Copy>(std::move(copies().open)); copies().open.clear();
  copy_sooner_or_later({block_, copy_and_arrive, {(uint64)open, a}});
}
inline void mbarrier_wait(uint32 a, uint32 parity) { Fibers::yield_while((const unsigned*)&mbarrier_at(a).bytes_and_phase, 1, parity); }
}
