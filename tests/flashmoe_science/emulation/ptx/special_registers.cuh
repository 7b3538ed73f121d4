#pragma once
#include "types.cuh"
inline int thread_index() { return threadIdx.x; }
inline int block_index() { return blockIdx.x; }
inline int grid_size() { return gridDim.x; }
