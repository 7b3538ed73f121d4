// Each thread its own accumulators, as soon as the product is issued. Descriptors with the swizzle of 128 bytes or of 32.
#pragma once
#include "types.cuh"
namespace ptx {
inline void wgmma_fence() {} inline void wgmma_commit() {}
template <int PENDING> void wgmma_wait() {}
template <int COUNT> void pin(float (&)[COUNT]) {}
template <int COUNT> void forget(float (&)[COUNT]) {}
// Elements (i, 0) to (i, 15) of an operand, i along M or N.
inline void wgmma_operand(float (&row)[16], uint64 d, bool across, int i) {
  const uint32 start = (d & 0x3fff) << 4, leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
  const bool narrow = d >> 62 == 3; const uint32 bytes = narrow ? 32 : 128, columns = bytes / 2, permuted = bytes - 16;
  const uint32 first = across ? start + i/columns*leading + i%columns*2 : start + i/8*stride + i%8*bytes;
  const uint32 step = across ? bytes : 2, half = across ? stride : 16; const char* arena = block_->arena.data();
  for (int h=0;h<2;h++) { uint32 a = first + h*half; for (int k=8*h;k<8*h+8;k++, a+=step) { uint16 x; memcpy(&x, arena + (a ^ (a >> 3 & permuted)), 2); row[k] = dec(x); } }
}
template <int N> struct Wgmma {
  template <int A_ACROSS = 0, int B_ACROSS = A_ACROSS> static void ss(float (&d)[N/2], uint64 a, uint64 b, int accumulate) {
    const int row = threadIdx.x/32%4*16 + lane_/4;
    float left[2][16], right[16]; for (int h=0;h<2;h++) wgmma_operand(left[h], a, A_ACROSS, row+8*h);
    for (int i=0;i<N/8;i++) for (int j=0;j<2;j++) {
      wgmma_operand(right, b, B_ACROSS, 8*i+2*(lane_%4)+j);
      float sum[2] = {};
      for (int k=0;k<16;k++) sum[0] += left[0][k]*right[k], sum[1] += left[1][k]*right[k];
      for (int h=0;h<2;h++) d[4*i+2*h+j] = (accumulate ? d[4*i+2*h+j] : 0) + sum[h];
    }
  }
  // The other lanes of a quad have the rest of this one's rows.
  template <int B_ACROSS = 1> static void rs(float (&d)[N/2], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b, int accumulate) {
    uint32* own = warp_->slot[lane_]; own[0] = a0, own[1] = a1, own[2] = a2, own[3] = a3; __syncwarp();
    float left[2][16], right[16];
    for (int h=0;h<2;h++) for (int k=0;k<16;k++) { const uint32 x = warp_->slot[lane_/4*4 + k%8/2][h + k/8*2]; left[h][k] = dec(k%2 ? x>>16 : x&0xffff); }
    __syncwarp();
    for (int i=0;i<N/8;i++) for (int j=0;j<2;j++) {
      wgmma_operand(right, b, B_ACROSS, 8*i+2*(lane_%4)+j);
      float sum[2] = {};
      for (int k=0;k<16;k++) sum[0] += left[0][k]*right[k], sum[1] += left[1][k]*right[k];
      for (int h=0;h<2;h++) d[4*i+2*h+j] = (accumulate ? d[4*i+2*h+j] : 0) + sum[h];
    }
  }
};
}
