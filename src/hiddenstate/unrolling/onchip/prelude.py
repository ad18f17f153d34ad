"""The CUDA that every kernel begins with."""

PRELUDE = r"""
typedef unsigned char uint8_t;
typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

static __device__ __forceinline__ float get(const float *p) { return *p; }
static __device__ __forceinline__ float get(const bf16 *p) { return __uint_as_float((unsigned)p->bits << 16); }
static __device__ __forceinline__ float get(const f16 *p) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(p->bits));
  return x;
}
static __device__ __forceinline__ uint8_t get(const uint8_t *p) { return *p; }
static __device__ __forceinline__ int64_t get(const int64_t *p) { return *p; }

static __device__ __forceinline__ void put(float *p, float x) { *p = x; }
static __device__ __forceinline__ void put(bf16 *p, float x) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(x));
}
static __device__ __forceinline__ void put(f16 *p, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }
static __device__ __forceinline__ void put(uint8_t *p, uint8_t x) { *p = x; }
static __device__ __forceinline__ void put(int64_t *p, int64_t x) { *p = x; }

/* A number as it is when it has been stored. */
template <class S, class X> static __device__ __forceinline__ auto kept(X x) {
  S s;
  put(&s, x);
  return get(&s);
}

/* By the fast instructions for powers of two and reciprocals: within a few ulp. */
static __device__ __forceinline__ float hs_expf(float x) { return expf(x); }
static __device__ __forceinline__ float hs_sigmoidf(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
static __device__ __forceinline__ float hs_tanhf(float x) {
  const float a = fabsf(x), s = x * x; /* for small x the difference below would lose digits */
  const float big = copysignf(1.0f - __fdividef(2.0f, __expf(2.0f * a) + 1.0f), x);
  float p = -5.70498872745e-3f;
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  return a < 0.625f ? p * s * x + x : big;
}
static __device__ __forceinline__ float hs_max(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
static __device__ __forceinline__ float hs_sum(float a, float b) { return a + b; }

/* Blocks of a group wait for each other: whatever one wrote before it arrived, the others see after they waited. */
static __device__ __forceinline__ void arrive(unsigned *bar) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(bar) : "memory");
}
static __device__ __forceinline__ void wait(unsigned *bar, unsigned until) {
  if (threadIdx.x == 0) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(bar) : "memory");
    while (seen < until);
  }
  __syncthreads();
}

/* What another block wrote is read past the nearest cache, which may hold what was there before. */
static __device__ __forceinline__ uint4 far4(const void *p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
static __device__ __forceinline__ unsigned far1(const float *p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
static __device__ __forceinline__ unsigned far1(const unsigned short *p) {
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

/* Sixteen bytes of row `row` from number k on, with zeros past the row's end. */
template <int K> static __device__ __forceinline__ uint4 bytes16(const float *a, int row, int k) {
  a += (long)row * K + k;
  if (K % 4 == 0) return k < K ? far4(a) : make_uint4(0, 0, 0, 0);
  return make_uint4(k < K ? far1(a) : 0, k + 1 < K ? far1(a + 1) : 0, k + 2 < K ? far1(a + 2) : 0,
                    k + 3 < K ? far1(a + 3) : 0);
}
template <int K, class S> static __device__ __forceinline__ uint4 bytes16(const S *b, int row, int k) {
  const unsigned short *a = (const unsigned short *)b + (long)row * K + k;
  if (K % 8 == 0) return k < K ? far4(a) : make_uint4(0, 0, 0, 0);
  unsigned v[8];
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = k + j < K ? far1(a + j) : 0;
  return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

static __device__ __forceinline__ unsigned tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
static __device__ __forceinline__ void mma_tf32(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* A 16 x 8 product over two instructions' depth; l and h are 16 bytes of rows g and g + 8. */
template <bool EXACT> static __device__ __forceinline__ void mma(const float *, float (&c)[4], uint4 l, uint4 h,
                                                                 const unsigned (&w)[4]) {
  if (!EXACT) {
    mma_tf32(c, l.x, h.x, l.y, h.y, w[0], w[1]);
    mma_tf32(c, l.z, h.z, l.w, h.w, w[2], w[3]);
    return;
  }
  /* Each factor as two numbers that the matrix unit can hold; what is left of their product is below rounding. */
  unsigned a[8] = {l.x, h.x, l.y, h.y, l.z, h.z, l.w, h.w}, ah[8], al[8], wh[4], wl[4];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    ah[j] = tf32(__uint_as_float(a[j]));
    al[j] = tf32(__uint_as_float(a[j]) - __uint_as_float(ah[j]));
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    wh[j] = tf32(__uint_as_float(w[j]));
    wl[j] = tf32(__uint_as_float(w[j]) - __uint_as_float(wh[j]));
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    mma_tf32(c, al[4 * j], al[4 * j + 1], al[4 * j + 2], al[4 * j + 3], wh[2 * j], wh[2 * j + 1]);
    mma_tf32(c, ah[4 * j], ah[4 * j + 1], ah[4 * j + 2], ah[4 * j + 3], wl[2 * j], wl[2 * j + 1]);
    mma_tf32(c, ah[4 * j], ah[4 * j + 1], ah[4 * j + 2], ah[4 * j + 3], wh[2 * j], wh[2 * j + 1]);
  }
}
#define MMA_HALF(S, NAME)                                                                                            \
  template <bool EXACT> static __device__ __forceinline__ void mma(const S *, float (&c)[4], uint4 l, uint4 h,       \
                                                                   const unsigned (&w)[4]) {                         \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "        \
        "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
        : "r"(l.x), "r"(h.x), "r"(l.y), "r"(h.y), "r"(w[0]), "r"(w[1]));                                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "        \
        "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
        : "r"(l.z), "r"(h.z), "r"(l.w), "r"(h.w), "r"(w[2]), "r"(w[3]));                                             \
  }
MMA_HALF(bf16, "bf16")
MMA_HALF(f16, "f16")

static __device__ __forceinline__ uint4 rounded(const float *, uint4 v) {
  return make_uint4(tf32(__uint_as_float(v.x)), tf32(__uint_as_float(v.y)), tf32(__uint_as_float(v.z)),
                    tf32(__uint_as_float(v.w)));
}
template <class S> static __device__ __forceinline__ uint4 rounded(const S *, uint4 v) { return v; }

static __device__ __forceinline__ unsigned packed(const float *w, long step, int k, int j, int K, bool exact) {
  const float x = k + j < K ? w[(long)(k + j) * step] : 0.0f;
  return exact ? __float_as_uint(x) : tf32(x);
}
template <class S> static __device__ __forceinline__ unsigned packed(const S *w, long step, int k, int j, int K, bool) {
  const unsigned lo = k + 2 * j < K ? w[(long)(k + 2 * j) * step].bits : 0;
  const unsigned hi = k + 2 * j + 1 < K ? w[(long)(k + 2 * j + 1) * step].bits : 0;
  return lo | hi << 16;
}

/* A thread's share of a weight. Which numbers of a row meet in one instruction is of no matter, as long as row and
   weight agree: each thread takes 16 bytes in one piece. Column n is unit n % UNITS of part n / UNITS. */
template <class S, bool EXACT, int K, int KB, int NT, int UNITS, int PARTS>
static __device__ __forceinline__ void load_weight(unsigned (&w)[KB][NT][4], const S *from, long inner, long outer,
                                                   const int (&parts)[PARTS], int first, int units) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, per = 16 / sizeof(S);
#pragma unroll
  for (int kb = 0; kb < KB; kb++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      const int n = nt * 8 + (lane >> 2), part = n / UNITS, unit = first + n % UNITS;
      const bool there = part < PARTS && unit < units;
      const S *column = from + (there ? (parts[part < PARTS ? part : 0] + unit) * outer : 0);
      const int k = (warp * KB + kb) * 4 * per + (lane & 3) * per;
#pragma unroll
      for (int j = 0; j < 4; j++) w[kb][nt][j] = there ? packed(column, inner, k, j, K, EXACT) : 0;
    }
}

/* Rows on their way from memory, a chunk of a warp's slice at a time. */
template <class S, int K, int KB, int CHUNK, int ROWS> struct Incoming {
  uint4 l[CHUNK], h[CHUNK];
  __device__ __forceinline__ void load(const S *a, int first, int from) {
    constexpr int per = 16 / sizeof(S);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int low = min(first + (lane >> 2), ROWS - 1), high = min(first + (lane >> 2) + 8, ROWS - 1);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const int k = (warp * KB + from + i) * 4 * per + (lane & 3) * per;
      l[i] = from + i < KB ? bytes16<K>(a, low, k) : make_uint4(0, 0, 0, 0);
      h[i] = from + i < KB && ROWS > 8 ? bytes16<K>(a, high, k) : make_uint4(0, 0, 0, 0);
    }
  }
};

/* Rows times a weight; every warp takes a slice of the depth, and leaves its part of the sum in shared memory. */
template <class S, bool EXACT, int K, int KB, int NT, int MT, int CHUNK, int PAD, int ROWS>
static __device__ __forceinline__ void product(float *partial, const S *a, int first, const unsigned (&w)[KB][NT][4]) {
  constexpr int CHUNKS = (KB + CHUNK - 1) / CHUNK, ALL = CHUNKS * MT;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  float c[MT][NT][4] = {};
  Incoming<S, K, KB, CHUNK, ROWS> in[2];
  in[0].load(a, first, 0);
#pragma unroll
  for (int n = 0; n < ALL; n++) {
    const int mt = n / CHUNKS, from = n % CHUNKS * CHUNK;
    if (n + 1 < ALL) in[(n + 1) % 2].load(a, first + (n + 1) / CHUNKS * 16, (n + 1) % CHUNKS * CHUNK);
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
      if (from + i < KB) {
        const uint4 l = EXACT ? in[n % 2].l[i] : rounded(a, in[n % 2].l[i]);
        const uint4 h = EXACT ? in[n % 2].h[i] : rounded(a, in[n % 2].h[i]);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma<EXACT>(a, c[mt][nt], l, h, w[from + i][nt]);
      }
  }
#pragma unroll
  for (int mt = 0; mt < MT; mt++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float *to = partial + ((warp * MT + mt) * 16 + g) * PAD + nt * 8 + 2 * q;
      *(float2 *)to = make_float2(c[mt][nt][0], c[mt][nt][1]);
      *(float2 *)(to + 8 * PAD) = make_float2(c[mt][nt][2], c[mt][nt][3]);
    }
}

/* The warps' parts of a product's element, added up. */
template <int WARPS, int MT, int PAD>
static __device__ __forceinline__ float gathered(const float *partial, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) total += partial[(warp * MT * 16 + row) * PAD + column];
  return total;
}
"""
