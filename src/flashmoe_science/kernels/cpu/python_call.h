// The kernel as a Python built-in function, without Python's headers.
//
// A call through ctypes costs half a microsecond for seven arguments, as much as the arithmetic of a small
// attention. What is declared here belongs to CPython's stable ABI (METH_FASTCALL since 3.10), so it is the
// same for every version; the symbols are weak, so that the library also loads outside Python.
#pragma once

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
__attribute__((weak)) void* PyLong_AsVoidPtr(PyObject*);
__attribute__((weak)) PyObject* PyLong_FromLong(long);
__attribute__((weak)) PyObject* PyErr_Occurred();
__attribute__((weak)) PyObject* PyErr_NoMemory();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
}

constexpr int METH_FASTCALL = 0x80;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// What a kernel's function returns. NULL_TENSOR: a tensor that is not empty has no memory; nothing was touched then.
enum Status : int { SUCCESS = 0, OUT_OF_MEMORY = 1, NULL_TENSOR = 2 };

// A function of addresses and numbers as a Python function of as many integers: 0 for an address that is not there, and behind
// all others the number of threads. Returns a status, raises MemoryError. Other Python threads run meanwhile.
template <auto FUNCTION>
struct PythonCall;

template <class... Given, int (*FUNCTION)(Given...)>
struct PythonCall<FUNCTION> {
    int status;

    template <class T>
    static T taken(void**& next) {
        return (T)(intptr_t)*next++;
    }

    explicit PythonCall(Given... given) : status(FUNCTION(given...)) {}

    static PyObject* call(PyObject*, PyObject* const* arguments, intptr_t count) {
        constexpr int COUNT = sizeof...(Given);
        void* value[COUNT] = {};
        for (int i = 0; i < COUNT && i < count; ++i) value[i] = PyLong_AsVoidPtr(arguments[i]);
        if (PyErr_Occurred()) return nullptr;
        void** next = value;
        void* const state = PyEval_SaveThread();
        const PythonCall made{taken<Given>(next)...};  // braces: from left to right
        PyEval_RestoreThread(state);
        return made.status == OUT_OF_MEMORY ? PyErr_NoMemory() : PyLong_FromLong(made.status);
    }
};

// For PyCFunction_NewEx.
#define PYTHON_METHOD(METHOD, NAME, ...) \
    extern "C" { \
    __attribute__((visibility("default"))) PyMethodDef METHOD = {NAME, __VA_ARGS__, METH_FASTCALL, nullptr}; \
    }
