#pragma once
#include "ptx/arrival.cuh"
#define ADDS_IN_MEMORY (ROLES == 1)  // both ways
inline uint32 look_at_turn(const uint32* turn) { return *turn; }
inline void add_partial(float4* a, float4 x) { *a = {a->x + x.x, a->y + x.y, a->z + x.z, a->w + x.w}; }
