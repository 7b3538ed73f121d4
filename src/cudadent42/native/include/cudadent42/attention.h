/* The problem that the lab hands to an attention kernel: C, C++ and CUDA alike, no other header needed.
 *
 * output[b, h, i, :] = sum over keys j that row i sees of softmax_j(softmax_scale * query[b, h, i, :] . key[b, g, j, :])
 *                      * value[b, g, j, :],   with g = h / (num_heads / num_kv_heads).
 *
 * A row sees every key or, where `causal` is set, keys j <= i + seqlen_k - seqlen_q. A row that sees none is zeros.
 * The entry point of a .cpp is   CUDADENT42_EXPORT int name(const Cudadent42Attention *problem)
 *             and that of a .cu  CUDADENT42_KERNEL name(const __grid_constant__ Cudadent42Attention problem).
 */
#ifndef CUDADENT42_ATTENTION_H
#define CUDADENT42_ATTENTION_H

/* Of this struct. It grows when fields are added or change their meaning; the TOML file's `abi` must be equal. */
#define CUDADENT42_ABI_VERSION 1

/* Element types, the values of `element` and of the macro CUDADENT42_ELEMENT. */
#define CUDADENT42_FP32 0
#define CUDADENT42_BF16 1
#define CUDADENT42_FP16 2

/* What the entry point of a .cpp returns. Any other value counts as a failure. */
#define CUDADENT42_DONE 0
#define CUDADENT42_UNSUPPORTED 1 /* this case is not done: it is skipped, not wrong */

#ifdef __cplusplus
#define CUDADENT42_EXTERN_C extern "C"
#else
#define CUDADENT42_EXTERN_C
#endif
#ifdef __CUDACC__
#define CUDADENT42_KERNEL CUDADENT42_EXTERN_C __global__ void
#else
#define CUDADENT42_EXPORT CUDADENT42_EXTERN_C __attribute__((visibility("default")))
#endif

typedef struct Cudadent42Attention {
    const void *query; /* (batch, num_heads, seqlen_q, head_dim) */
    const void *key;   /* (batch, num_kv_heads, seqlen_k, head_dim) */
    const void *value; /* as key */
    void *output;      /* as query; not initialised */
    long long batch;
    long long num_heads;
    long long num_kv_heads; /* divides num_heads */
    long long seqlen_q;
    long long seqlen_k;
    long long head_dim;
    long long query_stride[3]; /* from one batch, head, row to the next, in elements; the head dim is contiguous */
    long long key_stride[3];
    long long value_stride[3];
    long long output_stride[3];
    double softmax_scale; /* may be negative or zero */
    int causal;
    int element;  /* CUDADENT42_FP32, _BF16 or _FP16 */
    int threads;  /* of a .cpp: how many it may use; 0 on a GPU */
    int reserved; /* 0 */
} Cudadent42Attention;

#ifdef __cplusplus
static_assert(sizeof(Cudadent42Attention) == 200, "the lab writes this struct field by field");
#endif

#endif
