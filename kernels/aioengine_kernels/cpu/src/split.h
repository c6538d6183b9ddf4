// Exact products of quantized weights by integer dot products (AVX-512 VNNI). Included inside linear.h.
//
// The activations of a group of 32 become whole numbers of 16 bits with one scale, the largest magnitude over kSplitTop, in two
// signed digits of 8 bits. A weight has 4 or 8 bits: vpdpbusd does four such products in the time of one float32 multiply-add, so
// two passes, one for each digit, take half the time, and the weights need not be dequantized. Products and sums inside a group are
// then exact. What is lost is the rounding of the activations, about 2e-5 of a result (tests, README).

// The rows of one tile: q [groups][rows][2 digits, the higher first][32], scale and scaled_sum [groups][rows],
// offset [groups][halves][rows]: what the unsigned storage of the weights added.
struct SplitTile {
  const int8_t* q;
  const float* scale;
  const float* scaled_sum;
  const int32_t* offset;
};

struct SplitRows {
  int8_t* q;
  float* scale;
  float* scaled_sum;
  int32_t* offset;
  i64 k;
  int halves;
  SplitTile tile(i64 first) const {
    const i64 groups = k / kGroup;
    return {q + first * k * 2, scale + first * groups, scaled_sum + first * groups, offset + first * groups * halves};
  }
};

// The sums of four vectors, by `op`.
template <class Op>
AIO_INLINE __m128i reduce4(const __m512i* v, const Op& op) {
  const __m512i a = op(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));  // 0 1 0 1
  const __m512i b = op(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i c = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));  // 0 1 2 3
  const __m512i d = op(c, _mm512_shuffle_i64x2(c, c, 0x4e));
  return _mm512_castsi512_si128(op(d, _mm512_shuffle_i64x2(d, d, 0xb1)));
}

// The units of four groups from their largest magnitudes: NaN if a number is not finite, 0 for nothing.
AIO_INLINE __m128 choose_units(__m128i top, __m128* inverse) {
  const __m128 largest = _mm_castsi128_ps(top);
  const __mmask8 finite = _mm_cmp_ps_mask(largest, _mm_set1_ps(3.4e38f), _CMP_LE_OQ);
  const __mmask8 some = _mm_mask_cmp_ps_mask(finite, largest, _mm_set1_ps(kNothing), _CMP_GT_OQ);
  *inverse = _mm_maskz_div_ps(some, _mm_set1_ps(kSplitTop), largest);
  const __m128 unit = _mm_maskz_mul_ps(some, largest, _mm_set1_ps(1.0f / kSplitTop));
  return _mm_mask_mov_ps(_mm_set1_ps(__builtin_nanf("")), finite, unit);
}

// Four groups of 32 floats -> two runs of 32 digits each, `stride` bytes apart. Only `count` of them are there.
// Returns the units; the sums of the numbers, or of both halves of each group, are at `sums`.
template <int halves>
AIO_INLINE __m128 split_groups(const float* x, int count, int8_t* out, i64 stride, __m128i* sums) {
  __m512 a[4], b[4];
  __m512i top[4], sum[halves][4];
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const float* from = x + (g < count ? g : 0) * kGroup;
    a[g] = _mm512_loadu_ps(from), b[g] = _mm512_loadu_ps(from + 16);
    // The bits of positive floats are ordered as integers, with infinity and NaN above all others.
    top[g] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a[g]), magnitude), _mm512_and_si512(_mm512_castps_si512(b[g]), magnitude));
  }
  __m128 inverses;
  const __m128 units = choose_units(reduce4(top, [](__m512i u, __m512i v) { return _mm512_max_epi32(u, v); }), &inverses);
  alignas(16) float inverse[4];
  _mm_store_ps(inverse, inverses);
  // The lower digit is the lower byte as it is; if negative, the higher one is one more than the byte above it.
  const __m512i carry = _mm512_set1_epi32(0x80);
  const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m512i two_digits = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const __m512 scale = _mm512_set1_ps(inverse[g]);
    const __mmask16 there = inverse[g] > 0.0f ? (__mmask16)0xffff : (__mmask16)0;  // NaN * 0 is no number
    const __m512i ia = _mm512_maskz_cvtps_epi32(there, _mm512_mul_ps(a[g], scale));
    const __m512i ib = _mm512_maskz_cvtps_epi32(there, _mm512_mul_ps(b[g], scale));
    sum[0][g] = halves == 2 ? ia : _mm512_add_epi32(ia, ib), sum[halves - 1][g] = halves == 2 ? ib : sum[0][g];
    const __m512i da = _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(ia, carry), carry), by_digit);
    const __m512i db = _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(ib, carry), carry), by_digit);
    if (g < count) _mm512_storeu_si512(out + g * stride, _mm512_permutex2var_epi32(da, two_digits, db));
  }
  for (int h = 0; h < halves; h++) sums[h] = reduce4(sum[h], [](__m512i u, __m512i v) { return _mm512_add_epi32(u, v); });
  return units;
}

