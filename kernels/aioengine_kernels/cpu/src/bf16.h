// Attention's products in bfloat16, for CPUs with AVX512_BF16 and a float16 cache: vdpbf16ps adds two products to a lane in the time of one
// multiply-add. Keys and values of a tile of 64 positions are rounded once and serve all its query rows; queries and weights are rounded too,
// sums are float32. Needs simd.h. Functions, not lambdas: a lambda would not have the target of the function around it.
//
// The instruction takes what is below 2^-126 for zero, else a row's bits depend on nothing but the row, as in attention.h: pairs are cut at
// even positions, and positions that no row of the tile sees are zeros.

#define AIO_BF16 __attribute__((target("avx512bf16")))

static bool has_bf16() { return __builtin_cpu_supports("avx512bf16"); }

// Lane i: low[i] and, above it, high[i].
AIO_BF16 AIO_INLINE __m512i pair_up(__m512 low, __m512 high) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

AIO_BF16 AIO_INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// e^x of an x that is not above 0 to 5e-5, which is enough for a number of 8 bits; exactly 1 at 0, exactly 0 below -87.3.
AIO_INLINE vf vexp_brief(vf x) {
  const vf n = vround(vmul(x, vset(1.44269504f))), r = vfma(n, vset(-0.693147181f), x);
  vf p = vfma(r, vset(1.0f / 24.0f), vset(1.0f / 6.0f));
  p = vfma(p, r, vset(0.5f));
  p = vfma(p, r, vset(1.0f));
  p = vfma(p, r, vset(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vset(-87.3f), _CMP_GE_OQ), p, n);
}

// Weights [rows][64] -> pairs [rows][32].
AIO_BF16 static void pack_weights(const float* p, i64 rows, uint32_t* out) {
  for (i64 i = 0; i < rows * kTile; i += 32)
    _mm512_storeu_si512(out + i / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + i + 16), _mm512_loadu_ps(p + i)));
}

// A query x[n] times `scale` -> out[n / 2], `stride` apart.
AIO_BF16 static void pack_row(const float* x, float scale, int n, uint32_t* out, i64 stride) {
  for (int d = 0; d < n; d += 16) {
    alignas(32) uint32_t pairs[8];
    _mm256_store_si256((__m256i*)pairs, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(x + d), _mm512_set1_ps(scale))));
    for (int i = 0; i < 8; i++) out[(d / 2 + i) * stride] = pairs[i];
  }
}

// Two columns of 16 positions' keys.
AIO_BF16 AIO_INLINE __m512i key_pair(const uint8_t* keys, int d, int block_size) {
  const uint16_t* k = (const uint16_t*)keys + (i64)d * block_size;
  return pair_up(vload_f16(k), vload_f16(k + block_size));
}

// 16 columns of the values of positions t and t + 1; zeros beside first .. last - 1: other slots may hold anything.
AIO_BF16 AIO_INLINE __m512i value_pair(const uint16_t* v, int t, int first, int last, int head_dim) {
  return pair_up(t >= first ? vload_f16(v) : vzero(), t + 1 < last ? vload_f16(v + head_dim) : vzero());
}

// Asks for one of 8 parts of the head_dim rows of the next keys, if there are any.
AIO_INLINE void prefetch_keys(const uint8_t* next, int t, int head_dim, int block_size) {
  if (next)
    for (int d = t % 16 / 2; d < head_dim; d += 8) __builtin_prefetch(next + (i64)d * block_size * 2, 0, 2);
}

// The keys of `runs` runs of 16 positions -> [head_dim / 2][4][16] pairs. `ahead`: as many runs of values, asked for meanwhile.
AIO_BF16 static void pack_keys(const uint8_t* const* keys, const uint8_t* const* ahead, int runs, int head_dim, int block_size, uint32_t* out) {
  for (int s = 0; s < runs; s++)
    for (int d = 0; d < head_dim; d += 2) {
      __builtin_prefetch(ahead[s] + d * 32, 0, 2);
      _mm512_store_si512(out + (d * 2 + s) * 16, key_pair(keys[s], d, block_size));
    }
}

// The values of positions first .. last - 1 of a tile -> [32][head_dim] pairs. `ahead`: the keys of four runs to come, or null.
AIO_BF16 static void pack_values(const uint8_t* const* values, const uint8_t* const* ahead, int first, int last, int head_dim, int block_size,
                                 uint32_t* out) {
  for (int t = first & ~1; t < last; t += 2) {
    const uint16_t* v = (const uint16_t*)values[t / 16] + (i64)(t % 16) * head_dim;
    for (int c = 0; c < head_dim; c += 16) _mm512_store_si512(out + t / 2 * head_dim + c, value_pair(v + c, t, first, last, head_dim));
    prefetch_keys(ahead[t / 16], t, head_dim, block_size);
  }
}

// Where a tile's keys and values are: packed, or (for so few rows that packing would not pay) in the cache. The same bits.
struct TileKeys {
  const uint32_t* packed;     // or null
  const uint8_t* const* runs;   // of 16 positions
  const uint8_t* const* ahead;  // as many runs of values, asked for with the keys
  int head_dim, block_size;
};
struct TileValues {
  const uint32_t* packed;  // or null
  const uint8_t* const* runs;
  const uint8_t* const* ahead;  // the next keys, asked for with the values
  int first, last, head_dim, block_size;
};

