"""The kernel's inline instructions for the chip; everything else is plain C++."""

INSTRUCTIONS = r"""
typedef unsigned char uint8_t;
typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define HERE static __device__ __forceinline__

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

HERE float *shared_memory() {
  extern __shared__ __align__(16) float memory[];
  return memory;
}

HERE float get(const f16 *p) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(p->bits));
  return x;
}
HERE void put(bf16 *p, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }
HERE void put(f16 *p, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }

/* Blocks of a group wait for each other: whatever one wrote before it arrived, the others see after they waited. */
HERE void arrive(unsigned *bar) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(bar) : "memory");
}
HERE void wait(unsigned *bar, unsigned until) {
  if (threadIdx.x == 0) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(bar) : "memory");
    while (seen < until);
  }
  __syncthreads();
}

/* What another block wrote is read past the nearest cache, which may hold what was there before. */
HERE uint4 far4(const void *p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
HERE unsigned far1(const float *p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
HERE unsigned far1(const unsigned short *p) {
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

HERE unsigned tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

/* c (16 x 8) += a times b, by a whole warp: 8 numbers deep for float32, which is rounded to tf32, 16 for others. */
#define MATRIX_UNIT(S, SHAPE, KIND)                                                                                  \
  HERE void multiply(const S *, float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,      \
                     unsigned b1) {                                                                                  \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." KIND "." KIND ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "       \
        "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                     \
  }
MATRIX_UNIT(float, "m16n8k8", "tf32")
MATRIX_UNIT(bf16, "m16n8k16", "bf16")
MATRIX_UNIT(f16, "m16n8k16", "f16")
"""
