"""What PyTorch's autograd takes for a Function that does nothing: one of Python, and one of C++.

    python benchmarks/autograd_floor.py --device cuda

Both keep three tensors and return three new ones, uninitialised. So it is the least that a differentiable call of
three tensors takes on this host, whatever its kernels do. The one of C++ is compiled against this torch's headers,
which takes half a minute. Microseconds, the least of 30 rounds; a layer is one of 32 that follow each other.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host_times import per_call

SOURCE = r"""
#include <Python.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
struct Nothing : torch::autograd::Function<Nothing> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        context->save_for_backward({q, k, v});
        return at::empty_like(q);
    }
    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const auto saved = context->get_saved_variables();
        return {at::empty_like(saved[0]), at::empty_like(saved[1]), at::empty_like(saved[2])};
    }
};
static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    return THPVariable_Wrap(
        Nothing::apply(THPVariable_Unpack(given[0]), THPVariable_Unpack(given[1]), THPVariable_Unpack(given[2])));
}
static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void*)call, METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "autograd_nothing", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_autograd_nothing() { return PyModule_Create(&definition); }
"""
LAYERS, TURNS = 32, 3


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def of_cpp(folder: Path) -> Callable[..., torch.Tensor]:
    """Raises subprocess.CalledProcessError where the compiler, which says why, does not take it."""
    (folder / "nothing.cpp").write_text(SOURCE, encoding="utf-8")
    installed = Path(torch.__file__).parent
    include = installed / "include"
    headers = include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", *(f"-I{each}" for each in headers)]
    macro = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{installed / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = ["g++", *flags, macro, "nothing.cpp", "-o", "autograd_nothing.so", *libraries]
    subprocess.run(command, cwd=folder, check=True)
    sys.path.insert(0, str(folder))
    function: Callable[..., torch.Tensor] = importlib.import_module("autograd_nothing").call
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    leaves = [torch.randn(1, 8, 128, 64, device=device, requires_grad=True) for _ in range(3)]
    gradient = torch.randn_like(leaves[0]).detach()
    others = [[torch.randn_like(gradient).requires_grad_() for _ in range(2)] for _ in range(LAYERS)]
    inputs = [leaves[0], *(tensor for pair in others for tensor in pair)]

    def step(function: Callable[..., torch.Tensor]) -> None:
        hidden = leaves[0]
        for pair in others:
            hidden = function(hidden, *pair)
        torch.autograd.grad(hidden, inputs, gradient)

    def times(function: Callable[..., torch.Tensor]) -> str:
        output = function(*leaves)
        forward = per_call(lambda: function(*leaves), device=device)
        backward = per_call(
            lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True), 100, device=device
        )
        layer = per_call(lambda: step(function), 4, device=device) / LAYERS
        return f"forward {forward:.2f}, backward {backward:.2f}, a layer {layer:.2f}"

    with tempfile.TemporaryDirectory() as folder:
        compiled = of_cpp(Path(folder))
        for _ in range(TURNS):
            for name, function in (("Python", Nothing.apply), ("C++", compiled)):
                print(f"{name}: {times(function)}", flush=True)


if __name__ == "__main__":
    main()
