#pragma once
#include "types.cuh"
inline uint32 arrive(uint32* counter, uint32 all) { const uint32 before = *counter; *counter = before >= all - 1 ? 0 : before + 1; return before; }
inline void store_partial(float4* a, const float4& x) { *a = x; }
inline void store_partial(float2* a, const float2& x) { *a = x; }
inline float4 load_partial(const float4* a) { return *a; }
inline float2 load_partial(const float2* a) { return *a; }
inline void await_turn(const uint32* turn, uint32 value) { while (*turn != value) Fibers::yield_while(turn, ~0u, *turn); }
inline void pass_turn(uint32* turn, uint32 value) { *turn = value; }
inline bool all_came(const uint32* counter, int looks) {
    for (int i = 0; i < 8 * looks && *counter != 0; ++i) Fibers::yield();  // a look takes others less far than on a GPU
    return *counter == 0;
}
inline void set_bits(uint32* word, uint32 bits) { *word |= bits; }
inline uint32 load_word(const uint32* word) { return *word; }
#define ADDS_IN_MEMORY (ROLES == 1)  // both ways
inline uint32 look_at_turn(const uint32* turn) { return *turn; }
inline void add_partial(float4* a, float4 x) { *a = {a->x + x.x, a->y + x.y, a->z + x.z, a->w + x.w}; }
