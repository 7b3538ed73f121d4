#pragma once
#include "types.cuh"
inline void wait_for_predecessor() {} inline void allow_successor() {}
