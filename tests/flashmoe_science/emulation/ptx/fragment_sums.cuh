#pragma once
#include "types.cuh"
inline void store_fragment(float* s, int lane, const float (&x)[4]) { memcpy(s + 4 * lane, x, 16); }
inline void add_to_fragment(float* s, int lane, const float (&x)[4]) { for (int i = 0; i < 4; i++) s[4 * lane + i] += x[i]; }
inline void load_fragment(float (&x)[4], const float* s, int lane) { memcpy(x, s + 4 * lane, 16); }
