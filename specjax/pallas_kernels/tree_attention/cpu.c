/* Queries over the committed slots of a paged cache and a tile of further keys under an explicit mask: `reference.attend`.
 *
 * Keys and values are read where they lie, a block of slots at a time for all queries of a piece; the softmax runs along
 * (arXiv 1805.02867). A piece is some queries of one request whose heads share keys and values.
 */
#include <math.h>

#include "cpu.h"

#define BLOCK 64   /* slots at a time: their keys and values stay in the first cache */
#define QUERIES 12 /* of a piece, at most */
#define SQUARE 4   /* queries, and vectors, whose sums of weighted values are in registers at a time */

typedef struct {
  const void *q, *k, *v, *k_pages, *v_pages;
  const uint8_t* seen;
  const int32_t *table, *committed, *position, *live;
  float* out;
  int64_t rows, heads, dim, tile, groups, page_size, columns, parts, per_part;
  float scale, softcap;
  int64_t window;
  int wide;
} Attention;

/* Queries of a piece, scaled, and their softmax so far. */
typedef struct {
  int count;
  int64_t row[QUERIES], position[QUERIES];
  float top[QUERIES], total[QUERIES];
  float weights[QUERIES][BLOCK];
  float *q, *out; /* [count, dim] */
} Piece;

/* Where a block's keys and values are, and who sees what of it. */
typedef struct {
  const void *keys, *values;
  int64_t stride, count;
  int64_t slot;        /* the first one's; -1 in the tile, whose mask is `seen` */
  const uint8_t* seen; /* a byte for each row and slot of the tile */
} Block;

INLINE Vector load_as(const void* from, int64_t index, const int wide) {
  if (wide) return load((const float*)from + index);
  Halves halves = *(const UnalignedHalves*)((const uint16_t*)from + index);
  return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

/* exp(x) for x <= 0, and 0 where that is below 2^-126. 2^n by the exponent's bits, the rest by a polynomial. */
INLINE Vector exponential(Vector x) {
  Ints kept = x > -87.0f;
  x = (Vector)(kept & (Ints)x);
  Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  Vector whole = __builtin_convertvector(n, Vector);
  Vector r = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* ln 2 in two parts */
  Vector p = all(1.0f / 5040) * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (Vector)(kept & (Ints)(p * (Vector)((n + 127) << 23)));
}

/* Scores of query i with the block's keys, those that it does not see at -infinity. */
INLINE void score(const Attention* a, Piece* p, const int i, const Block* block, const int64_t dim, const int wide) {
  const float* q = p->q + i * dim;
  float* scores = p->weights[i];
  for (int64_t s = 0; s < block->count; s += LANES) {
    int64_t left = block->count - s < LANES ? block->count - s : LANES;
    Vector sums[LANES];
    UNROLL for (int j = 0; j < LANES; j++) {
      int64_t at = (s + (j < left ? j : 0)) * block->stride;
      sums[j] = load_as(block->keys, at, wide) * load(q);
      UNROLL for (int64_t d = LANES; d < dim; d += LANES)
        sums[j] = fused(load_as(block->keys, at + d, wide), load(q + d), sums[j]);
    }
    store(scores + s, sums_of(sums));
    for (int64_t j = left; j < LANES; j++) scores[s + j] = -INFINITY;
  }
  if (a->softcap > 0)
    for (int64_t s = 0; s < block->count; s++) scores[s] = a->softcap * tanhf(scores[s] / a->softcap);
  if (block->slot < 0) {
    for (int64_t s = 0; s < block->count; s++)
      if (!block->seen[p->row[i] * a->tile + s]) scores[s] = -INFINITY;
  } else if (a->window) {
    int64_t hidden = p->position[i] - a->window + 1 - block->slot;
    for (int64_t s = 0; s < hidden && s < block->count; s++) scores[s] = -INFINITY;
  }
}

/* Scores of query i become weights; what was summed so far shrinks to the new maximum. */
INLINE void weigh(Piece* p, const int i, int64_t count, const int64_t dim) {
  float* weights = p->weights[i];
  Vector most = load(weights);
  for (int64_t s = LANES; s < count; s += LANES) {
    Vector next = load(weights + s);
    Ints more = next > most;
    most = (Vector)((more & (Ints)next) | (~more & (Ints)most));
  }
  float top = p->top[i];
  for (int j = 0; j < LANES; j++) top = most[j] > top ? most[j] : top;
  if (top > p->top[i]) {
    float shrink = expf(p->top[i] - top);
    p->top[i] = top;
    p->total[i] *= shrink;
    for (int64_t d = 0; d < dim; d += LANES) store(p->out + i * dim + d, load(p->out + i * dim + d) * shrink);
  }
  Vector total = {0};
  for (int64_t s = 0; s < count; s += LANES) {
    /* a query that has seen nothing yet has no maximum, and no weights */
    Vector w = top == -INFINITY ? (Vector){0} : exponential(load(weights + s) - top);
    store(weights + s, w);
    total += w;
  }
  p->total[i] += sum(total);
}

/* Adds the block's weighted values to `queries` rows of sums from i on, `vectors` wide from d on. */
INLINE void add_values(Piece* p, int i, const Block* block, int64_t d, const int64_t dim, const int queries,
                       const int vectors, const int wide) {
  Vector sums[SQUARE][SQUARE];
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int n = 0; n < vectors; n++) sums[j][n] = load(p->out + (i + j) * dim + d + n * LANES);
  for (int64_t s = 0; s < block->count; s++) {
    Vector values[SQUARE];
    UNROLL for (int n = 0; n < vectors; n++) {
      values[n] = load_as(block->values, s * block->stride + d + n * LANES, wide);
      HOLD(values[n]);
    }
    UNROLL for (int j = 0; j < queries; j++) {
      Vector weight = all(p->weights[i + j][s]);
      UNROLL for (int n = 0; n < vectors; n++) sums[j][n] = fused(values[n], weight, sums[j][n]);
    }
  }
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int n = 0; n < vectors; n++) store(p->out + (i + j) * dim + d + n * LANES, sums[j][n]);
}

