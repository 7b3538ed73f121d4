// The device side of the kernels, on the CPU: one fiber (fibers.h) per CUDA thread, barriers for what a warp does together.
#pragma once
#include "standard.h"
using uint16 = unsigned short; using uint32 = unsigned int; using uint64 = unsigned long long; using int64 = long long;
constexpr int kElementBytes = 2; constexpr int kChunkBytes = 16; constexpr int kChunkElements = kChunkBytes / kElementBytes;
template <bool Value> struct Flag { static constexpr bool value = Value; };
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after another
#define __cluster_dims__(...)
struct float2 { float x, y; }; struct uint2 { uint32 x, y; }; struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float a, float b, float c, float d) { return {a,b,c,d}; }
inline float2 make_float2(float a, float b) { return {a,b}; }
struct dim3 { unsigned x, y, z; };
#include "fibers.h"
struct Warp { Barrier bar{32}; uint32 slot[32][8]; float wide[32][12]; };
// A barrier of some warps. Like the hardware's, it counts arrivals and knows nothing of who they are.
struct NamedBarrier { int arrived = 0; unsigned phase = 0; void arrive(int expected, bool wait) { const unsigned mine = phase; if (++arrived == expected) arrived = 0, phase++; else if (wait) Fibers::yield_while(&phase, ~0u, mine); } };
struct Block { NamedBarrier named[16]; Barrier bar; std::vector<std::unique_ptr<Warp>> warps; std::vector<char> arena; Block(int w) : bar(32*w), arena(1<<18) { for (int i=0;i<w;i++) warps.push_back(std::make_unique<Warp>()); } };
struct Cluster { Barrier bar; std::vector<std::unique_ptr<Block>> blocks; Cluster(int c, int w) : bar(32*w*c) { for (int i=0;i<c;i++) blocks.push_back(std::make_unique<Block>(w)); } };
inline dim3 threadIdx, blockIdx, gridDim; inline Warp* warp_; inline Block* block_; inline Cluster* cluster_; inline int rank_; inline int lane_; inline size_t arena_used;
inline void __syncthreads() { block_->bar.arrive_and_wait(); }
inline void __syncwarp() { warp_->bar.arrive_and_wait(); }
template <class T> T* shared_alloc() { T* p = (T*)(block_->arena.data() + arena_used); arena_used += (sizeof(T)+15)/16*16; return p; }
inline float __int_as_float(int x) { float f; memcpy(&f,&x,4); return f; }
inline uint32 __float_as_uint(float x) { uint32 f; memcpy(&f,&x,4); return f; }
inline uint32 fbits(float x) { uint32 f; memcpy(&f,&x,4); return f; }
inline uint32 __umulhi(uint32 a, uint32 b) { return (uint64)a*b >> 32; }
inline int min(int a, int b) { return a<b?a:b; } inline int max(int a, int b) { return a>b?a:b; }
inline uint32 __byte_perm(uint32 a, uint32 b, uint32 s) { uint64 v = ((uint64)b<<32)|a; uint32 r=0; for (int i=0;i<4;i++) r |= ((v >> (8*((s>>(4*i))&7))) & 255) << (8*i); return r; }
template <class T> T __shfl_sync(unsigned, T x, int from) { memcpy(&warp_->slot[lane_][0],&x,sizeof x); __syncwarp(); T y; memcpy(&y,&warp_->slot[from][0],sizeof y); __syncwarp(); return y; }
template <class T> T __shfl_xor_sync(unsigned m, T x, int with) { return __shfl_sync(m, x, lane_ ^ with); }
template <class T> T __shfl_up_sync(unsigned m, T x, int by) { return __shfl_sync(m, x, lane_ < by ? lane_ : lane_ - by); }
inline bool __any_sync(unsigned, bool x) { warp_->slot[lane_][0]=x; __syncwarp(); bool y=false; for (int i=0;i<32;i++) y |= warp_->slot[i][0] != 0; __syncwarp(); return y; }
inline uint32 __ballot_sync(unsigned, bool x) { warp_->slot[lane_][0]=x; __syncwarp(); uint32 y=0; for (int i=0;i<32;i++) y |= warp_->slot[i][0] << i; __syncwarp(); return y; }
inline uint32 __match_any_sync(unsigned, uint32 x) { warp_->slot[lane_][0]=x; __syncwarp(); uint32 y=0; for (int i=0;i<32;i++) y |= (uint32)(warp_->slot[i][0]==x) << i; __syncwarp(); return y; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }
inline bool __all_sync(unsigned m, bool x) { return !__any_sync(m, !x); }
inline int atomicExch(int* p, int x) { return __atomic_exchange_n(p, x, __ATOMIC_RELAXED); }
inline int __popc(uint32 x) { return __builtin_popcount(x); }
inline int atomicAdd(int* p, int x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }
inline int __ffs(uint32 x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline uint32 shared_address(const void* p) { return (uint32)((const char*)p - block_->arena.data()); }
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define POSITIVE_INFINITY __int_as_float(0x7f800000)
inline uint16 enc(float f) {
#if ELEMENT_BF16
  uint32 u=fbits(f); if (f!=f) return 0x7fff; return (u + 0x7fff + ((u>>16)&1))>>16;
#else
  _Float16 h=(_Float16)f; uint16 u; memcpy(&u,&h,2); return u;
#endif
}
inline float dec(uint16 u) {
#if ELEMENT_BF16
  return __int_as_float((uint32)u<<16);
#else
  _Float16 h; memcpy(&h,&u,2); return h;
#endif
}
inline uint32 pack(float lo, float hi) { return enc(lo) | ((uint32)enc(hi)<<16); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline float reciprocal(float x) { return 1/x; }
inline float __fmul_rn(float a, float b) { return a*b; } inline float __fadd_rn(float a, float b) { return a+b; } inline float __fsub_rn(float a, float b) { return a-b; }
