// What few_products.h asks for, key by key.
#include "few_products.h"

// asked[key - first]: which key is asked for when that one is read, of a part [first, end). Returns the keys of a window.
extern "C" __attribute__((visibility("default"))) int asked_keys(
    int64_t first, int64_t end, int heads, int64_t row_bytes, int64_t head_row, int64_t* asked) {
    FewRows rows;
    rows.heads = heads;
    rows.head_row = head_row;
    for (int64_t begin = first; begin < end; begin += rows.keys) {
        divide_into_windows(rows, row_bytes, begin, smaller((begin / BLOCK_KEYS + 1) * BLOCK_KEYS, end));
        for (int i = 0; i < rows.keys + rows.ahead(); ++i) rows.offset[i] = smaller(begin + i, end - 1);
        choose_asked(rows);
        for (int i = 0; i < rows.keys; ++i) *asked++ = rows.asked[i];
    }
    return rows.window;
}
