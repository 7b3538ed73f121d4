#pragma once
#include "types.cuh"
inline void load_matrices(uint32 (&m)[4], uint32 address) {
  warp_->slot[lane_][0]=address; __syncwarp();
  for (int i=0;i<4;i++) memcpy(&m[i], block_->arena.data()+warp_->slot[8*i+lane_/4][0]+4*(lane_%4), 4);
  __syncwarp();
}
inline void load_matrices_transposed(uint32 (&m)[4], uint32 address) {
  warp_->slot[lane_][0]=address; __syncwarp();
  for (int i=0;i<4;i++) { uint32 x=0; for (int h=0;h<2;h++) { uint16 e; memcpy(&e, block_->arena.data()+warp_->slot[8*i+2*(lane_%4)+h][0]+2*(lane_/4), 2); x |= (uint32)e << (16*h); } m[i]=x; }
  __syncwarp();
}
