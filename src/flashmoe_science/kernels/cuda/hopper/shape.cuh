// How many rows and threads a block of the Hopper attention kernels has.
//
// Macros: HEAD_DIM, CONSUMERS; VALUE_DIM where values have another dimension.
#pragma once

#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif

namespace hopper {

constexpr int WARPGROUP = 128;
constexpr int ROWS = 64;  // of the query, per consumer warpgroup: wgmma's M
constexpr int BLOCK_M = ROWS * CONSUMERS;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);

static_assert(CONSUMERS >= 1 && CONSUMERS <= 3, "one to three consumer warpgroups");

}  // namespace hopper
