#pragma once
#include "types.cuh"
inline int load_index(const int* p) { return *p; }