// Row m of a tile of `rows`.
template <int F>
AIO_INLINE void split_row(const float* x, i64 groups, i64 rows, i64 m, const SplitTile& tile) {
  constexpr int halves = Traits<F>::halves;
  for (i64 b0 = 0; b0 < groups; b0 += 4) {
    const int count = (int)imin(4, groups - b0);
    __m128i sums[halves];
    const __m128 units = split_groups<halves>(x + b0 * kGroup, count, (int8_t*)tile.q + (b0 * rows + m) * 64, rows * 64, sums);
    alignas(16) float unit[4], scaled_sum[4];
    alignas(16) int32_t sum[halves][4];
    _mm_store_ps(unit, units), _mm_store_ps(scaled_sum, _mm_mul_ps(units, _mm_cvtepi32_ps(sums[0])));
    for (int h = 0; h < halves; h++) _mm_store_si128((__m128i*)sum[h], sums[h]);
    for (i64 b = b0; b < b0 + count; b++) {
      const i64 g = b - b0;
      ((float*)tile.scale)[b * rows + m] = unit[g];
      if (Traits<F>::minimum) ((float*)tile.scaled_sum)[b * rows + m] = scaled_sum[g];
      if (Traits<F>::zero)
        for (int h = 0; h < halves; h++) ((int32_t*)tile.offset)[(b * halves + h) * rows + m] = -Traits<F>::zero * sum[h][g];
    }
  }
}

template <int F>
static void split_rows(const LinearArgs& a, const RowTiles& tiles, const SplitRows& out) {
  parallel(a.m * a.k > 16384 ? a.num_threads : 1, a.m, imax(1, 4096 / a.k), [&](i64 begin, i64 end) {
    i64 t = 0;
    for (i64 i = begin; i < end; i++) {
      while (tiles.first(t) + tiles.rows(t) <= i) t++;
      split_row<F>(a.x + i * a.ldx, a.k / kGroup, tiles.rows(t), i - tiles.first(t), out.tile(tiles.first(t)));
    }
  });
}

// c[MR] += the dot products of one digit, `count` vectors of weights.
template <int MR, int count>
AIO_INLINE void add_digit(const __m512i* w, const int8_t* x, __m512i* c) {
#pragma GCC unroll 8
  for (int j = 0; j < count; j++)
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) c[m] = _mm512_dpbusd_epi32(c[m], w[j], _mm512_set1_epi32(*(const int32_t*)(x + m * 64 + j * 4)));
}

