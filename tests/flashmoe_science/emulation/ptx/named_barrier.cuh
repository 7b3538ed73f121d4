#pragma once
#include "types.cuh"
namespace ptx {
inline void barrier_sync(int id, int threads) { block_->named[id].arrive(threads, true); }
inline void barrier_arrive(int id, int threads) { block_->named[id].arrive(threads, false); }
}
