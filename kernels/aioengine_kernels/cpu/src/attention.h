// Paged attention on the block table. Needs simd.h and tiles.h.
//
// Cache of one layer: [num_blocks][num_kv_heads][keys, values]; keys [head_dim][block_size] (so that 16 positions lie
// side by side and a score needs no horizontal sum), values [block_size][head_dim]. int8: each of the two parts is
// followed by block_size float32 scales, one a position.
//
// Order of accumulation, for every query row alike: a score is one chain over head_dim; softmax runs online (Milakov and
// Gimelshein, 2018) over tiles of 64 positions inside spans of 256, both cut at absolute positions; spans are merged in
// order (flash decoding, Dao et al., 2023). Nothing depends on the other rows of the tile, on chunking or on threads.

constexpr int kTile = 64;
constexpr int kSpan = 256;

#if AIO_ISA == 512
#include "bf16.h"
#else
constexpr int kBf16Rows = 1;  // none has bfloat16
AIO_INLINE vf vexp_brief(vf x) { return vexp(x); }
#endif

// Query rows that pass over a run of keys together: multiples of kScoreRows, and their queries, scores and sums stay in L2.
constexpr i64 kWantedTileRows = 48;
constexpr float kMasked = -__builtin_inff();

struct BlockSizes {
  i64 part;   // bytes of the keys (or values) of one block and head
  i64 head;   // of both
  i64 block;  // of all heads
};

AIO_INLINE i64 kv_width(int kv_type) { return kv_type == kKvF32 ? 4 : kv_type == kKvI8 ? 1 : 2; }

AIO_INLINE BlockSizes block_sizes(const CacheLayout& c) {
  BlockSizes s;
  s.part = c.block_size * (c.head_dim * kv_width(c.kv_type) + (c.kv_type == kKvI8 ? 4 : 0));
  s.head = 2 * s.part;
  s.block = s.head * c.num_kv_heads;
  return s;
}

template <int T>
AIO_INLINE vf load_kv(const uint8_t* base, i64 index) {
  if (T == kKvF32) return vload((const float*)base + index);
  if (T == kKvF16) return vload_f16((const uint16_t*)base + index);
  return vload_i8((const int8_t*)base + index);
}

// One (request, kv head, run of query tokens). Row r is query token r / group, head r % group of the kv head's group.
struct TileWork {
  i64 req, token, tokens;  // token: first row of the query tensor
  i64 position;            // of the first token
  i64 head;                // kv head
  i64 first_span, last_span;
  float* partial;  // where the result of the spans goes (one span a work item), or null: merge all here and write out
};

// m, l [rows], acc [rows][head_dim]
struct Softmax {
  float *m, *l, *acc;
};

