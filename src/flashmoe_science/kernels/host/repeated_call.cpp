// Calls of attention that are like earlier ones of their thread, by one built-in function of Python: such a call is recognised, its
// results allocated, addresses written into the kernel's argument, launched. In Python the same takes more than twice the time.
//
// Python's headers are not needed: what is declared here is of its stable ABI, or a function of every version since 3.9. PyTorch's
// neither: tensors are asked by attributes, or by PyTorch's functions of C (cuda/torch_c.py). The symbols are weak, so that the library
// also loads outside Python.
#include <stdint.h>

extern "C" {
struct PyObject;
typedef PyObject* (*PyFastFunction)(PyObject* self, PyObject* const* arguments, intptr_t count);
struct PyMethodDef {
    const char* name;
    PyFastFunction function;
    int flags;
    const char* doc;
};
#define FROM_PYTHON __attribute__((weak)) extern
FROM_PYTHON PyObject _Py_NoneStruct, _Py_TrueStruct;
FROM_PYTHON PyObject PyTuple_Type, PyFloat_Type, PyLong_Type;
FROM_PYTHON void Py_IncRef(PyObject*);
FROM_PYTHON void Py_DecRef(PyObject*);  // takes null too
FROM_PYTHON PyObject* PyTuple_New(intptr_t);
FROM_PYTHON int PyTuple_SetItem(PyObject*, intptr_t, PyObject*);  // takes the reference
FROM_PYTHON PyObject* PyTuple_GetItem(PyObject*, intptr_t);       // borrowed
FROM_PYTHON intptr_t PyTuple_Size(PyObject*);
FROM_PYTHON PyObject* PyObject_Type(PyObject*);
FROM_PYTHON int PyObject_RichCompareBool(PyObject*, PyObject*, int);
FROM_PYTHON intptr_t PyObject_Size(PyObject*);
FROM_PYTHON PyObject* PyObject_GetAttr(PyObject*, PyObject*);
FROM_PYTHON PyObject* PyObject_Call(PyObject*, PyObject*, PyObject*);
FROM_PYTHON PyObject* PyObject_CallNoArgs(PyObject*);
FROM_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
FROM_PYTHON void* PyLong_AsVoidPtr(PyObject*);
FROM_PYTHON long PyLong_AsLong(PyObject*);
FROM_PYTHON PyObject* PyErr_Occurred();
FROM_PYTHON void PyErr_Clear();
FROM_PYTHON void* PyEval_SaveThread();
FROM_PYTHON void PyEval_RestoreThread(void*);
}

