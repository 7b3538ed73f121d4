#pragma once
#include "types.cuh"
inline float load_element(const uint16* p) { return dec(*p); }
