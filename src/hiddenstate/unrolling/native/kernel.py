"""Matrix products as C with factors that are reused: packed once, multiplied at every step."""

_HEAD = r"""
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64 /* of a vector */
#define TALL 12  /* rows of a tile, so that its sums stay in registers */
#elif defined(__AVX__)
#define BYTES 32
#define TALL 6
#else
#define BYTES 16
#define TALL 6
#endif
#define DEEP(T) (2048 / (long)sizeof(T)) /* terms of a sum before it goes to memory */
#define WIDE(T) (2 * BYTES / (long)sizeof(T)) /* columns of a tile */
#define BLOCK 96 /* rows that stay near while all columns pass by */
#define APART(T) (320 / (long)sizeof(T)) /* between groups of rows, which would else fall on the same sets of a cache */
#define EVERY _Pragma("GCC unroll 16")

typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);

static inline long least(long a, long b) { return a < b ? a : b; }
"""

_FOR_TYPE = r"""
typedef REAL vec_REAL __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

/* c (rows, n) = or += a b, a tile of it; b is a panel of WIDE columns, row after row. */
static inline __attribute__((always_inline)) void tile_REAL(const int rows, long k, const REAL *a, long rs, long cs,
                                                            const REAL *b, REAL *c, long ldc, long n, int add) {
  vec_REAL s[TALL][2];
  EVERY for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = (vec_REAL){0};
  for (long p = 0; p < k; p++, a += cs, b += WIDE(REAL)) {
    const vec_REAL b0 = ((const vec_REAL *)b)[0], b1 = ((const vec_REAL *)b)[1];
    EVERY for (int i = 0; i < rows; i++) {
      s[i][0] += a[i * rs] * b0;
      s[i][1] += a[i * rs] * b1;
    }
  }
  if (n == WIDE(REAL)) {
    EVERY for (int i = 0; i < rows; i++) {
      vec_REAL *o = (vec_REAL *)(c + i * ldc);
      if (add) s[i][0] += o[0], s[i][1] += o[1];
      o[0] = s[i][0], o[1] = s[i][1];
    }
    return;
  }
  for (int i = 0; i < rows; i++) {
    REAL t[WIDE(REAL)];
    memcpy(t, s[i], sizeof t);
    for (long j = 0; j < n; j++) c[i * ldc + j] = add ? c[i * ldc + j] + t[j] : t[j];
  }
}

#define CASE(n) case n: tile_REAL(n, k, a, RS, CS, b, c, ldc, w, add); break;
#if TALL > 6
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#define RS rs
#define CS 1
static void by_rows_REAL(long rows, long k, const REAL *a, long rs, const REAL *b, REAL *c, long ldc, long w, int add) {
  switch (rows) { CASES }
}
#undef RS
#undef CS
#define RS 1
#define CS cs
static void by_columns_REAL(long rows, long k, const REAL *a, long cs, const REAL *b, REAL *c, long ldc, long w,
                            int add) {
  switch (rows) { CASES }
}
#undef RS
#undef CS
#undef CASES
#undef CASE

/* b (k, n) into panels: DEEP rows at a time, WIDE columns side by side, zeros beyond the last. */
void pack_REAL(long k, long n, const REAL *b, long rs, long cs, REAL *out) {
  for (long p0 = 0; p0 < k; p0 += DEEP(REAL)) {
    const long deep = least(DEEP(REAL), k - p0);
    for (long j0 = 0; j0 < n; j0 += WIDE(REAL), out += deep * WIDE(REAL)) {
      const long w = least(WIDE(REAL), n - j0);
      const REAL *from = b + p0 * rs + j0 * cs;
      if (w < WIDE(REAL)) memset(out, 0, deep * WIDE(REAL) * sizeof(REAL));
      if (cs == 1)
        for (long p = 0; p < deep; p++) memcpy(out + p * WIDE(REAL), from + p * rs, w * sizeof(REAL));
      else
        for (long j = 0; j < w; j++)
          for (long p = 0; p < deep; p++) out[p * WIDE(REAL) + j] = from[p * rs + j * cs];
    }
  }
}

/* a (m, k) into groups of at most TALL rows, column after column. */
static void gather_REAL(long m, long k, const REAL *a, long rs, long cs, REAL *out, long groups) {
  for (long q = 0; rs != 1 && q < groups; q++) {
    const long i0 = m * q / groups, h = m * (q + 1) / groups - i0;
    for (long i = 0; i < h; i++)
      for (long p = 0; p < k; p++) out[i0 * k + q * APART(REAL) + p * h + i] = a[(i0 + i) * rs + p * cs];
  }
  for (long p = 0; rs == 1 && p < k; p++) /* along memory: every column may lie on a page of its own */
    for (long q = 0; q < groups; q++) {
      const long i0 = m * q / groups, h = m * (q + 1) / groups - i0;
      if (h == TALL) memcpy(out + i0 * k + q * APART(REAL) + p * TALL, a + i0 + p * cs, TALL * sizeof(REAL));
      else for (long i = 0; i < h; i++) out[i0 * k + q * APART(REAL) + p * h + i] = a[i0 + i + p * cs];
    }
}

/* c (m, n) = or += a (m, k) times what `pack` made of b (k, n). */
void multiply_REAL(long m, long n, long k, const REAL *a, long rs, long cs, const REAL *packed, REAL *c, long ldc,
                   int add) {
  const long width = (n + WIDE(REAL) - 1) / WIDE(REAL) * WIDE(REAL);
  const long far = cs == 1 ? rs : rs == 1 ? cs : 0;
  const int direct = far * sizeof(REAL) % 4096 != 0; /* what lies pages apart drives itself out of the cache */
  REAL room[BLOCK * DEEP(REAL) + BLOCK * APART(REAL) / TALL] __attribute__((aligned(64)));
  for (long m0 = 0; m0 < m; m0 += BLOCK)
    for (long p0 = 0; p0 < k; p0 += DEEP(REAL)) {
      const long rows = least(BLOCK, m - m0), deep = least(DEEP(REAL), k - p0), groups = (rows + TALL - 1) / TALL;
      const REAL *here = a + m0 * rs + p0 * cs, *b = packed + p0 * width;
      if (!direct) gather_REAL(rows, deep, here, rs, cs, room, groups);
      for (long j0 = 0; j0 < n; j0 += WIDE(REAL), b += deep * WIDE(REAL))
        for (long q = 0; q < groups; q++) {
          const long i0 = rows * q / groups, h = rows * (q + 1) / groups - i0, w = least(WIDE(REAL), n - j0);
          REAL *o = c + (m0 + i0) * ldc + j0;
          if (direct && cs == 1) by_rows_REAL(h, deep, here + i0 * rs, rs, b, o, ldc, w, add || p0);
          else if (direct) by_columns_REAL(h, deep, here + i0, cs, b, o, ldc, w, add || p0);
          else by_columns_REAL(h, deep, room + i0 * deep + q * APART(REAL), h, b, o, ldc, w, add || p0);
        }
    }
}

typedef struct {
  long m, n, k, ars, acs, brs, bcs, parts_m, parts_n, deep, room, next;
  const REAL *a, *b;
  REAL *c, *work;
} task_REAL;

static void share_REAL(void *given) {
  task_REAL *t = given;
  const long parts = t->parts_m * t->parts_n, panels = (t->n + WIDE(REAL) - 1) / WIDE(REAL);
  for (long part; (part = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED)) < parts;) {
    const long x = part / t->parts_n, y = part % t->parts_n;
    const long i0 = t->m * x / t->parts_m, i1 = t->m * (x + 1) / t->parts_m;
    const long j0 = panels * y / t->parts_n * WIDE(REAL);
    const long j1 = least(t->n, panels * (y + 1) / t->parts_n * WIDE(REAL));
    REAL *packed = t->work + part * t->room;
    for (long p0 = 0; p0 < t->k; p0 += t->deep) {
      const long deep = least(t->deep, t->k - p0);
      pack_REAL(deep, j1 - j0, t->b + p0 * t->brs + j0 * t->bcs, t->brs, t->bcs, packed);
      multiply_REAL(i1 - i0, j1 - j0, deep, t->a + i0 * t->ars + p0 * t->acs, t->ars, t->acs, packed,
                    t->c + i0 * t->n + j0, t->n, p0 > 0);
    }
  }
}

/* A whole product, cut into parts that threads take one after the other. */
void product_REAL(task_REAL *task, parallel_t parallel) {
  const long parts = task->parts_m * task->parts_n;
  if (parallel && parts > 1) parallel(share_REAL, task, parts, 0);
  else share_REAL(task);
}
"""

KERNEL = _HEAD + "".join(_FOR_TYPE.replace("REAL", real) for real in ("float", "double"))
