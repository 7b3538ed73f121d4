#pragma once
#include "types.cuh"
inline float load_element(const uint16* p) { return dec(*p); }
inline void store_element(char* p, float x) { uint16 u = enc(x); memcpy(p,&u,2); }
inline float2 unpack(uint32 x) { return {dec(x & 0xffff), dec(x >> 16)}; }
