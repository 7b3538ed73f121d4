// A call of attention that is like the one before it, as one built-in function of Python: recognised, its results allocated,
// addresses written into the kernel's argument, launched. In Python the same takes more than twice the time.
//
// Python's headers are not needed: what is declared here is of its stable ABI, or a function of every version since 3.9. PyTorch's
// neither: tensors are asked by their attributes. The symbols are weak, so that the library also loads outside Python.
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
FROM_PYTHON void Py_IncRef(PyObject*);
FROM_PYTHON void Py_DecRef(PyObject*);  // takes null too
FROM_PYTHON PyObject* PyTuple_New(intptr_t);
FROM_PYTHON int PyTuple_SetItem(PyObject*, intptr_t, PyObject*);  // takes the reference
FROM_PYTHON PyObject* PyTuple_GetItem(PyObject*, intptr_t);       // borrowed
FROM_PYTHON intptr_t PyTuple_Size(PyObject*);
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
constexpr int MOST_TENSORS = 16;
constexpr int64_t ANY = -1;

// Filled by flashmoe_science/cuda/steady.py, field by field. Whoever owns it keeps the objects alive.
struct RepeatedCall {
    PyObject *is_nested, *is_scarce;             // names
    PyObject* data_ptr;                          // the method of tensors
    PyObject *causal, *return_lse;               // of the options, by identity
    PyObject* matches;                           // of the tensors
    PyObject *allocate, *layout, *lse_layout;    // lse_layout: null where no log-sum-exp is asked for
    PyObject *stream_of, *device;                // the device's current stream
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
    int64_t absent;                              // inputs that are
    int64_t index_given[MOST_TENSORS];           // of the inputs
    int64_t index_absent[MOST_TENSORS];
    int64_t word[MOST_TENSORS];                  // of the argument, for the address of each given input
    int64_t unaligned[MOST_TENSORS];             // bits that its address may not have
    int64_t output;                              // of the inputs given, which one the result goes to; -1: it is allocated
    int64_t output_word, lse_word;
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

// The answer for a call that is not like the one before.
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

uint64_t address_of(const RepeatedCall& call, PyObject* tensor) {
    return (uint64_t)integer_of(PyObject_CallFunctionObjArgs(call.data_ptr, tensor, nullptr));
}

bool bound_within(PyObject* given, int64_t least, int64_t most) {
    const long bound = PyLong_AsLong(given);
    return bound >= least && bound <= most;
}

// The default stream, whose handle is 0, cannot be captured.
bool may_be_captured(const RepeatedCall& call, int64_t stream) {
    int capturing = 0;
    return stream != 0 && (call.is_capturing((void*)stream, &capturing) != 0 || capturing != 0);
}

// Arguments: all inputs, all options, max_seqlen_q, max_seqlen_k. The results, a tensor or two; None, with nothing done, for a call
// that is not like the one before, or that has to be made another way: on another stream, in a capture, misaligned.
PyObject* repeated_call(PyObject* self, PyObject* const* arguments, intptr_t count) {
    const RepeatedCall& call = *(const RepeatedCall*)PyLong_AsVoidPtr(PyTuple_GetItem(self, 0));
    if (count != 4) return not_like();
    PyObject *const inputs = arguments[0], *const options = arguments[1];
    if (PyTuple_GetItem(options, 0) != call.causal || PyTuple_GetItem(options, 5) != call.return_lse) return not_like();
    if (!bound_within(arguments[2], call.max_seqlen_q, call.max_seqlen_q)) return not_like();
    if (!bound_within(arguments[3], call.least_seqlen_k, call.most_seqlen_k)) return not_like();
    for (int64_t i = 0; i < call.absent; ++i) {
        if (PyTuple_GetItem(inputs, call.index_absent[i]) != &_Py_NoneStruct) return not_like();
    }
    const Held tensors(PyTuple_New(call.given));
    if (!tensors.object) return nullptr;
    for (int64_t i = 0; i < call.given; ++i) {
        PyObject* const tensor = PyTuple_GetItem(inputs, call.index_given[i]);
        if (!tensor || tensor == &_Py_NoneStruct) return not_like();
        const Held nested(PyObject_GetAttr(tensor, call.is_nested));  // the check below would end the process
        if (!nested.object || nested.object == &_Py_TrueStruct) return not_like();
        PyTuple_SetItem(tensors.object, i, with_reference(tensor));
    }
    if (!is_true(PyObject_Call(call.matches, tensors.object, nullptr))) return not_like();
    if (call.current_device && integer_of(PyObject_CallNoArgs(call.current_device)) != call.device_index) return not_like();
    const int64_t stream = integer_of(PyObject_CallFunctionObjArgs(call.stream_of, call.device, nullptr));
    if (stream != *call.stream || *call.stream == ANY) return not_like();
    const Held scarce(PyObject_GetAttr(call.counters, call.is_scarce));
    if (!scarce.object || scarce.object == &_Py_TrueStruct || may_be_captured(call, stream)) return not_like();

    uint64_t address[MOST_TENSORS];
    for (int64_t i = 0; i < call.given; ++i) {
        address[i] = address_of(call, PyTuple_GetItem(tensors.object, i));
        if (address[i] & (uint64_t)call.unaligned[i]) return not_like();
    }
    Held output(call.output < 0 ? PyObject_Call(call.allocate, call.layout, nullptr)
                                : with_reference(PyTuple_GetItem(tensors.object, call.output)));
    if (!output.object) return nullptr;
    Held lse(call.lse_layout ? PyObject_Call(call.allocate, call.lse_layout, nullptr) : nullptr);
    if (call.lse_layout && !lse.object) return nullptr;
    const uint64_t output_address = address_of(call, output.object);
    const uint64_t lse_address = lse.object ? address_of(call, lse.object) : 0;
    Held results(lse.object ? PyTuple_New(2) : nullptr);
    if (PyErr_Occurred()) return nullptr;

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

}  // namespace

extern "C" {
// For `PyCFunction_NewEx`; ``self`` is a tuple that begins with the address of a `RepeatedCall`.
__attribute__((visibility("default"))) PyMethodDef flashmoe_repeated_call_method = {
    "repeated_call", repeated_call, METH_FASTCALL, nullptr};
}
