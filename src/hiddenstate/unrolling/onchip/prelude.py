"""The C++ that every kernel begins with."""

PRELUDE = r"""
HERE float get(const float *p) { return *p; }
HERE float get(const bf16 *p) { return __uint_as_float((unsigned)p->bits << 16); }
HERE uint8_t get(const uint8_t *p) { return *p; }
HERE int64_t get(const int64_t *p) { return *p; }
HERE void put(float *p, float x) { *p = x; }
HERE void put(uint8_t *p, uint8_t x) { *p = x; }
HERE void put(int64_t *p, int64_t x) { *p = x; }

/* A number as it is when it has been stored. */
template <class S, class X> HERE auto kept(X x) {
  S s;
  put(&s, x);
  return get(&s);
}

/* By the fast instructions for powers of two and reciprocals: within a few ulp. */
HERE float hs_expf(float x) { return expf(x); }
HERE float hs_sigmoidf(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
HERE float hs_tanhf(float x) {
  const float a = fabsf(x), s = x * x; /* for small x the difference below would lose digits */
  const float big = 1.0f - __fdividef(2.0f, __expf(2.0f * a) + 1.0f);
  float p = -5.70498872745e-3f;
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  return copysignf(a < 0.625f ? p * s * a + a : big, x);
}
HERE float hs_max(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
HERE float hs_sum(float a, float b) { return a + b; }

/* Sixteen bytes of row `row` from number k on, with zeros past the row's end. */
template <int K> HERE uint4 bytes16(const float *a, int row, int k) {
  a += (long)row * K + k;
  if (K % 4 == 0) return k < K ? far4(a) : make_uint4(0, 0, 0, 0);
  return make_uint4(k < K ? far1(a) : 0, k + 1 < K ? far1(a + 1) : 0, k + 2 < K ? far1(a + 2) : 0,
                    k + 3 < K ? far1(a + 3) : 0);
}
template <int K, class S> HERE uint4 bytes16(const S *b, int row, int k) {
  const unsigned short *a = (const unsigned short *)b + (long)row * K + k;
  if (K % 8 == 0) return k < K ? far4(a) : make_uint4(0, 0, 0, 0);
  unsigned v[8];
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = k + j < K ? far1(a + j) : 0;
  return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

HERE bool is_finite(unsigned x) { return (x & 0x7f800000) != 0x7f800000; }

/* What the matrix unit's rounding leaves of a number; of infinity and of NaN nothing. */
HERE unsigned left(unsigned x, unsigned rounded) {
  return is_finite(rounded) ? tf32(__uint_as_float(x) - __uint_as_float(rounded)) : 0;
}
/* The factor of what is left of the other one: times a small number of another sign, infinity would become NaN. */
HERE unsigned finite(unsigned rounded) { return is_finite(rounded) ? rounded : 0; }

/* A product over two instructions' depth; l and h are 16 bytes of rows g and g + 8. */
template <bool EXACT, class S> HERE void mma(const S *kind, float (&c)[4], uint4 l, uint4 h, const unsigned (&w)[4]) {
  if (!EXACT) {
    multiply(kind, c, l.x, h.x, l.y, h.y, w[0], w[1]);
    multiply(kind, c, l.z, h.z, l.w, h.w, w[2], w[3]);
    return;
  }
  /* Each factor as two numbers that the matrix unit can hold; what is left of their product is below rounding. */
  unsigned a[8] = {l.x, h.x, l.y, h.y, l.z, h.z, l.w, h.w}, ah[8], al[8], af[8], wh[4], wl[4], wf[4];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    ah[j] = tf32(__uint_as_float(a[j]));
    al[j] = left(a[j], ah[j]);
    af[j] = finite(ah[j]);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    wh[j] = tf32(__uint_as_float(w[j]));
    wl[j] = left(w[j], wh[j]);
    wf[j] = finite(wh[j]);
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    multiply(kind, c, al[4 * j], al[4 * j + 1], al[4 * j + 2], al[4 * j + 3], wf[2 * j], wf[2 * j + 1]);
    multiply(kind, c, af[4 * j], af[4 * j + 1], af[4 * j + 2], af[4 * j + 3], wl[2 * j], wl[2 * j + 1]);
    multiply(kind, c, ah[4 * j], ah[4 * j + 1], ah[4 * j + 2], ah[4 * j + 3], wh[2 * j], wh[2 * j + 1]);
  }
}

HERE uint4 rounded(const float *, uint4 v) {
  return make_uint4(tf32(__uint_as_float(v.x)), tf32(__uint_as_float(v.y)), tf32(__uint_as_float(v.z)),
                    tf32(__uint_as_float(v.w)));
}
template <class S> HERE uint4 rounded(const S *, uint4 v) { return v; }

HERE unsigned packed(const float *w, long step, int k, int j, int K, bool exact) {
  const float x = k + j < K ? w[(long)(k + j) * step] : 0.0f;
  return exact ? __float_as_uint(x) : tf32(x);
}
template <class S> HERE unsigned packed(const S *w, long step, int k, int j, int K, bool) {
  const unsigned lo = k + 2 * j < K ? w[(long)(k + 2 * j) * step].bits : 0;
  const unsigned hi = k + 2 * j + 1 < K ? w[(long)(k + 2 * j + 1) * step].bits : 0;
  return lo | hi << 16;
}

/* A thread's share of a weight. Which numbers of a row meet in one instruction is of no matter, as long as row and
   weight agree: each thread takes 16 bytes in one piece. Column n is unit n % UNITS of part n / UNITS. */
template <class S, bool EXACT, int K, int KB, int NT, int UNITS, int PARTS>
HERE void load_weight(unsigned (&w)[KB][NT][4], const S *from, long inner, long outer, const int (&parts)[PARTS],
                      int first, int units) {
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
HERE void product(float *partial, const S *a, int first, const unsigned (&w)[KB][NT][4]) {
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
template <int WARPS, int MT, int PAD> HERE float gathered(const float *partial, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) total += partial[(warp * MT * 16 + row) * PAD + column];
  return total;
}
"""