// scores[r][s * 16 ..] of RT rows against NS runs of 16 keys. q is [head_dim][RT]. Cache blocks lie anywhere, and a part is
// often just a page, where the hardware's prefetchers stop: hence the values that come next are asked for here (`ahead`: as
// many runs, or null), and the next keys in value_tile. Into L2, as for weights: into L1 it gains nothing.
template <int T, int RT, int NS>
AIO_INLINE void score_tile(const float* q, const uint8_t* const* keys, const uint8_t* const* ahead, int head_dim, int block_size,
                           float* scores) {
  vf c[RT][NS * kV];
#pragma GCC unroll 16
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NS * kV; v++) c[r][v] = vzero();
  for (int d = 0; d < head_dim; d++) {
    vf k[NS * kV];
#pragma GCC unroll 8
    for (int v = 0; v < NS * kV; v++) k[v] = load_kv<T>(keys[v / kV], (i64)d * block_size + v % kV * kW);
    if (ahead)
#pragma GCC unroll 4
      for (int s = 0; s < NS; s++) __builtin_prefetch(ahead[s] + d * 16 * kv_width(T), 0, 2);
#pragma GCC unroll 16
    for (int r = 0; r < RT; r++) {
      const vf a = vset(q[d * RT + r]);
#pragma GCC unroll 8
      for (int v = 0; v < NS * kV; v++) c[r][v] = vfma(a, k[v], c[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NS * kV; v++) vstore(scores + r * kTile + v * kW, c[r][v]);
}

// acc[r][CB * kW columns] += sum over t of p[r][t] * value[t], in the order of t. `ahead`: the keys of four runs to come, or null.
template <int T, int RT, int CB>
AIO_INLINE void value_tile(const float* p, const uint8_t* const* values, const uint8_t* const* ahead, int first, int last, int head_dim,
                           int block_size, int column, float* acc) {
  vf c[RT][CB];
#pragma GCC unroll 8
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 4
    for (int v = 0; v < CB; v++) c[r][v] = vload(acc + r * head_dim + column + v * kW);
  for (int t = first; t < last; t++) {
    vf x[CB];
#pragma GCC unroll 4
    for (int v = 0; v < CB; v++) x[v] = load_kv<T>(values[t / 16], (i64)(t % 16) * head_dim + column + v * kW);
    if (ahead && ahead[t / 16])  // one of 16 parts of the head_dim rows of this run's keys
      for (int d = t % 16; d < head_dim; d += 16) __builtin_prefetch(ahead[t / 16] + (i64)d * block_size * kv_width(T), 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < RT; r++) {
      const vf a = vset(p[r * kTile + t]);
#pragma GCC unroll 4
      for (int v = 0; v < CB; v++) c[r][v] = vfma(a, x[v], c[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 4
    for (int v = 0; v < CB; v++) vstore(acc + r * head_dim + column + v * kW, c[r][v]);
}

#if AIO_ISA == 512
constexpr int kScoreRows = 12, kValueRows = 6;
#else
constexpr int kScoreRows = 6, kValueRows = 3;
#endif

template <int T, int RT>
AIO_INLINE void score_runs(const float* q, const uint8_t* const* keys, const uint8_t* const* ahead, int runs, int head_dim,
                           int block_size, float* scores) {
  constexpr int NS = RT * kV <= 3 ? 4 : RT * kV <= 6 ? 2 : 1;
  int s = 0;
  for (; s + NS <= runs; s += NS) score_tile<T, RT, NS>(q, keys + s, ahead ? ahead + s : ahead, head_dim, block_size, scores + s * 16);
  for (; s < runs; s++) score_tile<T, RT, 1>(q, keys + s, ahead ? ahead + s : ahead, head_dim, block_size, scores + s * 16);
}

template <int T, int RT>
AIO_INLINE void value_columns(const float* p, const uint8_t* const* values, const uint8_t* const* ahead, int first, int last, int head_dim,
                              int block_size, float* acc) {
  int column = 0;
  for (; column + 4 * kW <= head_dim; column += 4 * kW, ahead = nullptr)
    value_tile<T, RT, 4>(p, values, ahead, first, last, head_dim, block_size, column, acc);
  for (; column < head_dim; column += kW) value_tile<T, RT, 1>(p, values, nullptr, first, last, head_dim, block_size, column, acc);
}

// Online softmax of one row over one tile: scores become weights, acc is rescaled.
template <bool brief>
AIO_INLINE void softmax_row(float* scores, int lo, int hi, float soft_cap, float* m, float* l, float* acc, int head_dim) {
  vf s[4 * kV], most = vset(kMasked);
  const bool sees_all = lo <= 0 && hi >= kTile;
#pragma GCC unroll 8
  for (int v = 0; v < 4 * kV; v++) {
    s[v] = vload(scores + v * kW);
    if (soft_cap > 0.0f) s[v] = vmul(vset(soft_cap), vtanh(vdiv(s[v], vset(soft_cap))));
    if (!sees_all) s[v] = vlanes(s[v], lo - v * kW, hi - v * kW, vset(kMasked));
    most = vmax(most, s[v]);
  }
  const float top = vhmax(most);
  if (top > *m) {
    const float shrink = exp1(*m - top);  // 0 for the first tile
    for (int c = 0; c < head_dim; c += kW) vstore(acc + c, vmul(vload(acc + c), vset(shrink)));
    *l *= shrink;
    *m = top;
  }
  vf sum = vzero();
#pragma GCC unroll 8
  for (int v = 0; v < 4 * kV; v++) {
    const vf x = vsub(s[v], vset(*m)), p = brief ? vexp_brief(x) : vexp(x);  // exactly 0 where masked
    sum = vadd(sum, p);
    vstore(scores + v * kW, p);
  }
  *l += vsum(sum);
}

// `pairs`: products in bfloat16, of a float16 cache.
template <int T, bool pairs>
struct Attend {
  static constexpr i64 kMostRows = pairs ? kBf16Rows : kScoreRows;
  const AttentionArgs& a;
  const BlockSizes sizes;
  const int group, dim, block_size;
  explicit Attend(const AttentionArgs& args)
      : a(args), sizes(block_sizes(args.cache)), group(args.num_heads / args.cache.num_kv_heads), dim(args.cache.head_dim),
        block_size(args.cache.block_size) {}

  const uint8_t* locate(i64 req, i64 head, i64 position, int part) const {
    const i64 block = a.block_table[req * a.block_table_stride + position / block_size];
    return a.cache.data + block * sizes.block + head * sizes.head + part * sizes.part;
  }

  // q, scaled, as groups of at most kMostRows rows: [head_dim][rows of the group], or pairs [head_dim / 2][rows of the group].
  void pack_query(const TileWork& w, float* out) const {
    const RowTiles groups(w.tokens * group, kMostRows);
    for (i64 t = 0; t < groups.count; t++) {
      const i64 rows = groups.rows(t), first = groups.first(t);
      for (i64 i = 0; i < rows; i++) {
        const float* q = a.query + (w.token + (first + i) / group) * a.query_stride + (w.head * group + (first + i) % group) * dim;
#if AIO_ISA == 512
        if (pairs) {
          pack_row(q, a.scale, dim, (uint32_t*)out + first * (dim / 2) + i, rows);
          continue;
        }
#endif
        for (int d = 0; d < dim; d++) out[first * dim + d * rows + i] = q[d] * a.scale;
      }
    }
  }

  void score(const float* q, i64 rows, const uint8_t* const* keys, const uint8_t* const* values, int runs, float* scores) const {
    const RowTiles groups(rows, kScoreRows);
    for (i64 t = 0; t < groups.count; t++) {
      const float* qt = q + groups.first(t) * dim;
      float* st = scores + groups.first(t) * kTile;
#define AIO_CASE(RT) \
  case RT:           \
    if (RT <= kScoreRows) score_runs<T, (RT <= kScoreRows ? RT : 1)>(qt, keys, t ? nullptr : values, runs, dim, block_size, st); \
    break;
      switch (groups.rows(t)) {
        AIO_CASE(1) AIO_CASE(2) AIO_CASE(3) AIO_CASE(4) AIO_CASE(5) AIO_CASE(6)
        AIO_CASE(7) AIO_CASE(8) AIO_CASE(9) AIO_CASE(10) AIO_CASE(11) AIO_CASE(12)
      }
#undef AIO_CASE
    }
  }

  void accumulate(const float* p, i64 rows, const uint8_t* const* values, const uint8_t* const* next, int first, int last,
                  float* acc) const {
    const RowTiles groups(rows, kValueRows);
    for (i64 t = 0; t < groups.count; t++) {
      const float* pt = p + groups.first(t) * kTile;
      float* at = acc + groups.first(t) * dim;
#define AIO_CASE(RT) \
  case RT:           \
    if (RT <= kValueRows) value_columns<T, (RT <= kValueRows ? RT : 1)>(pt, values, t ? nullptr : next, first, last, dim, block_size, at); \
    break;
      switch (groups.rows(t)) { AIO_CASE(1) AIO_CASE(2) AIO_CASE(3) AIO_CASE(4) AIO_CASE(5) AIO_CASE(6) }
#undef AIO_CASE
    }
  }

  // The keys that will be read after those of `tile`: the next tile's, or the next head's first.
  void find_next(const TileWork& w, i64 tile, const uint8_t** next) const {
    const i64 last = w.position + w.tokens;
    i64 position = tile + kTile, head = w.head;
    if (position >= last) position = w.first_span * kSpan, head++;
    for (int s = 0; s < 4; s++, position += 16) {
      const bool there = head < a.cache.num_kv_heads && position < last;
      next[s] = there ? locate(w.req, head, position, 0) + position % block_size * kv_width(T) : nullptr;
    }
  }

  // Positions of [tile, tile + 64) that some row of the work sees: keys begin .. end.
  void attend_tile(const TileWork& w, const float* q, i64 tile, i64 begin, i64 end, float* scores, uint32_t* packed,
                   const Softmax& state) const {
    const i64 rows = w.tokens * group;
    const int run0 = (int)((begin - tile) / 16), runs = (int)ceil_div(end - tile, 16) - run0;
    const uint8_t *keys[4], *values[4];
    float key_scales[kTile], value_scales[kTile];
    for (int s = 0; s < runs; s++) {
      const i64 position = tile + (run0 + s) * 16, offset = position % block_size;
      const uint8_t *k = locate(w.req, w.head, position, 0), *v = locate(w.req, w.head, position, 1);
      keys[s] = k + offset * kv_width(T);
      values[run0 + s] = v + offset * dim * kv_width(T);
      if (T == kKvI8) {
        const i64 scales = (i64)block_size * dim + offset * 4;
        __builtin_memcpy(key_scales + (run0 + s) * 16, k + scales, 64);
        __builtin_memcpy(value_scales + (run0 + s) * 16, v + scales, 64);
      }
    }
#if AIO_ISA == 512
    if (pairs) score_all_pairs((const uint32_t*)q, rows, {nullptr, keys, values + run0, dim, block_size}, runs, packed, scores + run0 * 16);
#endif
    if (!pairs) score(q, rows, keys, values + run0, runs, scores + run0 * 16);
    for (i64 r = 0; r < rows; r++) {
      float* row = scores + r * kTile;
      const i64 position = w.position + r / group;
      const i64 lo = a.window ? imax(0, position - a.window + 1 - tile) : 0, hi = imin(kTile, position + 1 - tile);
      if (T == kKvI8)
        for (int t = (int)(begin - tile); t < end - tile; t++) row[t] *= key_scales[t];
      if (lo < hi) {
        softmax_row<pairs>(row, (int)lo, (int)hi, a.soft_cap, state.m + r, state.l + r, state.acc + r * dim, dim);
      } else {
        for (int t = 0; t < kTile; t += kW) vstore(row + t, vzero());
      }
      if (T == kKvI8)
        for (int t = (int)(begin - tile); t < end - tile; t++) row[t] *= value_scales[t];
    }
    const uint8_t* next[4];
    find_next(w, tile, next);
#if AIO_ISA == 512
    if (pairs) {
      const int first = (int)(begin - tile), last = (int)(end - tile);
      uint32_t* weights = packed + kTile / 2 * dim;
      pack_weights(scores, rows, weights);
      return add_all_pairs(weights, rows, {nullptr, values, next, first, last, dim, block_size}, packed, state.acc);
    }
#endif
    accumulate(scores, rows, values, next, (int)(begin - tile), (int)(end - tile), state.acc);
  }

  void attend_span(const TileWork& w, const float* q, i64 span, float* scores, uint32_t* packed, const Softmax& state) const {
    const i64 rows = w.tokens * group;
    for (i64 r = 0; r < rows; r++) state.m[r] = kMasked, state.l[r] = 0.0f;
    __builtin_memset(state.acc, 0, rows * dim * sizeof(float));
    const i64 first = a.window ? imax(0, w.position - a.window + 1) : 0, last = w.position + w.tokens;
    for (i64 tile = imax(span * kSpan, first / kTile * kTile); tile < imin((span + 1) * kSpan, last); tile += kTile)
      attend_tile(w, q, tile, imax(tile, first), imin(tile + kTile, last), scores, packed, state);
  }

  // `into` += `from`, row by row.
  void merge(const Softmax& into, const Softmax& from, i64 rows) const {
    for (i64 r = 0; r < rows; r++) {
      if (from.l[r] == 0.0f) continue;
      const float m = into.m[r] > from.m[r] ? into.m[r] : from.m[r];
      const float keep = exp1(into.m[r] - m), add = exp1(from.m[r] - m);
      float *x = into.acc + r * dim, *y = from.acc + r * dim;
      for (int c = 0; c < dim; c += kW) vstore(x + c, vfma(vload(y + c), vset(add), vmul(vload(x + c), vset(keep))));
      into.l[r] = into.l[r] * keep + from.l[r] * add;
      into.m[r] = m;
    }
  }

  void write_out(const TileWork& w, const Softmax& state) const {
    for (i64 r = 0; r < w.tokens * group; r++) {
      float* out = a.out + (w.token + r / group) * a.out_stride + (w.head * group + r % group) * dim;
      const vf inverse = vset(1.0f / state.l[r]);
      for (int c = 0; c < dim; c += kW) vstore(out + c, vmul(vload(state.acc + r * dim + c), inverse));
    }
  }

  Softmax state_at(float* memory, i64 rows) const { return {memory, memory + rows, memory + 2 * rows}; }
  i64 state_floats(i64 rows) const { return rows * (dim + 2); }

  void run(const TileWork& w) const {
    const i64 rows = w.tokens * group;
    // For a tile in pairs: its keys, later its values, and the rows' weights.
    const i64 packed_floats = pairs ? kTile / 2 * (dim + rows) : 0;
    float* memory = (float*)scratch(1, (packed_floats + rows * dim + rows * kTile + 2 * state_floats(rows) + 64) * sizeof(float));
    uint32_t* packed = (uint32_t*)memory;
    float *q = memory + packed_floats, *scores = q + rows * dim;
    const Softmax first = state_at(w.partial ? w.partial : scores + rows * kTile, rows);
    const Softmax next = state_at(scores + rows * kTile + state_floats(rows), rows);
    pack_query(w, q);
    attend_span(w, q, w.first_span, scores, packed, first);
    if (w.partial) return;
    for (i64 span = w.first_span + 1; span < w.last_span; span++) {
      attend_span(w, q, span, scores, packed, next);
      merge(first, next, rows);
    }
    write_out(w, first);
  }
};

// Calls visit(work) for every (request, run of query tokens, kv head).
template <class Visit>
static void visit_tiles(const AttentionArgs& a, const Visit& visit) {
  const i64 group = a.num_heads / a.cache.num_kv_heads, most = imax(1, kWantedTileRows / group);
  for (i64 req = 0; req < a.num_reqs; req++) {
    const i64 start = a.query_start_loc[req], length = a.query_start_loc[req + 1] - start;
    if (length <= 0) continue;
    const RowTiles runs(length, most);
    for (i64 t = runs.count - 1; t >= 0; t--) {  // the longest contexts first
      TileWork w;
      w.req = req, w.token = start + runs.first(t), w.tokens = runs.rows(t);
      w.position = a.seq_lens[req] - length + runs.first(t);
      w.first_span = a.window ? imax(0, w.position - a.window + 1) / kSpan : 0;
      w.last_span = ceil_div(w.position + w.tokens, kSpan);
      w.partial = nullptr;
      for (w.head = 0; w.head < a.cache.num_kv_heads; w.head++) visit(w);
    }
  }
}

template <int T, bool pairs = false>
static void attention_type(const AttentionArgs& a) {
  const Attend<T, pairs> attend(a);
  i64 tiles = 0, items = 0, floats = 0;
  visit_tiles(a, [&](const TileWork& w) {
    const i64 spans = w.last_span - w.first_span;
    tiles++, items += spans, floats += spans * attend.state_floats(w.tokens * attend.group);
  });
  if (!tiles) return;
  // Spans become work of their own only where there are too few tiles to keep the threads busy. Same bits either way.
  const bool split = a.num_threads > 1 && tiles < 8 * a.num_threads && items > tiles;
  const i64 count = split ? items : tiles;
  TileWork* work = (TileWork*)scratch(0, count * sizeof(TileWork));
  float* partials = split ? (float*)scratch(2, floats * sizeof(float)) : nullptr;
  i64 i = 0;
  visit_tiles(a, [&](const TileWork& w) {
    if (!split) {
      work[i++] = w;
      return;
    }
    for (i64 span = w.first_span; span < w.last_span; span++) {
      TileWork part = w;
      part.first_span = span, part.last_span = span + 1, part.partial = partials;
      partials += attend.state_floats(w.tokens * attend.group);
      work[i++] = part;
    }
  });
  parallel(a.num_threads, count, 1, [&](i64 begin, i64 end) {
    for (i64 w = begin; w < end; w++) attend.run(work[w]);
  });
  if (!split) return;
  for (i64 w = 0; w < count;) {
    const i64 rows = work[w].tokens * attend.group, first = w;
    const Softmax into = attend.state_at(work[first].partial, rows);
    for (w++; w < count && work[w].token == work[first].token && work[w].head == work[first].head; w++)
      attend.merge(into, attend.state_at(work[w].partial, rows), rows);
    attend.write_out(work[first], into);
  }
}

static void attention(const AttentionArgs* a) {
  switch (a->cache.kv_type) {
    case kKvF32: return attention_type<kKvF32>(*a);
    case kKvF16Fast:
#if AIO_ISA == 512
      if (has_bf16()) return attention_type<kKvF16, true>(*a);
#endif
      return attention_type<kKvF16>(*a);
    case kKvF16: return attention_type<kKvF16>(*a);
    case kKvI8: return attention_type<kKvI8>(*a);
  }
}

// ---- writing -----------------------------------------------------------------------------------------------------

template <int T>
AIO_INLINE void write_key(uint8_t* keys, const float* x, int dim, int block_size, i64 offset) {
  if (T == kKvF32) {
    for (int d = 0; d < dim; d++) ((float*)keys)[d * block_size + offset] = x[d];
  } else if (T == kKvF16) {
    for (int d = 0; d < dim; d += kW) {
      alignas(32) uint16_t h[kW];
      vstore_f16(h, vload(x + d));
      for (int i = 0; i < kW; i++) ((uint16_t*)keys)[(d + i) * block_size + offset] = h[i];
    }
  } else {
    float top = 0.0f;
    for (int d = 0; d < dim; d++) top = __builtin_fabsf(x[d]) > top ? __builtin_fabsf(x[d]) : top;
    const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
    for (int d = 0; d < dim; d++) ((int8_t*)keys)[d * block_size + offset] = (int8_t)round_to_whole(x[d] * inverse);
    ((float*)(keys + (i64)block_size * dim))[offset] = top > 1e-30f ? top / 127.0f : 0.0f;
  }
}

template <int T>
AIO_INLINE void write_value(uint8_t* values, const float* x, int dim, int block_size, i64 offset) {
  if (T == kKvF32) {
    for (int d = 0; d < dim; d += kW) vstore((float*)values + offset * dim + d, vload(x + d));
  } else if (T == kKvF16) {
    for (int d = 0; d < dim; d += kW) vstore_f16((uint16_t*)values + offset * dim + d, vload(x + d));
  } else {
    float top = 0.0f;
    for (int d = 0; d < dim; d++) top = __builtin_fabsf(x[d]) > top ? __builtin_fabsf(x[d]) : top;
    const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
    int8_t* out = (int8_t*)values + offset * dim;
    for (int d = 0; d < dim; d++) out[d] = (int8_t)round_to_whole(x[d] * inverse);
    ((float*)(values + (i64)block_size * dim))[offset] = top > 1e-30f ? top / 127.0f : 0.0f;
  }
}
