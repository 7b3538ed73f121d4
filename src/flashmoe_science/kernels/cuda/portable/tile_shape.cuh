// What follows from the tile of a kernel that multiplies with mma.sync. Macros: HEAD_DIM and VALUE_DIM (HEAD_DIM unless
// given), BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS, QUERY_STEPS: see attention_portable.cu.
#pragma once
#include "launch_bounds.cuh"
#include "swizzle.cuh"
#include "types.cuh"

#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif

constexpr int kThreads = WARPS * 32;
constexpr int kRowTiles = BLOCK_M / (16 * WARPS);
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kValueSteps = VALUE_DIM / 16;
constexpr int kOutTiles = VALUE_DIM / 8;
constexpr int kKeyTiles = BLOCK_N / 8;
constexpr int kKeyGroups = BLOCK_N / 16;
constexpr int kStages = 2;  // of keys, and of values

using T = Tile<HEAD_DIM>;   // query and keys
using V = Tile<VALUE_DIM>;  // values and output
constexpr int kQueryBytes = BLOCK_M * T::kRowBytes;
constexpr int kKeyBytes = BLOCK_N * T::kRowBytes;
constexpr int kValueBytes = BLOCK_N * V::kRowBytes;

static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_M == kWarpRows * WARPS, "tiles of 16");
static_assert(VALUE_DIM <= HEAD_DIM, "the output passes through the query's part of shared memory");
static_assert(MMA_K == 16 || !ELEMENT_BF16, "bfloat16 needs m16n8k16");
