#pragma once
#include "types.cuh"
inline void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  uint32* s = warp_->slot[lane_]; for (int i=0;i<4;i++) s[i]=a[i]; s[4]=b0; s[5]=b1; __syncwarp();
  auto A=[&](int r,int k){ uint32 x=warp_->slot[(r%8)*4+(k%8)/2][(r/8)+2*(k/8)]; return dec(k%2? x>>16 : x&0xffff); };
  auto B=[&](int k,int n){ uint32 x=warp_->slot[n*4+(k%8)/2][4+k/8]; return dec(k%2? x>>16 : x&0xffff); };
  for (int e=0;e<4;e++) { int r=lane_/4+8*(e/2), n=2*(lane_%4)+e%2; for (int k=0;k<16;k++) d[e]+=A(r,k)*B(k,n); }
  __syncwarp();
}
inline void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
  for (int i=0;i<4;i++) d[i]=c[i];
  mma(d,a,b0,b1);
}
