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
inline uint32 transpose_matrix(uint32 x) { warp_->slot[lane_][0]=x; __syncwarp(); uint32 y=0;
  for (int h=0;h<2;h++) { int row=2*(lane_%4)+h, col=lane_/4; uint32 w=warp_->slot[row*4+col/2][0]; y |= ((col%2? w>>16 : w&0xffff)) << (16*h); }
  __syncwarp(); return y; }
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
