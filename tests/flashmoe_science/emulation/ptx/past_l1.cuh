#pragma once
#include "ptx/global.cuh"
inline Chunk load_past_l1(const char* p) { return load_global(p); }
