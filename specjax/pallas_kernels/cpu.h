/* What the CPU kernels share: vectors of floats as wide as the processor's, and work that threads take in turns. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE 24 /* accumulators; of 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define TILE 12 /* of 16 */
#elif defined(__ARM_NEON)
#define LANES 4
#define TILE 24 /* of 32 */
#else
#define LANES 4
#define TILE 12 /* of 16 */
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef Vector UnalignedVector __attribute__((aligned(4), may_alias));
typedef Words UnalignedWords __attribute__((aligned(2), may_alias));
typedef Halves UnalignedHalves __attribute__((aligned(2), may_alias));

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

/* Loaded once and kept: a compiler would rather load it again for every product. */
#if defined(__x86_64__)
#define HOLD(vector) __asm__("" : "+v"(vector))
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define HOLD(vector) __asm__("" : "+w"(vector))
#define PAUSE() __asm__ volatile("yield")
#else
#define HOLD(vector) (void)0
#define PAUSE() (void)0
#endif

INLINE Vector load(const float* from) { return *(const UnalignedVector*)from; }
INLINE void store(float* to, Vector v) { *(UnalignedVector*)to = v; }
INLINE Vector all(float x) { return x - (Vector){0}; }

/* a * b + c, rounded once where the processor can. Said here and not left to the compiler, which fuses some loops and
 * not others: a number must not depend on which of them it was summed in. */
#if defined(__AVX512F__)
INLINE Vector fused(Vector a, Vector b, Vector c) { return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX__) && defined(__FMA__)
INLINE Vector fused(Vector a, Vector b, Vector c) { return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
INLINE Vector fused(Vector a, Vector b, Vector c) {
  return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
INLINE Vector fused(Vector a, Vector b, Vector c) { return a * b + c; }
#endif
#if defined(__FMA__) || defined(__aarch64__)
INLINE float fused_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fused_one(float a, float b, float c) { return a * b + c; }
#endif

INLINE float widened(uint16_t bfloat16) {
  uint32_t bits = (uint32_t)bfloat16 << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

/* Vectors `a` and `b` as one that holds the sums of their neighbours, a's in its first half. */
#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
INLINE Vector neighbours(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
}

/* The sum of each of `LANES` vectors, as one vector. Overwrites them. */
INLINE Vector sums_of(Vector* v) {
  UNROLL for (int count = LANES / 2; count > 0; count /= 2)
    UNROLL for (int i = 0; i < count; i++) v[i] = neighbours(v[2 * i], v[2 * i + 1]);
  return v[0];
}

/* The sum of a vector's lanes, by halves. */
INLINE float sum(Vector v) {
#if LANES == 16
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif LANES == 8
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
#else
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1);
#endif
  return v[0] + v[1];
}

/* Pieces of work that XLA's threads and the caller claim in turn. `job` is freed by the last that is through with it: a
 * thread that was asked for help may only come when all is done. */
typedef struct Shared Shared;
struct Shared {
  void (*piece)(void* job, int64_t index);
  void (*dispose)(void* job);
  void* job;
  int64_t pieces;
  atomic_long next, done, holders;
};

static void let_go(Shared* s) {
  if (atomic_fetch_sub(&s->holders, 1) == 1) {
    s->dispose(s->job);
    free(s);
  }
}

static void help(void* data) {
  Shared* s = data;
  int64_t index;
  while ((index = atomic_fetch_add(&s->next, 1)) < s->pieces) {
    s->piece(s->job, index);
    atomic_fetch_add(&s->done, 1);
  }
  let_go(s);
}

static XLA_FFI_Error* error(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Whether XLA could not do what was asked; what it says of that is not needed here. */
static int failed(const XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

/* Do all pieces of `job`, on as many threads as there are; returns when they are done. */
static XLA_FFI_Error* share(const XLA_FFI_CallFrame* frame, void* job, int64_t pieces, void (*piece)(void*, int64_t),
                            void (*dispose)(void*)) {
  Shared* s = calloc(1, sizeof(Shared));
  if (!s) return dispose(job), error(frame, "no memory");
  s->job = job, s->pieces = pieces, s->piece = piece, s->dispose = dispose;
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  if (failed(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&count))) threads = 1;
  int64_t helpers = (threads < pieces ? threads : pieces) - 1;
  if (helpers < 0) helpers = 0;
  atomic_store(&s->holders, helpers + 2);
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, s};
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) let_go(s);
  }
  help(s);
  while (atomic_load(&s->done) < pieces) PAUSE(); /* for as long as a piece takes at most */
  let_go(s);
  return NULL;
}

/* Whether this call only asks which version of the interface the handler is made for; answers it. */
static int asks_version(XLA_FFI_CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}
