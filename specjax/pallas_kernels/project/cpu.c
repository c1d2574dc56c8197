/* y = x @ W.T for few rows of x: `W [outer, inner]` and `x [rows, inner]`, both float32 or both bfloat16, `y [rows, outer]`
 * float32.
 *
 * Decoding reads every weight once for a handful of rows, so the product should take as long as reading W. What it takes:
 * the weights of the next outputs are fetched while those at hand are multiplied (the hardware alone does not keep the
 * memory busy), no copy of W is made, and a register tile is as many outputs by rows as the registers hold.
 *
 * Every number of y is summed in one order, whatever the number of rows: a token's result does not depend on what it is
 * verified beside.
 */
#include "cpu.h"

#define MOST_ROWS 8 /* of one tile */
#define CHUNK 96    /* outputs that a thread claims at a time: a multiple of the outputs of each tile */
#define OUTPUTS(rows) (TILE / (rows) < 1 ? 1 : TILE / (rows) > 8 ? 8 : TILE / (rows))

/* `outputs` by `rows` numbers of y. Both are constants where this is inlined, so that the sums stay in registers. */
INLINE void tile_float(const float* w, const float* x, float* y, int64_t inner, int64_t outer, const int outputs,
                       const int rows) {
  Vector sums[8][MOST_ROWS];
  UNROLL for (int o = 0; o < outputs; o++)
    UNROLL for (int r = 0; r < rows; r++) sums[o][r] = (Vector){0};
  int64_t k = 0;
  for (; k + LANES <= inner; k += LANES) {
    Vector weights[8];
    UNROLL for (int o = 0; o < outputs; o++) {
      __builtin_prefetch(w + (outputs + o) * inner + k);
      weights[o] = load(w + o * inner + k);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      Vector values = load(x + r * inner + k);
      HOLD(values);
      UNROLL for (int o = 0; o < outputs; o++) sums[o][r] = fused(weights[o], values, sums[o][r]);
    }
  }
  UNROLL for (int o = 0; o < outputs; o++)
    UNROLL for (int r = 0; r < rows; r++) {
      float total = sum(sums[o][r]);
      for (int64_t i = k; i < inner; i++) total = fused_one(w[o * inner + i], x[r * inner + i], total);
      y[r * outer + o] = total;
    }
}

/* The same for bfloat16 weights: a word holds two, and x comes as floats in the order in which a vector of words is taken
 * apart (see `spread`). */
INLINE void tile_bfloat16(const uint16_t* w, const float* x, float* y, int64_t inner, int64_t outer, const int outputs,
                          const int rows) {
  Vector sums[8][MOST_ROWS];
  UNROLL for (int o = 0; o < outputs; o++)
    UNROLL for (int r = 0; r < rows; r++) sums[o][r] = (Vector){0};
  int64_t k = 0;
  for (; k + 2 * LANES <= inner; k += 2 * LANES) {
    Words words[8];
    UNROLL for (int o = 0; o < outputs; o++) {
      __builtin_prefetch(w + (outputs + o) * inner + k);
      words[o] = *(const UnalignedWords*)(w + o * inner + k);
    }
    UNROLL for (int odd = 0; odd < 2; odd++) {
      Vector weights[8];
      UNROLL for (int o = 0; o < outputs; o++) weights[o] = (Vector)(odd ? words[o] & 0xffff0000u : words[o] << 16);
      UNROLL for (int r = 0; r < rows; r++) {
        Vector values = load(x + r * inner + k + odd * LANES);
        HOLD(values);
        UNROLL for (int o = 0; o < outputs; o++) sums[o][r] = fused(weights[o], values, sums[o][r]);
      }
    }
  }
  UNROLL for (int o = 0; o < outputs; o++)
    UNROLL for (int r = 0; r < rows; r++) {
      float total = sum(sums[o][r]);
      for (int64_t i = k; i < inner; i++) total = fused_one(widened(w[o * inner + i]), x[r * inner + i], total);
      y[r * outer + o] = total;
    }
}

/* bfloat16 rows as floats; of every two vectors the even ones first. What does not fill two vectors stays in order. */
static void spread(const uint16_t* from, float* to, int64_t rows, int64_t inner) {
  for (int64_t r = 0; r < rows; r++, from += inner, to += inner) {
    int64_t k = 0;
    for (; k + 2 * LANES <= inner; k += 2 * LANES)
      for (int i = 0; i < LANES; i++) {
        to[k + i] = widened(from[k + 2 * i]);
        to[k + LANES + i] = widened(from[k + 2 * i + 1]);
      }
    for (; k < inner; k++) to[k] = widened(from[k]);
  }
}

