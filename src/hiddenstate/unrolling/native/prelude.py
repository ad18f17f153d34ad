"""The C code at the beginning of every compiled loop."""

PRELUDE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef void (*sgemm_t)(const char *, const char *, const int *, const int *, const int *, const float *,
                        const float *, const int *, const float *, const int *, const float *, float *, const int *);
typedef void (*dgemm_t)(const char *, const char *, const int *, const int *, const int *, const double *,
                        const double *, const int *, const double *, const int *, const double *, double *,
                        const int *);
typedef void (*pack_float_t)(long, long, const float *, long, long, float *);
typedef void (*pack_double_t)(long, long, const double *, long, long, double *);
typedef void (*multiply_float_t)(long, long, long, const float *, long, long, const float *, float *, long, int);
typedef void (*multiply_double_t)(long, long, long, const double *, long, long, const double *, double *, long, int);
typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
  long threads;
  sgemm_t sgemm;
  dgemm_t dgemm;
  pack_float_t pack_float;
  pack_double_t pack_double;
  multiply_float_t multiply_float;
  multiply_double_t multiply_double;
  parallel_t parallel;
} tools_t;

#define sgemm tools->sgemm
#define dgemm tools->dgemm
#define pack_float tools->pack_float
#define pack_double tools->pack_double
#define multiply_float tools->multiply_float
#define multiply_double tools->multiply_double
#define threads tools->threads

#define SIMD _Pragma("omp simd")

/* exp by two steps of range reduction and a polynomial of degree six: within 2 ulp, and free of branches. The power of
   two is multiplied in by halves, since the whole of it may be beyond what a float can hold. */
static inline float hs_power(int32_t n) {
  union { int32_t i; float f; } u;
  u.i = (n + 127) << 23;
  return u.f;
}
static inline float hs_expf(float x) {
  float y = x > 89.0f ? 89.0f : x;
  y = y < -104.0f ? -104.0f : y;
  float n = __builtin_floorf(y * 1.44269504088896341f + 0.5f);
  float r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t whole = (int32_t)n, half = whole >> 1;
  float e = p * hs_power(half) * hs_power(whole - half);
  return x != x ? x : e;
}

static inline float hs_sigmoidf(float x) { return 1.0f / (1.0f + hs_expf(-x)); }

static inline float hs_tanhf(float x) {
  float a = __builtin_fabsf(x);
  float big = 1.0f - 2.0f / (hs_expf(2.0f * a) + 1.0f);
  float s = x * x; /* for small x the difference above would lose digits */
  float p = -5.70498872745e-3f;
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  float small = p * s * a + a;
  float y = a < 0.625f ? small : big;
  return x != x ? x : __builtin_copysignf(y, x);
}

static inline double hs_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

/* out(1, n) = a(1, k) times b, with b stored by columns: n dot products. */
#define DOTS(T)                                                                                       \
  static void hs_dots_##T(int n, int k, const T *a, const T *b, long ldb, T *out) {                   \
    int j = 0;                                                                                        \
    for (; j + 4 <= n; j += 4) {                                                                      \
      const T *r0 = b + (long)j * ldb, *r1 = r0 + ldb, *r2 = r1 + ldb, *r3 = r2 + ldb;                \
      T s0 = 0, s1 = 0, s2 = 0, s3 = 0;                                                               \
      _Pragma("omp simd reduction(+ : s0, s1, s2, s3)") for (int i = 0; i < k; i++) {                 \
        s0 += a[i] * r0[i];                                                                           \
        s1 += a[i] * r1[i];                                                                           \
        s2 += a[i] * r2[i];                                                                           \
        s3 += a[i] * r3[i];                                                                           \
      }                                                                                               \
      out[j] = s0, out[j + 1] = s1, out[j + 2] = s2, out[j + 3] = s3;                                 \
    }                                                                                                 \
    for (; j < n; j++) {                                                                              \
      const T *r = b + (long)j * ldb;                                                                 \
      T s = 0;                                                                                        \
      _Pragma("omp simd reduction(+ : s)") for (int i = 0; i < k; i++) s += a[i] * r[i];              \
      out[j] = s;                                                                                     \
    }                                                                                                 \
  }                                                                                                   \
  /* out(1, n) = a(1, k) times b, with b stored by rows: k rows added up. */                          \
  static void hs_rows_##T(int n, int k, const T *a, const T *b, long ldb, T *out) {                   \
    for (int j = 0; j < n; j++) out[j] = 0;                                                           \
    int i = 0;                                                                                        \
    for (; i + 4 <= k; i += 4) {                                                                      \
      const T *r0 = b + (long)i * ldb, *r1 = r0 + ldb, *r2 = r1 + ldb, *r3 = r2 + ldb;                \
      T a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];                                       \
      SIMD for (int j = 0; j < n; j++) out[j] += a0 * r0[j] + a1 * r1[j] + a2 * r2[j] + a3 * r3[j];   \
    }                                                                                                 \
    for (; i < k; i++) {                                                                              \
      const T *r = b + (long)i * ldb;                                                                 \
      T s = a[i];                                                                                     \
      SIMD for (int j = 0; j < n; j++) out[j] += s * r[j];                                            \
    }                                                                                                 \
  }
DOTS(float)
DOTS(double)
"""

# All steps for the rows from `lo` to `hi`; threads take parts of the rows, and never wait for each other.
LOOP = r"""
static void steps_of(long lo, long hi, long part, long steps, char **p, const tools_t *tools) {
  @pointers@
  char *mine = p[@last@] + part * @mine@L;
@fixed@
  for (long n = 0; n < steps; n++) {
    const long t = @step@;
@body@
  }
}

typedef struct {
  long steps, parts, next;
  char **p;
  const tools_t *tools;
} job_t;

static void share(void *given) {
  job_t *job = given;
  for (long part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->parts;)
    steps_of(@rows@L * part / job->parts, @rows@L * (part + 1) / job->parts, part, job->steps, job->p, job->tools);
}

void run(long steps, long parts, char **p, const tools_t *tools) {
  @pointers@
@fixed@
  @packs@
  job_t job = {steps, parts, 0, p, tools};
  if (parts > 1) tools->parallel(share, &job, parts, 0);
  else share(&job);
}
"""


def fill(text: str, **values: str) -> str:
    """Return a text with each name between two @ replaced."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
