// @NAME@: exact attention on a CPU, a row at a time with an online softmax, as a starting point.
#include <math.h>

#include "cudadent42/attention.h"
#include "cudadent42/element.h"

static const int MAX_HEAD_DIM = 512;

// output row = softmax(scale * query row . keys) . values over the first `keys` keys. The largest score so far is taken off
// each score before exp, and what is summed already is scaled down when a larger one comes.
static void attend(const cudadent42_element *query, const cudadent42_element *key, const cudadent42_element *value,
                   cudadent42_element *output, const Cudadent42Attention *problem, long long keys) {
    const int head_dim = (int)problem->head_dim;
    const double scale = problem->softmax_scale;
    float row[MAX_HEAD_DIM];
    double sum[MAX_HEAD_DIM];
    for (int d = 0; d < head_dim; d++) {
        row[d] = cudadent42_load(query + d);
        sum[d] = 0;
    }
    double largest = -INFINITY, weights = 0;
    for (long long j = 0; j < keys; j++) {
        double score = 0;
        for (int d = 0; d < head_dim; d++) score += (double)row[d] * cudadent42_load(key + j * problem->key_stride[2] + d);
        score *= scale;
        if (score == -INFINITY) continue;  // no weight, and minus infinity less itself is not a number
        if (score > largest) {
            const double shrink = exp(largest - score);
            for (int d = 0; d < head_dim; d++) sum[d] *= shrink;
            weights *= shrink;
            largest = score;
        }
        const double weight = exp(score - largest);
        weights += weight;
        for (int d = 0; d < head_dim; d++) sum[d] += weight * cudadent42_load(value + j * problem->value_stride[2] + d);
    }
    for (int d = 0; d < head_dim; d++) cudadent42_store(output + d, keys > 0 ? (float)(sum[d] / weights) : 0.0f);
}

CUDADENT42_EXPORT int @FUNCTION@(const Cudadent42Attention *problem) {
    if (problem->head_dim > MAX_HEAD_DIM) return CUDADENT42_UNSUPPORTED;
    const cudadent42_element *query = (const cudadent42_element *)problem->query;
    const cudadent42_element *key = (const cudadent42_element *)problem->key;
    const cudadent42_element *value = (const cudadent42_element *)problem->value;
    cudadent42_element *output = (cudadent42_element *)problem->output;
    const long long group = problem->num_heads / problem->num_kv_heads;
    for (long long b = 0; b < problem->batch; b++) {
        for (long long h = 0; h < problem->num_heads; h++) {
            const long long key_head = b * problem->key_stride[0] + h / group * problem->key_stride[1];
            const long long value_head = b * problem->value_stride[0] + h / group * problem->value_stride[1];
            for (long long i = 0; i < problem->seqlen_q; i++) {
                long long keys = problem->seqlen_k;
                if (problem->causal) {
                    keys += i + 1 - problem->seqlen_q;
                    if (keys < 0) keys = 0;
                }
                attend(query + b * problem->query_stride[0] + h * problem->query_stride[1] + i * problem->query_stride[2],
                       key + key_head, value + value_head,
                       output + b * problem->output_stride[0] + h * problem->output_stride[1] +
                           i * problem->output_stride[2],
                       problem, keys);
            }
        }
    }
    return CUDADENT42_DONE;
}
