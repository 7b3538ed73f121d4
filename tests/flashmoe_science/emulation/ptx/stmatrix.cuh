#pragma once
#include "types.cuh"
inline void store_matrices_transposed(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  warp_->slot[lane_][0]=address; __syncwarp();
  const uint32 m[] = {a,b,c,d};
  for (int i=0;i<4;i++) for (int h=0;h<2;h++) { uint16 e = m[i] >> (16*h); memcpy(block_->arena.data()+warp_->slot[8*i+2*(lane_%4)+h][0]+2*(lane_/4), &e, 2); }
  __syncwarp();
}
inline void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  warp_->slot[lane_][0]=address; __syncwarp();
  const uint32 m[] = {a,b,c,d};
  for (int i=0;i<4;i++) memcpy(block_->arena.data()+warp_->slot[8*i+lane_/4][0]+4*(lane_%4), &m[i], 4);
  __syncwarp();
}
