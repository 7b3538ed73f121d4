#pragma once
#include "types.cuh"
struct Chunk { uint32 x,y,z,w; };
inline Chunk load_global(const char* p) { Chunk c; memcpy(&c,p,16); return c; }
inline void store_global(char* p, uint32 a, uint32 b) { memcpy(p,&a,4); memcpy(p+4,&b,4); }
inline void store_global(char* p, Chunk c) { memcpy(p,&c,16); }
inline void store_global(char* p, uint32 a) { memcpy(p,&a,4); }
inline Chunk load_once(const char* p) { return load_global(p); }
inline float2 load_pair(const float* p) { return {p[0], p[1]}; }
inline void store_pair(float* p, float2 x) { p[0] = x.x, p[1] = x.y; }
struct HalfChunk { uint32 x,y; };
inline HalfChunk load_global_half(const char* p) { HalfChunk c; memcpy(&c,p,8); return c; }
inline Chunk load_past_l1(const char* p) { return load_global(p); }
inline void prefetch_l2(const void*) {}
inline int load_index(const int* p) { return *p; }