// scores[r][(s0 + s) * 16 ..] of RT rows against NS runs. q is [head_dim / 2][RT] pairs.
template <int RT, int NS, bool packed>
AIO_BF16 static void score_pairs(const uint32_t* q, const TileKeys& keys, int s0, float* scores) {
  vf c[RT][NS];
#pragma GCC unroll 16
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 4
    for (int s = 0; s < NS; s++) c[r][s] = vzero();
  for (int d = 0; d < keys.head_dim / 2; d++) {
    __m512i k[NS];
#pragma GCC unroll 4
    for (int s = 0; s < NS; s++) {
      if (!packed) __builtin_prefetch(keys.ahead[s0 + s] + d * 64, 0, 2);
      k[s] = packed ? _mm512_load_si512(keys.packed + (d * 4 + s0 + s) * 16) : key_pair(keys.runs[s0 + s], 2 * d, keys.block_size);
    }
#pragma GCC unroll 16
    for (int r = 0; r < RT; r++) {
      const __m512i a = _mm512_set1_epi32((int)q[d * RT + r]);
#pragma GCC unroll 4
      for (int s = 0; s < NS; s++) c[r][s] = add_pairs(c[r][s], k[s], a);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 4
    for (int s = 0; s < NS; s++) vstore(scores + r * kTile + (s0 + s) * 16, c[r][s]);
}

// acc[r][NC * 16 columns from c0] += the products of weights [RT][32] pairs and values.
template <int RT, int NC, bool packed>
AIO_BF16 static void value_pairs(const uint32_t* p, const TileValues& values, int c0, float* acc) {
  const int dim = values.head_dim;
  vf c[RT][NC];
#pragma GCC unroll 16
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NC; v++) c[r][v] = vload(acc + r * dim + c0 + v * 16);
  for (int t = values.first / 2; t < (values.last + 1) / 2; t++) {
    __m512i x[NC];
    const uint16_t* at = packed ? nullptr : (const uint16_t*)values.runs[t / 8] + (i64)(t % 8 * 2) * dim + c0;
#pragma GCC unroll 4
    for (int v = 0; v < NC; v++)
      x[v] = packed ? _mm512_load_si512(values.packed + t * dim + c0 + v * 16) : value_pair(at + v * 16, 2 * t, values.first, values.last, dim);
    if (!packed && c0 == 0) prefetch_keys(values.ahead[t / 8], 2 * t, dim, values.block_size);
#pragma GCC unroll 16
    for (int r = 0; r < RT; r++) {
      const __m512i a = _mm512_set1_epi32((int)p[r * (kTile / 2) + t]);
#pragma GCC unroll 4
      for (int v = 0; v < NC; v++) c[r][v] = add_pairs(c[r][v], x[v], a);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < RT; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NC; v++) vstore(acc + r * dim + c0 + v * 16, c[r][v]);
}

constexpr int kBf16Rows = 6;  // with 4 runs or 64 columns: 24 sums, 4 operands, one broadcast

template <int RT, bool packed>
static void score_pair_rows(const uint32_t* q, const TileKeys& keys, int runs, float* scores) {
  if (runs == 4) return score_pairs<RT, 4, packed>(q, keys, 0, scores);
  for (int s = 0; s < runs; s++) score_pairs<RT, 1, packed>(q, keys, s, scores);
}

template <int RT, bool packed>
static void value_pair_rows(const uint32_t* p, const TileValues& values, float* acc) {
  int column = 0;
  for (; column + 64 <= values.head_dim; column += 64) value_pairs<RT, 4, packed>(p, values, column, acc);
  for (; column < values.head_dim; column += 16) value_pairs<RT, 1, packed>(p, values, column, acc);
}

// Calls f<rows, packed>(...) for 1 to kBf16Rows rows.
#define AIO_FOR_ROWS(rows, packed, f, ...)     \
  switch (rows) {                              \
    case 1: f<1, packed>(__VA_ARGS__); break;  \
    case 2: f<2, packed>(__VA_ARGS__); break;  \
    case 3: f<3, packed>(__VA_ARGS__); break;  \
    case 4: f<4, packed>(__VA_ARGS__); break;  \
    case 5: f<5, packed>(__VA_ARGS__); break;  \
    default: f<6, packed>(__VA_ARGS__); break; \
  }

// Scores of all rows against a tile's keys, and sums of its values; rows in groups of kBf16Rows. One group reads the cache itself.
static void score_all_pairs(const uint32_t* q, i64 rows, TileKeys keys, int runs, uint32_t* buffer, float* scores) {
  if (rows <= kBf16Rows) {
    AIO_FOR_ROWS(rows, false, score_pair_rows, q, keys, runs, scores)
    return;
  }
  pack_keys(keys.runs, keys.ahead, runs, keys.head_dim, keys.block_size, buffer);
  keys.packed = buffer;
  const RowTiles groups(rows, kBf16Rows);
  for (i64 t = 0; t < groups.count; t++) {
    const i64 first = groups.first(t);
    AIO_FOR_ROWS(groups.rows(t), true, score_pair_rows, q + first * (keys.head_dim / 2), keys, runs, scores + first * kTile)
  }
}

static void add_all_pairs(const uint32_t* p, i64 rows, TileValues values, uint32_t* buffer, float* acc) {
  if (rows <= kBf16Rows) {
    AIO_FOR_ROWS(rows, false, value_pair_rows, p, values, acc)
    return;
  }
  pack_values(values.runs, values.ahead, values.first, values.last, values.head_dim, values.block_size, buffer);
  values.packed = buffer;
  const RowTiles groups(rows, kBf16Rows);
  for (i64 t = 0; t < groups.count; t++) {
    const i64 row = groups.first(t);
    AIO_FOR_ROWS(groups.rows(t), true, value_pair_rows, p + row * (kTile / 2), values, acc + row * values.head_dim)
  }
}
#undef AIO_FOR_ROWS
