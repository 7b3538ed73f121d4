// Exact attention over sequences of any lengths, packed or in pages of a cache, with windows, caps, slopes and sinks.
//
// As attention_forward.cpp: queries in vector lanes, tiles of rows against blocks of 64 keys, an online softmax. What differs:
// a task's sequence has lengths of its own, a row has a first and a last key, and a block's keys may lie in several pages.
// A block that does is copied together first; one in a single page is read where it lies.
//
// Few rows against many keys are cut into parts of the keys, each a task, and whoever finishes the last part of a row space adds them in
// order. With split_keys, many rows add the same parts in the same order, in one task.

#include "parallel.h"
#include "python_call.h"
#include "scratch.h"
#include "varlen_few.h"
#include "varlen_tasks.h"
#include "varlen_tile.h"

namespace {

// Where a key's row or its value's is, in bytes from the first one's.
int64_t row_of(const VarlenProblem& p, const Sequence& sequence, const int64_t stride[3], int64_t key) {
    if (!sequence.pages) return (sequence.first_key + key) * stride[1];
    return sequence.pages[key / p.page_size] * stride[0] + key % p.page_size * stride[1];
}

// Rows of keys or values [first, first + count) of a sequence, to where they lie at one stride; those outside of `visible`, which
// nobody sees, as zeros.
void gather(
    const VarlenProblem& p, const Sequence& sequence, const char* base, const int64_t stride[3], int64_t first, int count,
    Span visible, size_t row_bytes, char* to) {
    for (int64_t key = first; key < first + count; ++key, to += row_bytes)
        if (key < visible.first || key >= visible.last)
            memset(to, 0, row_bytes);
        else
            memcpy(to, base + row_of(p, sequence, stride, key), row_bytes);
}

// Keys [first, last) of a sequence for one key/value head, as they lie in memory; `value_row` is what raw_value has. Nothing
// is read outside of `visible`.
template <class T>
KeyBlock locate(
    const VarlenJob& job, const VarlenWorkspace& w, const Sequence& sequence, int64_t kv_head, int64_t first, int64_t last,
    Span visible) {
    const VarlenProblem& p = *job.problem;
    const char* const key = job.call->key + kv_head * p.key_stride[2];
    const char* const value = job.call->value + kv_head * p.value_stride[2];
    KeyBlock block;
    block.first = first;
    block.count = (int)(last - first);
    if (first >= visible.first && last <= visible.last &&
        (!sequence.pages || first / p.page_size == (last - 1) / p.page_size)) {
        block.key = key + row_of(p, sequence, p.key_stride, first);
        block.value = value + row_of(p, sequence, p.value_stride, first);
        block.key_row = p.key_stride[1];
        block.value_row = p.value_stride[1];
    } else {
        block.key_row = p.head_dim * sizeof(T);
        block.value_row = p.value_dim * sizeof(T);
        gather(p, sequence, key, p.key_stride, first, block.count, visible, block.key_row, w.gathered_key);
        gather(p, sequence, value, p.value_stride, first, block.count, visible, block.value_row, w.gathered_value);
        block.key = w.gathered_key;
        block.value = w.gathered_value;
    }
    block.raw_value = block.value;
    return block;
}

struct ThreadWorkspace : VarlenWorkspace {
    FewWorkspace few;
};

int tile_width(int64_t rows) { return (int)smaller<int64_t>(TILE_QUERIES, up_to_multiple(rows, W)); }

// The sums of a part of the task, tile by tile, in what all parts share.
Sums part_sums(const VarlenJob& job, const Task& task, int64_t part, int tile, int ld) {
    const int64_t value_dim = job.problem->value_dim;
    const int64_t rows = task.last_row - task.first_row;
    const int64_t floats = up_to_multiple(rows, TILE_QUERIES) * (value_dim + 2);
    float* const at = job.part_sums + task.sums + part * floats + tile * ld * (value_dim + 2);
    return {at, at + value_dim * ld, at + (value_dim + 1) * ld};
}

// The task's tiles against keys [first_key, last_key), which no part's cut divides.
template <class Path>
void run_part(
    const VarlenJob& job, const VarlenWorkspace& w, const Task& task, const Sequence& sequence, int tiles, Span keys, int ld) {
    const VarlenProblem& p = *job.problem;
    const int64_t kv_head = task.head / (p.heads / p.kv_heads);
    // Dot products are summed in short runs where rounding shows, as attention_forward does; and in runs that do not depend on
    // lengths where bits may not.
    const bool exact = sequence.rows <= FEW_ROWS || sequence.keys < FEW_KEYS || p.split_keys > 0;
    // All blocks, so that bits do not depend on where a tile's keys begin.
    const bool on_amx = takes_amx<Path>(p.head_dim | p.value_dim);
    // Pairs of keys are multiplied at once, always the same two; so are 32 on the matrix unit.
    const int step = on_amx ? AMX_STEP : Path::PAIRS ? 2 : 1;
    for (int64_t first = keys.first / step * step; first < keys.last;) {
        const int64_t last = smaller((first / BLOCK_KEYS + 1) * BLOCK_KEYS, keys.last);
        const int64_t end = on_amx ? (last + AMX_STEP - 1) / AMX_STEP * AMX_STEP : last;
        KeyBlock block = locate<typename Path::Element>(job, w, sequence, kv_head, first, end, keys);
        block.on_amx = on_amx;
        const ptrdiff_t raw_row = block.value_row;
        if (on_amx)
            prepare_on_amx(w, block, (int)p.value_dim);
        else
            Path::prepare(w, block, (int)p.head_dim, (int)p.value_dim);
        for (int t = 0; t < tiles; ++t)
            if (first < w.tile[t].keys.last && last > w.tile[t].keys.first)
                attend<Path>(job, w, w.tile[t], block, raw_row, exact ? MAX_DEPTH_FEW_ROWS : MAX_DEPTH, ld);
        first = last;
    }
}

// One part after another, each with sums of its own, as separate tasks would have them.
template <class Path>
void run_parts_in_turn(
    const VarlenJob& job, VarlenWorkspace& w, const Task& task, const Sequence& sequence, int tiles, Span keys, int ld) {
    const VarlenProblem& p = *job.problem;
    for (int64_t first = keys.first; first < keys.last;) {
        const int64_t last = smaller((first / p.split_keys + 1) * p.split_keys, keys.last);
        run_part<Path>(job, w, task, sequence, tiles, {first, last}, ld);
        for (int t = 0; t < tiles; ++t) {
            VarlenTile& tile = w.tile[t];
            if (first == keys.first)
                swap_sums(tile);
            else
                add_part(job, tile.total, tile.sums, ld);
            clear(tile.sums, p.value_dim, ld);
        }
        first = last;
    }
    for (int t = 0; t < tiles && keys.first < keys.last; ++t) swap_sums(w.tile[t]);
}

template <class Path>
void run_task(const VarlenJob& job, ThreadWorkspace& w, const Task& task) {
    const VarlenProblem& p = *job.problem;
    const Sequence sequence = sequence_of(*job.call, task.sequence);
    if (takes_few(p, sequence)) return run_few<typename Path::Element>(job, w.few, task, w.tile);
    const int ld = tile_width(space_rows(p, sequence));
    int tiles = 0;
    Span keys = {INT64_MAX, 0};
    for (int64_t row = task.first_row; row < task.last_row; row += ld, ++tiles) {
        VarlenTile& tile = w.tile[tiles];
        tile.rows = (int)smaller<int64_t>(ld, task.last_row - row);
        describe_tile(job, sequence, task.head, row, tile);
        load_tile<Path>(p, tile, ld);
        tile.sums = task.parts > 1 ? part_sums(job, task, task.part, tiles, ld) : w.own[2 * tiles];
        tile.total = w.own[2 * tiles + 1];
        clear(tile.sums, p.value_dim, ld);
        if (tile.keys.last > 0) keys = {smaller(keys.first, tile.keys.first), larger(keys.last, tile.keys.last)};
    }
    keys = {larger(keys.first, task.first_key), smaller(keys.last, task.last_key)};
    if (p.split_keys > 0 && task.parts == 1)
        run_parts_in_turn<Path>(job, w, task, sequence, tiles, keys, ld);
    else
        run_part<Path>(job, w, task, sequence, tiles, keys, ld);
    if (task.parts > 1) {
        if (__atomic_add_fetch(job.parts_done + task.space, 1, __ATOMIC_ACQ_REL) != task.parts) return;
        for (int t = 0; t < tiles; ++t) {
            w.tile[t].sums = part_sums(job, task, 0, t, ld);
            for (int64_t part = 1; part < task.parts; ++part)
                add_part(job, w.tile[t].sums, part_sums(job, task, part, t, ld), ld);
        }
    }
    for (int t = 0; t < tiles; ++t) finish_tile<Path>(job, w, w.tile[t], ld);
}

bool arrange(const VarlenJob& job, ThreadWorkspace& w) {
    const VarlenProblem& p = *job.problem;
    const size_t ld = TILE_QUERIES, tiles = job.most_tiles;
    const size_t dimensions = p.head_dim + p.value_dim;
    const size_t of_tile = ld * (p.head_dim + 2 * (p.value_dim + 2));
    float* at = reserve_scratch(tiles * of_tile + 2 * BLOCK_KEYS * ld + 2 * ld + 2 * BLOCK_KEYS * dimensions +
                                few_floats(p.head_dim, p.value_dim));
    if (at == nullptr) return false;
    const auto take = [&at](size_t floats) {
        float* const taken = at;
        at += floats;
        return taken;
    };
    w.scores = take(BLOCK_KEYS * ld);
    w.pairs = take(BLOCK_KEYS * ld);
    w.rescale = take(ld);
    w.block_max = take(ld);
    w.key = take(BLOCK_KEYS * p.head_dim);
    w.value = take(BLOCK_KEYS * p.value_dim);
    w.gathered_key = (char*)take(BLOCK_KEYS * p.head_dim);
    w.gathered_value = (char*)take(BLOCK_KEYS * p.value_dim);
    arrange_few(w.few, take(few_floats(p.head_dim, p.value_dim)), p.head_dim, p.value_dim);
    for (size_t t = 0; t < tiles; ++t) {
        w.tile[t].query = take(ld * p.head_dim);
        w.own[2 * t] = {take(ld * p.value_dim), take(ld), take(ld)};
        w.own[2 * t + 1] = {take(ld * p.value_dim), take(ld), take(ld)};
    }
    return true;
}

template <class Path>
void work(void* data) {
    VarlenJob& job = *(VarlenJob*)data;
    ThreadWorkspace w;
    if (!arrange(job, w)) {
        __atomic_store_n(&job.out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    [[maybe_unused]] const typename Path::Session session;
    for (;;) {
        // Parts of a sequence's keys are taken together while many are left: where one ends, keys of the next are already asked for.
        const int64_t next = __atomic_load_n(&job.next_task, __ATOMIC_RELAXED);
        const int64_t left = next < job.task_count ? job.tasks[next].parts - job.tasks[next].part : 0;
        const int64_t taken = larger<int64_t>(1, left / (4 * job.threads));
        const int64_t first = __atomic_fetch_add(&job.next_task, taken, __ATOMIC_RELAXED);
        if (first >= job.task_count) return;
        const Task* const end = job.tasks + smaller(first + taken, job.task_count);
        for (const Task* task = job.tasks + first; task < end; ++task) {
            const bool follows = task + 1 < end && task[1].sequence == task->sequence && task[1].head == task->head;
            w.few.asked_to = task[follows].last_key;
            run_task<Path>(job, w, *task);
        }
    }
}

// Rows of query that belong to no sequence.
void clear_rows(const VarlenProblem& p, const VarlenCall& call, size_t element_size) {
    for (int64_t token = call.cu_seqlens_q[call.batch]; token < call.tokens; ++token)
        for (int64_t head = 0; head < p.heads; ++head) {
            memset(call.out + token * p.out_stride[0] + head * p.out_stride[1], 0, element_size * p.value_dim);
            if (call.lse) call.lse[token * p.heads + head] = -__builtin_inff();
        }
}

}  // namespace

// Status, or a VarlenStatus with call->fault_*. After NULL_TENSOR and the faults nothing was touched; after OUT_OF_MEMORY
// the output is undefined.
EXPORTED int flashmoe_attention_varlen(const VarlenProblem* problem, VarlenCall* call, int threads) {
    const VarlenProblem& p = *problem;
    if (!call->query || !call->out || !call->cu_seqlens_q || (call->keys > 0 && (!call->key || !call->value)))
        return NULL_TENSOR;
    if (call->batch > 0 && (p.page_size > 0 ? !call->seqused_k || (call->table_pages > 0 && !call->block_table) : !call->cu_seqlens_k))
        return NULL_TENSOR;
    const int status = check_lengths(p, *call);
    if (status != SUCCESS) return status;
    Division division = divide(p, *call);
    VarlenJob job;
    job.problem = problem;
    job.call = call;
    const double unit = p.softcap > 0 ? p.softcap : p.softmax_scale;
    job.scale = (float)(unit * LOG2_E);
    job.bias_factor = (float)(1 / unit);
    job.cap_factor = p.softcap > 0 ? (float)(p.softmax_scale / p.softcap) : 0.0f;
    job.next_task = 0;
    job.out_of_memory = 0;
    job.most_tiles = (int)(larger<int64_t>(division.task_rows, FOLD_QUERIES) / TILE_QUERIES);
    Plan plan = make_tasks(p, *call, division, nullptr);
    if (p.split_keys > 0 && plan.sums > MOST_PART_SUMS) {
        division.in_turn = true;
        plan = make_tasks(p, *call, division, nullptr);
    }
    void* memory = nullptr;
    // Sums first: there are a multiple of 8 of them.
    const size_t bytes = plan.sums * sizeof(float) + plan.tasks * sizeof(Task) + plan.spaces * sizeof(int);
    if (posix_memalign(&memory, 64, larger<size_t>(bytes, 64)) != 0) return OUT_OF_MEMORY;
    job.part_sums = (float*)memory;
    Task* const tasks = (Task*)(job.part_sums + plan.sums);
    make_tasks(p, *call, division, tasks);
    job.tasks = tasks;
    job.task_count = plan.tasks;
    job.parts_done = (int*)(tasks + plan.tasks);
    memset(job.parts_done, 0, plan.spaces * sizeof(int));
    threads = division.work < MIN_PARALLEL_WORK ? 1 : (int)smaller<int64_t>(threads, plan.tasks);
    job.threads = threads;
    run_on_threads(for_element(p.element_type, work<DirectPath>, work<BFloat16Path>, work<WidenPath<Half>>), &job, threads);
    clear_rows(p, *call, p.element_type == FLOAT32 ? 4 : 2);
    free(memory);
    return job.out_of_memory ? OUT_OF_MEMORY : SUCCESS;
}

PYTHON_METHOD(flashmoe_varlen_method, "attention_varlen", PythonCall<flashmoe_attention_varlen>::call)

// What calls have in common that differ in addresses alone. In Python: _Repeat of cpu/varlen.py.
struct VarlenRepeat {
    static constexpr int MOST = 12;  // addresses of a call
    VarlenCall call;
    int64_t given;        // tensors that the caller gave
    int64_t place[MOST];  // of each one's address: which word of the call
};

// Such a call as a Python function of integers: the addresses of the problem and of a VarlenRepeat, the number of threads, the
// addresses of output and log-sum-exp (0 for none), and of the tensors given. Returns a status, without what the fault is: the
// function above says that. Raises MemoryError. Other Python threads run meanwhile.
static PyObject* attention_varlen_repeat(PyObject*, PyObject* const* arguments, intptr_t count) {
    constexpr int BEFORE = 5, COUNT = BEFORE + VarlenRepeat::MOST;
    void* value[COUNT] = {};
    for (int i = 0; i < COUNT && i < count; ++i) value[i] = PyLong_AsVoidPtr(arguments[i]);
    if (PyErr_Occurred()) return nullptr;
    const VarlenRepeat& repeat = *(const VarlenRepeat*)value[1];
    if (count != BEFORE + repeat.given) return PyLong_FromLong(NULL_TENSOR);
    VarlenCall call = repeat.call;  // of this thread, as others may make the same one
    for (int64_t i = 0; i < repeat.given; ++i) {
        if (!value[BEFORE + i]) return PyLong_FromLong(NULL_TENSOR);
        memcpy((char*)&call + sizeof(void*) * repeat.place[i], &value[BEFORE + i], sizeof(void*));
    }
    call.out = (char*)value[3];
    call.lse = (float*)value[4];
    void* const state = PyEval_SaveThread();
    const int status = flashmoe_attention_varlen((const VarlenProblem*)value[0], &call, (int)(intptr_t)value[2]);
    PyEval_RestoreThread(state);
    return status == OUT_OF_MEMORY ? PyErr_NoMemory() : PyLong_FromLong(status);
}

PYTHON_METHOD(flashmoe_varlen_repeat_method, "attention_varlen_repeat", attention_varlen_repeat)
