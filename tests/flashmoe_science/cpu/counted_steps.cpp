// How many basic blocks ran in code that was compiled with -fsanitize-coverage=trace-pc.
#include <stdint.h>

extern "C" {
__attribute__((visibility("default"))) int64_t steps = 0;
void __sanitizer_cov_trace_pc() { ++steps; }
}
