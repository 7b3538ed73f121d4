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
