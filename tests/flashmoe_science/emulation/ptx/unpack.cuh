#pragma once
#include "types.cuh"
inline float2 unpack(uint32 x) { return {dec(x & 0xffff), dec(x >> 16)}; }
