#pragma once
#include "types.cuh"
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