namespace {

constexpr int METH_FASTCALL = 0x80;
constexpr int EQUAL = 2;  // Py_EQ
constexpr int MOST_TENSORS = 16;
constexpr int MOST_DIM = 4;
constexpr int OPTIONS = 7;
constexpr int64_t ANY = -1;
constexpr uint64_t UNREADABLE = ~0ull;  // in an address's place

// How an object of PyTorch's type of tensors, of no subclass, is asked in C: cuda/torch_c.py. A function gives 0, or a status.
struct TensorFunctions {
    int64_t word;                                // of the object, with the tensor's address: where it lies is what C calls a tensor
    int64_t keys_word;                           // of the tensor: its dispatch keys, one bit each
    int (*data_ptr)(void** tensor, void** address);  // null: there are none of these functions
    int (*strides)(void** tensor, int64_t** first);
    int (*sizes)(void** tensor, int64_t** first);
    int (*dim)(void** tensor, int64_t* number);
    int (*dtype)(void** tensor, int32_t* code);
    int (*device_type)(void** tensor, int32_t* code);
    int (*device_index)(void** tensor, int32_t* index);
    bool (*records_gradients)();                 // this thread
};

// All that a tensor is like but whether it requires a gradient.
struct Likeness {
    int64_t dim;                                 // at most MOST_DIM; ANY: C is not asked
    int64_t sizes[MOST_DIM], strides[MOST_DIM];
    uint64_t keys;                               // dispatch keys: nested, negative, of a transform and so on
    int32_t dtype, device_type, device_index;
    int32_t is_integer;                          // then it requires none
};

// This and `KnownCalls` are filled by flashmoe_science/cuda/steady.py, field by field. Whoever owns them keeps the objects alive.
struct RepeatedCall {
    PyObject* owner;                             // is held during a call, which may make its thread know others
    PyObject* options[OPTIONS];
    PyObject* matches;                           // PyTorch's check of those that are given, but integers of which C is asked
    PyObject* matches_first;                     // of the first alone, for what the thread is set to; null where C is not asked of all
    PyObject *allocate, *layout, *lse_layout;    // lse_layout: null where no log-sum-exp is asked for
    PyObject *stream_of, *device;                // the device's current stream, where `current_stream` is null
    PyObject* current_device;                    // null where there is one device
    PyObject* counters;                          // a pool of them, which may be scarce
    int64_t device_index;
    int64_t max_seqlen_q;
    int64_t least_seqlen_k, most_seqlen_k;       // bounds of keys with which the launch is the same
    const int64_t* stream;                       // that the argument was written for; ANY: for none yet
    uint64_t* argument;                          // of the kernel, in words of 8 bytes
    int (*is_capturing)(void* stream, int* status);  // the driver's, as the next
    int (*launch)(void* config, void* function, void** arguments, void** extra);
    void *config, *function, **arguments;
    int64_t given;                               // inputs that are not None
    int64_t given_bits;                          // the same: bit i for input i
    int64_t tokens;                              // the length of the first of them
    int64_t index_given[MOST_TENSORS];           // of the inputs
    int64_t word[MOST_TENSORS];                  // of the argument, for the address of each given input
    int64_t unaligned[MOST_TENSORS];             // bits that its address may not have
    int64_t output;                              // of the inputs given, which one the result goes to; -1: it is allocated
    int64_t output_word, lse_word;
    Likeness likeness[MOST_TENSORS];             // of each given input
};

// Of a thread.
struct KnownCalls {
    PyObject* modes;                             // how many see each operator
    PyObject *is_nested, *is_scarce;             // names
    PyObject* data_ptr;                          // the method of tensors
    PyObject* tensor_type;                       // whose objects, of no subclass, C may be asked of
    TensorFunctions of_tensor;
    int (*current_stream)(int32_t device, void** stream);  // null: `stream_of` is asked
    int64_t inputs;
    int64_t count, latest;                       // of the calls; the index of the one that was made last
    const RepeatedCall* const* calls;
};

// An object that is let go with the frame.
struct Held {
    PyObject* object;
    explicit Held(PyObject* taken) : object(taken) {}
    ~Held() { Py_DecRef(object); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    PyObject* release() {
        PyObject* const given = object;
        object = nullptr;
        return given;
    }
};

PyObject* with_reference(PyObject* object) {
    Py_IncRef(object);
    return object;
}

// The answer for a call that is like none before.
PyObject* not_like() {
    if (PyErr_Occurred()) PyErr_Clear();
    return with_reference(&_Py_NoneStruct);
}

bool is_true(PyObject* answer) {
    const Held held(answer);
    return answer == &_Py_TrueStruct;
}

// An integer of Python, which is let go; -1 with an error set where it is none.
int64_t integer_of(PyObject* number) {
    const Held held(number);
    return number ? (int64_t)PyLong_AsVoidPtr(number) : -1;
}

bool has_type(PyObject* object, PyObject* type) { return Held(PyObject_Type(object)).object == type; }

// What C calls a tensor; null where C may not be asked.
void** in_c(const KnownCalls& known, PyObject* tensor) {
    return known.of_tensor.data_ptr && has_type(tensor, known.tensor_type) ? (void**)tensor + known.of_tensor.word : nullptr;
}

// `UNREADABLE` with an error set where memory may not be read: of tensors that a later replay of CUDA graphs has overwritten, say.
uint64_t address_of(const KnownCalls& known, PyObject* tensor, void** asked) {
    void* address;
    if (asked && known.of_tensor.data_ptr(asked, &address) == 0) return (uint64_t)address;
    return (uint64_t)integer_of(PyObject_CallFunctionObjArgs(known.data_ptr, tensor, nullptr));
}

// An attribute that is true, or cannot be asked.
bool may_be(PyObject* object, PyObject* attribute) {
    const Held answer(PyObject_GetAttr(object, attribute));
    return !answer.object || answer.object == &_Py_TrueStruct;
}

// The keys first: of a nested tensor, say, nothing else may be asked.
bool is_like_in_c(const TensorFunctions& of, const Likeness& like, void** tensor) {
    if (((const uint64_t*)*tensor)[of.keys_word] != like.keys) return false;
    int64_t dim, *sizes, *strides;
    int32_t dtype, type, index;
    if (of.dim(tensor, &dim) || of.sizes(tensor, &sizes) || of.strides(tensor, &strides)) return false;
    if (of.dtype(tensor, &dtype) || of.device_type(tensor, &type) || of.device_index(tensor, &index)) return false;
    if (dim != like.dim || dtype != like.dtype || type != like.device_type || index != like.device_index) return false;
    for (int64_t i = 0; i < dim; ++i) {
        if (sizes[i] != like.sizes[i] || strides[i] != like.strides[i]) return false;
    }
    return true;
}

// Below all that calls have where it is none.
int64_t bound_of(PyObject* given) {
    const long bound = PyLong_AsLong(given);
    if (bound == -1) PyErr_Clear();  // it may be no integer
    return bound;
}

// Equal numbers of one type, which may be computed anew for each call. No code but Python's own decides.
bool is_same_number(PyObject* given, PyObject* known) {
    if (given == known) return true;
    PyObject* const type = has_type(known, &PyFloat_Type) ? &PyFloat_Type : &PyLong_Type;
    return has_type(known, type) && has_type(given, type) && PyObject_RichCompareBool(given, known, EQUAL) == 1;
}

// Such a number, a tuple of them, or the very object, as true, false and none are.
bool is_same_option(PyObject* given, PyObject* known) {
    if (given == known) return true;
    if (!has_type(known, &PyTuple_Type)) return is_same_number(given, known);
    if (!has_type(given, &PyTuple_Type)) return false;
    const intptr_t size = PyTuple_Size(known);
    if (PyTuple_Size(given) != size) return false;
    for (intptr_t i = 0; i < size; ++i) {
        if (!is_same_number(PyTuple_GetItem(given, i), PyTuple_GetItem(known, i))) return false;
    }
    return true;
}

bool are_options_of(const RepeatedCall& call, PyObject* const* options) {
    for (int64_t i = 0; i < OPTIONS; ++i) {
        if (!is_same_option(options[i], call.options[i])) return false;
    }
    return true;
}

int64_t bits_of_given(const KnownCalls& known, PyObject* const* inputs) {
    int64_t bits = 0;
    for (int64_t i = 0; i < known.inputs; ++i) bits |= (int64_t)(inputs[i] != &_Py_NoneStruct) << i;
    return bits;
}

// Whether a call has these options, bounds and kinds of inputs. What the tensors are like is not asked.
bool is_of_kind(const RepeatedCall& call, int64_t given_bits, PyObject* const* options, int64_t max_seqlen_q, int64_t max_seqlen_k) {
    return given_bits == call.given_bits && are_options_of(call, options) && max_seqlen_q == call.max_seqlen_q &&
           max_seqlen_k >= call.least_seqlen_k && max_seqlen_k <= call.most_seqlen_k;
}

int64_t length_of(PyObject* tensor) {
    const intptr_t length = PyObject_Size(tensor);
    if (length < 0) PyErr_Clear();
    return length;
}

// The default stream, whose handle is 0, cannot be captured.
bool may_be_captured(const RepeatedCall& call, int64_t stream) {
    int capturing = 0;
    return stream != 0 && (call.is_capturing((void*)stream, &capturing) != 0 || capturing != 0);
}

int64_t stream_of(const KnownCalls& known, const RepeatedCall& call) {
    void* stream;
    if (known.current_stream && known.current_stream((int32_t)call.device_index, &stream) == 0) return (int64_t)stream;
    return integer_of(PyObject_CallFunctionObjArgs(call.stream_of, call.device, nullptr));
}

// Whether the argument is for launches on this stream, which nobody captures.
bool is_ready_for(const KnownCalls& known, const RepeatedCall& call, int64_t stream) {
    return stream == *call.stream && stream != ANY && !may_be(call.counters, known.is_scarce) && !may_be_captured(call, stream);
}

// Those that are given.
struct Tensors {
    PyObject* object[MOST_TENSORS];  // the caller's
    void** in_c[MOST_TENSORS];       // see `in_c`
};

bool are_like_in_c(const KnownCalls& known, const RepeatedCall& call, const Tensors& tensors) {
    for (int64_t i = 0; i < call.given; ++i) {
        if (call.likeness[i].dim == ANY) continue;
        if (!tensors.in_c[i] || !is_like_in_c(known.of_tensor, call.likeness[i], tensors.in_c[i])) return false;
    }
    return true;
}

// Whether PyTorch's check is asked of a given tensor too.
bool is_guarded(const RepeatedCall& call, int64_t i, bool recorded) {
    if (call.likeness[i].dim == ANY) return true;
    return recorded ? !call.likeness[i].is_integer : i == 0;
}

// A nested tensor would end the process.
bool match_guards(const KnownCalls& known, const RepeatedCall& call, const Tensors& tensors, bool recorded) {
    int64_t count = 0;
    for (int64_t i = 0; i < call.given; ++i) count += is_guarded(call, i, recorded);
    const Held guarded(PyTuple_New(count));
    for (int64_t i = 0, next = 0; guarded.object && i < call.given; ++i) {
        if (!is_guarded(call, i, recorded)) continue;
        if (call.likeness[i].dim == ANY && may_be(tensors.object[i], known.is_nested)) return false;
        PyTuple_SetItem(guarded.object, next++, with_reference(tensors.object[i]));
    }
    return guarded.object && is_true(PyObject_Call(recorded ? call.matches : call.matches_first, guarded.object, nullptr));
}

bool is_like(const KnownCalls& known, const RepeatedCall& call, PyObject* const* inputs, Tensors& tensors) {
    for (int64_t i = 0; i < call.given; ++i) {
        tensors.object[i] = inputs[call.index_given[i]];
        tensors.in_c[i] = in_c(known, tensors.object[i]);
    }
    if (!are_like_in_c(known, call, tensors)) return false;
    const bool recorded = !call.matches_first || known.of_tensor.records_gradients();
    if (!match_guards(known, call, tensors, recorded)) {
        PyErr_Clear();
        return false;
    }
    return !call.current_device || integer_of(PyObject_CallNoArgs(call.current_device)) == call.device_index;
}

// The results, a tensor or two, of tensors that are like the call's; None, with nothing done, where the call has to be made another
// way: on another stream, in a capture, misaligned.
PyObject* make(const KnownCalls& known, const RepeatedCall& call, const Tensors& tensors) {
    const int64_t stream = stream_of(known, call);
    if (!is_ready_for(known, call, stream)) return not_like();
    uint64_t address[MOST_TENSORS];
    for (int64_t i = 0; i < call.given; ++i) {
        address[i] = address_of(known, tensors.object[i], tensors.in_c[i]);
        if (address[i] == UNREADABLE || (address[i] & (uint64_t)call.unaligned[i])) return not_like();
    }
    Held output(call.output < 0 ? PyObject_Call(call.allocate, call.layout, nullptr) : with_reference(tensors.object[call.output]));
    if (!output.object) return nullptr;
    Held lse(call.lse_layout ? PyObject_Call(call.allocate, call.lse_layout, nullptr) : nullptr);
    if (call.lse_layout && !lse.object) return nullptr;
    const uint64_t output_address = address_of(known, output.object, in_c(known, output.object));
    const uint64_t lse_address = lse.object ? address_of(known, lse.object, in_c(known, lse.object)) : 0;
    Held results(lse.object ? PyTuple_New(2) : nullptr);
    if (PyErr_Occurred()) return nullptr;
    if (stream != *call.stream) return not_like();  // what an object does at its end made another call

    // From here on no code of Python runs that could make another call of this thread, and write to the argument.
    for (int64_t i = 0; i < call.given; ++i) call.argument[call.word[i]] = address[i];
    call.argument[call.output_word] = output_address;
    call.argument[call.lse_word] = lse_address;
    void* const state = PyEval_SaveThread();
    const int status = call.launch(call.config, call.function, call.arguments, nullptr);
    PyEval_RestoreThread(state);
    if (status != 0) return not_like();  // made again in Python, it says what is wrong
    if (!results.object) return output.release();
    PyTuple_SetItem(results.object, 0, output.release());
    PyTuple_SetItem(results.object, 1, lse.release());
    return results.release();
}

// Arguments: all inputs, all options, max_seqlen_q, max_seqlen_k. The results; None, with nothing done, for a call that is like none
// that the thread knows, or that has to be made another way.
PyObject* repeated_call(PyObject* self, PyObject* const* arguments, intptr_t count) {
    KnownCalls& known = *(KnownCalls*)PyLong_AsVoidPtr(PyTuple_GetItem(self, 0));
    if (count != known.inputs + OPTIONS + 2 || integer_of(PyObject_CallNoArgs(known.modes)) != 0) return not_like();
    const int64_t given_bits = bits_of_given(known, arguments);
    PyObject* const* const options = arguments + known.inputs;
    // Here, as a bound that is no int may run code that makes the thread forget a call.
    const int64_t max_seqlen_q = bound_of(options[OPTIONS]);
    const int64_t max_seqlen_k = bound_of(options[OPTIONS + 1]);
    int64_t tokens = ANY;
    // Most calls are like the latest. Python's code may make the thread know others meanwhile: hence the owner, and no index is trusted.
    for (int64_t tried = 0, i = known.latest; tried < known.count && i < known.count; ++tried, i = i + 1 < known.count ? i + 1 : 0) {
        const RepeatedCall& call = *known.calls[i];
        if ((tokens != ANY && call.tokens != tokens) || !is_of_kind(call, given_bits, options, max_seqlen_q, max_seqlen_k)) continue;
        const Held owner(with_reference(call.owner));
        Tensors tensors;
        if (is_like(known, call, arguments, tensors)) {
            if (i < known.count && known.calls[i] == &call) known.latest = i;
            return make(known, call, tensors);
        }
        if (tokens == ANY) tokens = length_of(arguments[0]);
    }
    return not_like();
}

}  // namespace

extern "C" {
// For `PyCFunction_NewEx`; ``self`` is a tuple that begins with the address of `KnownCalls`.
__attribute__((visibility("default"))) PyMethodDef flashmoe_repeated_call_method = {
    "repeated_call", repeated_call, METH_FASTCALL, nullptr};
}
