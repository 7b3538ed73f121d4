#pragma once
#include "types.cuh"
// Each lane widens what it has once, and takes the rows and columns of its four sums together before it adds them up: most
// of what an emulation takes is here.
inline void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  float* own = warp_->wide[lane_]; const uint32 given[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i=0;i<6;i++) own[2*i] = dec(given[i] & 0xffff), own[2*i+1] = dec(given[i] >> 16);
  __syncwarp();
  const float (*rows)[12] = warp_->wide + lane_/4*4, (*columns)[12] = warp_->wide + lane_%4*8;
  float d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  for (int k=0;k<16;k++) {
    const int lane = k%8/2, at = k/8*4 + k%2, from = 8 + k/8*2 + k%2;
    const float upper = rows[lane][at], lower = rows[lane][at+2], left = columns[lane][from], right = columns[lane+4][from];
    d0 += upper*left, d1 += upper*right, d2 += lower*left, d3 += lower*right;
  }
  d[0] = d0, d[1] = d1, d[2] = d2, d[3] = d3;
  __syncwarp();
}
inline void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
  for (int i=0;i<4;i++) d[i]=c[i];
  mma(d,a,b0,b1);
}
