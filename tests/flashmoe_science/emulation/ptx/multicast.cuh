// Boxes into both blocks of a cluster.
#pragma once
#include "ptx/cluster_barrier.cuh"
#include "ptx/tma.cuh"
namespace ptx {
template <class... At> void tma_load_to_both(const TensorMap& map, uint32 to, uint32 barrier, At... at) { for (int rank=0; rank<2; rank++) as_block(rank, [&] { tma_load(map, to, barrier, at...); }); }
}