// y[MR][16] of one panel. A lane collects the 32 products of a group, at most 32 * 255 * 32639 < 2^28.
template <int F, int MR>
static void split_tile(const uint8_t* q, const uint8_t* scales, i64 groups, i64 ahead, const SplitTile& x, float* y, i64 ldy) {
  constexpr int halves = Traits<F>::halves, count = 8 / halves;
  const int8_t* xq = x.q;
  vf f[MR];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) f[m] = vzero();
  for (i64 b = 0; b < groups; b++, q += Traits<F>::quant_bytes, scales += Traits<F>::scale_bytes, xq += 64 * MR) {
    if (ahead) prefetch_group<F>(q, scales, ahead);
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
      __m512i w[count], c[MR];
#pragma GCC unroll 8
      for (int j = 0; j < count; j++) {
        if (Traits<F>::nibbles) {
          const __m512i v = _mm512_loadu_si512(q + j % 4 * 64);
          w[j] = _mm512_and_si512(j < 4 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
        } else {
          w[j] = _mm512_loadu_si512(q + (h * count + j) * 64);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) c[m] = _mm512_setzero_si512();
      add_digit<MR, count>(w, xq + h * 16, c);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        c[m] = _mm512_slli_epi32(c[m], 8);
        if (Traits<F>::zero) c[m] = _mm512_add_epi32(c[m], _mm512_set1_epi32(x.offset[(b * halves + h) * MR + m]));
      }
      add_digit<MR, count>(w, xq + 32 + h * 16, c);
      const vf scale = load_scale<F>(scales, h, 0);
      const vf minimum = Traits<F>::minimum ? load_scale<F>(scales, 1, 0) : vzero();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        f[m] = vfma(_mm512_cvtepi32_ps(c[m]), vmul(scale, vset(x.scale[b * MR + m])), f[m]);
        if (Traits<F>::minimum) f[m] = vfma(minimum, vset(x.scaled_sum[b * MR + m]), f[m]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) vstore(y + m * ldy, f[m]);
}

constexpr int kSplitRows = 12, kSplitPanels = 8;

template <int F>
static void split_panel(const LinearArgs& a, const uint8_t* panel, i64 ahead, i64 n0, i64 m0, i64 rows, const SplitTile& x) {
  const i64 groups = a.k / kGroup, columns = imin(16, a.n - n0);
  alignas(64) float buffer[kSplitRows * 16];
  float *out = a.y + m0 * a.ldy + n0, *y = columns == 16 ? out : buffer;
  const i64 ldy = columns == 16 ? a.ldy : 16;
#define AIO_CASE(MR) \
  case MR:           \
    if (MR <= kSplitRows) split_tile<F, (MR <= kSplitRows ? MR : 1)>(panel, panel + groups * Traits<F>::quant_bytes, groups, ahead, x, y, ldy); \
    break;
  switch (rows) {
    AIO_CASE(1) AIO_CASE(2) AIO_CASE(3) AIO_CASE(4) AIO_CASE(5) AIO_CASE(6)
    AIO_CASE(7) AIO_CASE(8) AIO_CASE(9) AIO_CASE(10) AIO_CASE(11) AIO_CASE(12)
  }
#undef AIO_CASE
  for (i64 m = 0; m < rows; m++) {
    if (columns < 16)
      for (i64 n = 0; n < columns; n++) out[m * a.ldy + n] = buffer[m * 16 + n];
    if (a.bias)
      for (i64 n = 0; n < columns; n++) out[m * a.ldy + n] += a.bias[n0 + n];
  }
}

template <int F>
static void integer_format(const LinearArgs& a) {
  const RowTiles tiles(a.m, kSplitRows);
  const i64 groups = a.k / kGroup;
  SplitRows x;
  x.k = a.k, x.halves = Traits<F>::halves;
  x.q = (int8_t*)scratch(0, a.m * (a.k * 2 + groups * (8 + 4 * Traits<F>::halves)));
  x.scale = (float*)(x.q + a.m * a.k * 2);
  x.scaled_sum = x.scale + a.m * groups;
  x.offset = (int32_t*)(x.scaled_sum + a.m * groups);
  split_rows<F>(a, tiles, x);
  const i64 panel_bytes = panel_layout(F, a.k).bytes, panels = ceil_div(a.n, 16);
  parallel(a.num_threads, panels, imax(1, panels / (8 * a.num_threads)), [&](i64 begin, i64 end) {
    // One tile of x stays in L1 while a few panels, which stay in L2, pass by.
    for (i64 p0 = begin; p0 < end; p0 += kSplitPanels)
      for (i64 t = 0; t < tiles.count; t++)
        for (i64 p = p0; p < imin(p0 + kSplitPanels, end); p++)
          split_panel<F>(a, a.weights + p * panel_bytes, t ? 0 : panel_bytes, p * 16, tiles.first(t), tiles.rows(t), x.tile(tiles.first(t)));
  });
}