typedef void Tiles(const void* w, const float* x, float* y, int64_t inner, int64_t outer, int64_t outputs);

/* `outputs` of one group of rows: whole tiles, then one output at a time. */
#define TILES(type, weight, rows)                                                                                     \
  static void type##_##rows(const void* weights, const float* x, float* y, int64_t inner, int64_t outer,              \
                            int64_t outputs) {                                                                        \
    const weight* w = weights;                                                                                        \
    int64_t o = 0;                                                                                                    \
    for (; o + OUTPUTS(rows) <= outputs; o += OUTPUTS(rows))                                                          \
      tile_##type(w + o * inner, x, y + o, inner, outer, OUTPUTS(rows), rows);                                        \
    for (; o < outputs; o++) tile_##type(w + o * inner, x, y + o, inner, outer, 1, rows);                             \
  }
#define EVERY(type, weight)                                                                                           \
  TILES(type, weight, 1) TILES(type, weight, 2) TILES(type, weight, 3) TILES(type, weight, 4)                         \
  TILES(type, weight, 5) TILES(type, weight, 6) TILES(type, weight, 7) TILES(type, weight, 8)                         \
  static Tiles* const type##_tiles[] = {type##_1, type##_2, type##_3, type##_4, type##_5, type##_6, type##_7, type##_8};

EVERY(float, float)
EVERY(bfloat16, uint16_t)

typedef struct {
  const char* w;
  const float* x;
  float* y;
  float* scratch;
  int64_t rows, inner, outer, size, group;
  Tiles* const* tiles;
} Product;

static void dispose(void* job) {
  free(((Product*)job)->scratch);
  free(job);
}

static void multiply(void* job, int64_t chunk) {
  Product* p = job;
  int64_t first = chunk * CHUNK, last = first + CHUNK < p->outer ? first + CHUNK : p->outer;
  /* with several groups of rows, few outputs at a time: their weights wait for the next group in the first cache */
  int64_t step = p->rows > p->group ? OUTPUTS(MOST_ROWS) * 2 : last - first;
  for (int64_t o = first; o < last; o += step) {
    int64_t outputs = o + step < last ? step : last - o;
    for (int64_t r = 0; r < p->rows; r += p->group) {
      int64_t rows = r + p->group < p->rows ? p->group : p->rows - r;
      p->tiles[rows - 1](p->w + o * p->inner * p->size, p->x + r * p->inner, p->y + r * p->outer + o, p->inner, p->outer,
                         outputs);
    }
  }
}

XLA_FFI_Error* specjax_project(XLA_FFI_CallFrame* frame) {
  if (asks_version(frame)) return NULL;
  if (frame->args.size != 2 || frame->rets.size != 1) return error(frame, "specjax_project takes a weight and x");
  const XLA_FFI_Buffer *w = frame->args.args[0], *x = frame->args.args[1], *y = frame->rets.rets[0];
  if (w->rank != 2 || x->rank != 2 || y->rank != 2 || x->dims[1] != w->dims[1] || y->dims[0] != x->dims[0] ||
      y->dims[1] != w->dims[0] || x->dtype != w->dtype || y->dtype != XLA_FFI_DataType_F32)
    return error(frame, "specjax_project takes weight [o, i] and x [n, i] of one type, and gives float32 [n, o]");
  int wide = w->dtype == XLA_FFI_DataType_F32;
  if (!wide && w->dtype != XLA_FFI_DataType_BF16) return error(frame, "specjax_project takes float32 or bfloat16");

  Product* p = calloc(1, sizeof(Product));
  if (!p) return error(frame, "no memory");
  p->w = w->data, p->x = x->data, p->y = y->data;
  p->rows = x->dims[0], p->inner = w->dims[1], p->outer = w->dims[0];
  p->size = wide ? 4 : 2;
  p->tiles = wide ? float_tiles : bfloat16_tiles;
  int64_t groups = (p->rows + MOST_ROWS - 1) / MOST_ROWS;
  p->group = groups ? (p->rows + groups - 1) / groups : 1;
  if (!wide) {
    p->scratch = malloc(sizeof(float) * p->rows * p->inner + 1);
    if (!p->scratch) return dispose(p), error(frame, "no memory");
    spread(x->data, p->scratch, p->rows, p->inner);
    p->x = p->scratch;
  }
  return share(frame, p, (p->outer + CHUNK - 1) / CHUNK, multiply, dispose);
}