INLINE void add_block(const Attention* a, Piece* p, const Block* block, const int64_t dim, const int wide) {
  for (int i = 0; i < p->count; i++) {
    score(a, p, i, block, dim, wide);
    weigh(p, i, block->count, dim);
  }
  int i = 0;
  for (; i + SQUARE <= p->count; i += SQUARE) {
    int64_t d = 0;
    for (; d + SQUARE * LANES <= dim; d += SQUARE * LANES) add_values(p, i, block, d, dim, SQUARE, SQUARE, wide);
    for (; d < dim; d += LANES) add_values(p, i, block, d, dim, SQUARE, 1, wide);
  }
  for (; i < p->count; i++) {
    int64_t d = 0;
    for (; d + SQUARE * LANES <= dim; d += SQUARE * LANES) add_values(p, i, block, d, dim, 1, SQUARE, wide);
    for (; d < dim; d += LANES) add_values(p, i, block, d, dim, 1, 1, wide);
  }
}

#define ADD(name, dim, wide) \
  static void name(const Attention* a, Piece* p, const Block* block) { add_block(a, p, block, dim, wide); }
ADD(add_float_64, 64, 1)
ADD(add_float_128, 128, 1)
ADD(add_float, a->dim, 1)
ADD(add_bfloat16_64, 64, 0)
ADD(add_bfloat16_128, 128, 0)
ADD(add_bfloat16, a->dim, 0)

