"""The Metal text of the Gated DeltaNet kernels, compiled as C++ and run on the host.

A thread per lane; lanes of a block exchange numbers at barriers, block after block. Slow, for a few
rows of small heads. What it cannot show: that Metal's own compiler takes the text.
"""

import ctypes
import hashlib
import shutil
import subprocess

import mlx.core as mx
import numpy as np

from target_svc.models.blocks import delta_kernel
from target_svc.models.blocks.delta_kernel import DeltaKernels

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

_METAL = """
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>
using std::exp; using std::fma; using std::log; using std::sqrt;
#define device
#define constant
struct Index { unsigned x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
static thread_local Index thread_position_in_threadgroup, threadgroup_position_in_grid;
static std::vector<float> passed;
static std::vector<std::unique_ptr<std::barrier<>>> simdgroups;
static float simd_shuffle_xor(float value, unsigned mask) {
  const unsigned me = thread_position_in_threadgroup.x;
  std::barrier<>& group = *simdgroups[me / 32];
  passed[me] = value;
  group.arrive_and_wait();
  const float other = passed[(me / 32) * 32 + ((me % 32) ^ mask)];
  group.arrive_and_wait();
  return other;
}
"""

_LAUNCH = """
extern "C" void launch(unsigned across, unsigned down, unsigned threads, void** at) {
  passed.assign(threads, 0.0f);
  for (unsigned block = 0; block < across * down; ++block) {
    simdgroups.clear();
    for (unsigned i = 0; i < threads; i += 32) {
      simdgroups.push_back(std::make_unique<std::barrier<>>(32));
    }
    std::vector<std::thread> lanes;
    for (unsigned i = 0; i < threads; ++i) lanes.emplace_back([=] {
      thread_position_in_threadgroup = {i, 0, 0};
      threadgroup_position_in_grid = {block % across, block / across, 0};
      body(ARGUMENTS);
      simdgroups[i / 32]->arrive_and_drop();
    });
    for (auto& lane : lanes) lane.join();
  }
}
"""

_TYPES = {mx.float32: "float", mx.int32: "int"}


def _program(inputs, arrays, outputs, dtypes, source):
    """C++ of one kernel for inputs of these types, as MLX writes its signature."""
    kinds = [f"const {_TYPES[a.dtype]}*" for a in arrays] + [f"{_TYPES[d]}*" for d in dtypes]
    names = [*inputs, *outputs]
    signature = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
    arguments = ", ".join(f"({kind})at[{i}]" for i, kind in enumerate(kinds))
    body = f"using T = float;\nstatic void body({signature}) {{\n{source}\n}}\n"
    return _METAL + body + _LAUNCH.replace("ARGUMENTS", arguments)


def host_metal_kernel(folder):
    """What stands in for `mx.fast.metal_kernel`; programs are kept in `folder`."""

    def make(*, name, input_names, output_names, source):
        def launch(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template=()):
            program = _program(input_names, inputs, output_names, output_dtypes, source)
            library = _compiled(folder, name, program)
            given = [np.array(a) for a in inputs]
            made = [np.full(shape, np.nan, np.float32) for shape in output_shapes]
            pointers = (ctypes.c_void_p * (len(given) + len(made)))(
                *(a.ctypes.data for a in [*given, *made])
            )
            assert grid[0] % threadgroup[0] == 0
            library.launch(grid[0] // threadgroup[0], grid[1], threadgroup[0], pointers)
            return [mx.array(a) for a in made]

        return launch

    return make


def _compiled(folder, name, program):
    path = folder / f"{name}_{hashlib.sha256(program.encode()).hexdigest()[:12]}.so"
    if not path.exists():
        source = path.with_suffix(".cpp")
        source.write_text(program)
        # Without contraction of its own: a Metal kernel of MLX rounds as it is written.
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
        subprocess.run([COMPILER, *flags, str(source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def host_kernels(sizes, folder, patch):
    """`DeltaKernels` in Metal, run on the host."""
    patch.setattr(delta_kernel.mx.fast, "metal_kernel", host_metal_kernel(folder))
    return DeltaKernels(sizes, "metal")
