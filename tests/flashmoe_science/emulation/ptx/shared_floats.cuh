#pragma once
#include "types.cuh"
inline float load_shared_float(uint32 a) { float x; memcpy(&x,block_->arena.data()+a,4); return x; }
inline void store_shared_float(uint32 a, float x) { memcpy(block_->arena.data()+a,&x,4); }
inline float2 load_shared_pair(uint32 a) { float2 x; memcpy(&x,block_->arena.data()+a,8); return x; }
inline void store_shared_pair(uint32 a, float x, float y) { memcpy(block_->arena.data()+a,&x,4); memcpy(block_->arena.data()+a+4,&y,4); }
inline void load_shared_quad(float (&x)[4], uint32 a) { memcpy(x,block_->arena.data()+a,16); }
inline void store_shared_quad(uint32 a, const float (&x)[4]) { memcpy(block_->arena.data()+a,x,16); }