static void attend(void* job, int64_t index) {
  const Attention* a = job;
  int64_t part = index % a->parts, group = index / a->parts % a->groups, request = index / a->parts / a->groups;
  int64_t ratio = a->heads / a->groups, dim = a->dim, size = a->wide ? 4 : 2;
  int64_t first = part * a->per_part, last = first + a->per_part;
  int64_t live = (a->live[request] < a->rows ? a->live[request] : a->rows) * ratio;
  float scratch[2 * QUERIES * dim];
  Piece p = {.q = scratch, .out = scratch + QUERIES * dim};
  memset(p.out, 0, sizeof(float) * QUERIES * dim);
  int64_t lowest = INT64_MAX;
  for (int64_t i = first; i < last && i < live; i++, p.count++) {
    int64_t row = i / ratio, head = group * ratio + i % ratio;
    int64_t from = ((request * a->rows + row) * a->heads + head) * dim;
    for (int64_t d = 0; d < dim; d += LANES)
      store(p.q + p.count * dim + d, load_as(a->q, from + d, a->wide) * a->scale);
    p.row[p.count] = row, p.position[p.count] = a->position[request * a->rows + row];
    p.top[p.count] = -INFINITY, p.total[p.count] = 0;
    if (p.position[p.count] < lowest) lowest = p.position[p.count];
  }
  void (*add)(const Attention*, Piece*, const Block*) =
      dim == 64 ? (a->wide ? add_float_64 : add_bfloat16_64)
                : dim == 128 ? (a->wide ? add_float_128 : add_bfloat16_128) : (a->wide ? add_float : add_bfloat16);
  if (p.count) {
    for (int64_t s = 0; s < a->tile; s += BLOCK) {
      int64_t at = ((request * a->tile + s) * a->groups + group) * dim * size;
      Block block = {.keys = (const char*)a->k + at,
                     .values = (const char*)a->v + at,
                     .stride = a->groups * dim,
                     .count = a->tile - s < BLOCK ? a->tile - s : BLOCK,
                     .slot = -1,
                     .seen = a->seen + request * a->rows * a->tile + s};
      add(a, &p, &block);
    }
    int64_t slot = a->window && lowest - a->window + 1 > 0 ? lowest - a->window + 1 : 0;
    while (slot < a->committed[request]) {
      int64_t page = a->table[request * a->columns + slot / a->page_size], offset = slot % a->page_size;
      int64_t count = a->page_size - offset < BLOCK ? a->page_size - offset : BLOCK;
      if (count > a->committed[request] - slot) count = a->committed[request] - slot;
      int64_t at = ((page * a->groups + group) * a->page_size + offset) * dim * size;
      Block block = {.keys = (const char*)a->k_pages + at,
                     .values = (const char*)a->v_pages + at,
                     .stride = dim,
                     .count = count,
                     .slot = slot};
      add(a, &p, &block);
      slot += count;
    }
  }
  for (int64_t i = first; i < last && i < a->rows * ratio; i++) {
    int64_t row = i / ratio, head = group * ratio + i % ratio;
    float* out = a->out + ((request * a->rows + row) * a->heads + head) * dim;
    if (i - first < p.count)
      for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(p.out + (i - first) * dim + d) / p.total[i - first]);
    else
      memset(out, 0, sizeof(float) * dim);
  }
}

/* Operands: q [b, n, h, f], k and v [b, j, g, f], seen [b, n, j], k_pages and v_pages [p, g, s, f], table [b, m],
 * committed [b], position [b, n], live [b] (rows of each request; later ones give 0), options [3] (scale, window or 0,
 * softcap or 0). Result: [b, n, h, f] of float32. f is a multiple of `LANES`. */
XLA_FFI_Error* specjax_tree_attention(XLA_FFI_CallFrame* frame) {
  if (asks_version(frame)) return NULL;
  if (frame->args.size != 11 || frame->rets.size != 1) return error(frame, "specjax_tree_attention takes 11 operands");
  const XLA_FFI_Buffer** x = (const XLA_FFI_Buffer**)frame->args.args;
  const XLA_FFI_Buffer* out = frame->rets.rets[0];
  const XLA_FFI_Buffer *q = x[0], *k = x[1], *pages = x[4], *options = x[10];
  if (q->rank != 4 || k->rank != 4 || pages->rank != 4 || x[6]->rank != 2 || q->dims[3] % LANES ||
      q->dtype != pages->dtype || q->dtype != k->dtype || out->dtype != XLA_FFI_DataType_F32)
    return error(frame, "specjax_tree_attention takes q, k, v and pages of one type and of whole vectors, and gives float32");
  if (q->dtype != XLA_FFI_DataType_F32 && q->dtype != XLA_FFI_DataType_BF16)
    return error(frame, "specjax_tree_attention takes float32 or bfloat16");
  const float* numbers = options->data;
  int64_t queries = q->dims[1] * (q->dims[2] / k->dims[2]);
  Attention* a = calloc(1, sizeof(Attention));
  if (!a) return error(frame, "no memory");
  *a = (Attention){
      .q = q->data, .k = k->data, .v = x[2]->data, .seen = x[3]->data,
      .k_pages = pages->data, .v_pages = x[5]->data, .table = x[6]->data, .committed = x[7]->data,
      .position = x[8]->data, .live = x[9]->data, .out = out->data,
      .rows = q->dims[1], .heads = q->dims[2], .dim = q->dims[3], .tile = k->dims[1], .groups = k->dims[2],
      .page_size = pages->dims[2], .columns = x[6]->dims[1],
      .scale = numbers[0], .window = (int64_t)numbers[1], .softcap = numbers[2],
      .wide = q->dtype == XLA_FFI_DataType_F32,
  };
  a->parts = (queries + QUERIES - 1) / QUERIES;
  a->per_part = a->parts ? (queries + a->parts - 1) / a->parts : 0;
  return share(frame, a, q->dims[0] * a->groups * a->parts, attend, free);
}
