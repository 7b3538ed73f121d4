// Attention forward over sequences of any lengths for Hopper (sm_90a): the main loop of attention_hopper.cu, with tiles that are
// found on the device. Keys lie packed or in pages; TMA reads both, but for pages that no box fits.
//
// Differences from the dense kernel: a scheduler that counts the tiles of all sequences (hopper_varlen/scheduler.cuh), the heads of
// a group in one tile where their number is a power of two, zeros made of what TMA reads behind a sequence's end, rows written
// one by one, windows, caps and sinks.
//
// Compile-time configuration: HEAD_DIM, VALUE_DIM (at most HEAD_DIM), ELEMENT_BF16, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES,
// PING_PONG, SECTION_MIB (of keys and values that are worked on together; 0: all), CAUSAL (a row sees window_right keys after its
// position), LEFT_WINDOW (and window_left before it), SOFTCAP, PAGED, PAGE_ROWS (rows of a box, which lies in one page; 1: no box, rows are copied), CHUNK (with
// CAUSAL and LEFT_WINDOW: a row sees the keys of its own chunk alone; may be left out), TREE (without LEFT_WINDOW: a row has a bit for
// each of the keys of its sequence's own queries; may be left out), ONLY (2: sequences of one token are another launch's; may be left out).
#if ELEMENT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#include "hopper_varlen/block.cuh"

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper_varlen(const __grid_constant__ hopper::Parameters parameters) {
    extern __shared__ unsigned char raw[];
    hopper::go_through_tiles(parameters, raw, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}
