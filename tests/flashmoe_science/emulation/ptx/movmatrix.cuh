#pragma once
#include "types.cuh"
inline uint32 transpose_matrix(uint32 x) { warp_->slot[lane_][0]=x; __syncwarp(); uint32 y=0;
  for (int h=0;h<2;h++) { int row=2*(lane_%4)+h, col=lane_/4; uint32 w=warp_->slot[row*4+col/2][0]; y |= ((col%2? w>>16 : w&0xffff)) << (16*h); }
  __syncwarp(); return y; }
