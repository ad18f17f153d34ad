"""A chip made of threads of the processor: kernels run on it as they would on a GPU, only slowly."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from hiddenstate.unrolling.onchip.kernel import Kernel
from hiddenstate.unrolling.onchip.plan import Plan
from hiddenstate.unrolling.onchip.runner import OnChipRunner

# The same names as the instructions of the chip: blocks and warps meet at barriers, and a warp multiplies together.
INSTRUCTIONS = r"""
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define HERE static inline
using std::min;
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct Place { int x; };
struct Warp { pthread_barrier_t together; unsigned a[32][4], b[32][2]; float numbers[32]; };
struct Block { pthread_barrier_t together; std::vector<float> memory; std::vector<Warp> warps; };
static thread_local Place threadIdx, blockIdx;
static thread_local Block *here;
static Warp &warp() { return here->warps[threadIdx.x / 32]; }
static void together(pthread_barrier_t &barrier) { pthread_barrier_wait(&barrier); }
static void __syncthreads() { together(here->together); }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
#define __expf expf
static float __fdividef(float x, float y) { return x / y; }
static float __shfl_xor_sync(unsigned, float x, int by) {
  const int lane = threadIdx.x % 32;
  warp().numbers[lane] = x;
  together(warp().together);
  x = warp().numbers[lane ^ by];
  together(warp().together);
  return x;
}
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
static float *shared_memory() { return here->memory.data(); }
static float widened(const bf16 *, unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
static float widened(const f16 *, unsigned short bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return x;
}
static float get(const f16 *p) { return widened(p, p->bits); }
static void put(f16 *p, float x) { const _Float16 y = x; memcpy(p, &y, 2); }
static void put(bf16 *p, float x) {
  const unsigned bits = __float_as_uint(x);
  p->bits = x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static void arrive(unsigned *bar) {
  __syncthreads();
  if (threadIdx.x == 0) __atomic_fetch_add(bar, 1, __ATOMIC_RELEASE);
}
static void wait(unsigned *bar, unsigned until) {
  if (threadIdx.x == 0) while (__atomic_load_n(bar, __ATOMIC_ACQUIRE) < until) std::this_thread::yield();
  __syncthreads();
}
static uint4 far4(const void *p) { uint4 v; memcpy(&v, p, 16); return v; }
static unsigned far1(const float *p) { return __float_as_uint(*p); }
static unsigned far1(const unsigned short *p) { return *p; }
static unsigned tf32(float x) { return (__float_as_uint(x) + 0x1000) & 0xffffe000; }

static void shown(unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const int lane = threadIdx.x % 32;
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp().a[lane], a, 16);
  memcpy(warp().b[lane], b, 8);
  together(warp().together);
}
static void multiply(const float *, float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1) {
  shown(a0, a1, a2, a3, b0, b1);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int n = 0; n < 4; n++)
    for (int k = 0; k < 8; k++) {
      const int column = 2 * q + n % 2;
      c[n] += __uint_as_float(warp().a[4 * g + k % 4][n / 2 + 2 * (k / 4)]) *
              __uint_as_float(warp().b[4 * column + k % 4][k / 4]);
    }
  together(warp().together);
}
template <class S> static void multiply(const S *kind, float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                        unsigned a3, unsigned b0, unsigned b1) {
  shown(a0, a1, a2, a3, b0, b1);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int n = 0; n < 4; n++)
    for (int k = 0; k < 16; k++) {
      const int column = 2 * q + n % 2, lane = k % 8 / 2, half = 16 * (k % 2);
      c[n] += widened(kind, warp().a[4 * g + lane][n / 2 + 2 * (k / 8)] >> half) *
              widened(kind, warp().b[4 * column + lane][k / 8] >> half);
    }
  together(warp().together);
}
"""

_LAUNCH = r"""
extern "C" void launch(long steps, char **p, int grid, int threads, long shared) {
  std::vector<Block> blocks(grid);
  std::vector<std::thread> running;
  for (Block &block : blocks) {
    pthread_barrier_init(&block.together, nullptr, threads);
    block.memory.assign(shared / 4 + 4, NAN);
    block.warps = std::vector<Warp>(threads / 32);
    for (Warp &warp : block.warps) pthread_barrier_init(&warp.together, nullptr, 32);
  }
  for (int b = 0; b < grid; b++)
    for (int t = 0; t < threads; t++)
      running.emplace_back([=, &blocks] {
        threadIdx.x = t, blockIdx.x = b, here = &blocks[b];
        run(ARGUMENTS);
      });
  for (std::thread &thread : running) thread.join();
}
"""


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="chip-"))


def _library(source: str) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to make the chip with")
    inside = re.search(r" run\((long steps.*?)\)", source).group(1).split(", ")
    kinds = [argument.rsplit("*", 1)[0] + "*" for argument in inside[1:]]
    arguments = ", ".join(["steps", *(f"({kind})p[{place}]" for place, kind in enumerate(kinds))])
    text = source + _LAUNCH.replace("ARGUMENTS", arguments)
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.with_suffix(".cpp").write_text(text)
        flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-pthread"]
        subprocess.run([compiler, *flags, "-o", path, path.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(path))


class _Launch:
    def __init__(self, kernel: Kernel) -> None:
        self._library, self._kernel = _library(kernel.source(INSTRUCTIONS)), kernel

    def __call__(self, steps, tensors, *, grid, threads) -> None:
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        self._library.launch(ctypes.c_long(steps), pointers, grid, threads, ctypes.c_long(self._kernel.shared))


class EmulatedRunner(OnChipRunner):
    """A loop as one kernel, on a chip of two processors made of threads."""

    def __init__(self, loop, *, exact: bool = True, processors: int = 2) -> None:
        """Write the kernel and compile it for the processor."""
        self._prepare(loop, Kernel(Plan(loop), processors=processors, exact=exact))
        self._launch = _Launch(self.kernel)


def emulated(schedule, **options) -> None:
    """Have a schedule's loops run on the chip made of threads."""
    schedule.use([EmulatedRunner(loop, **options) for loop in schedule.loops()])
