#pragma once
#include "ptx/global.cuh"
inline Chunk load_shared(uint32 a) { Chunk c; memcpy(&c,block_->arena.data()+a,16); return c; }
inline void store_shared(uint32 a, const Chunk& c) { memcpy(block_->arena.data()+a,&c,16); }
inline void store_shared(uint32 a, uint32 x) { memcpy(block_->arena.data()+a,&x,4); }
