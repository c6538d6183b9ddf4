// Integer products on AVX-512 VNNI: vpdpbusd multiplies four unsigned weights with four signed digits and adds the products into a
// 32-bit lane, in the time of one float32 multiply-add; a pass over the quants, as they are stored, for each digit. Needs integer.h.
//
// q of a tile: the higher digits [groups][rows][32], then the lower ones.

// The sums of four vectors, by `op`.
template <class Op>
AIO_INLINE __m128i reduce4(const __m512i* v, const Op& op) {
  const __m512i a = op(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));  // 0 1 0 1
  const __m512i b = op(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i c = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));  // 0 1 2 3
  const __m512i d = op(c, _mm512_shuffle_i64x2(c, c, 0x4e));
  return _mm512_castsi512_si128(op(d, _mm512_shuffle_i64x2(d, d, 0xb1)));
}

struct Units {
  __m128 unit;      // NaN if a number of the group is not finite, 0 for nothing
  __m128 inverse;   // of the unit of the rounding: 256 units with one digit
  __mmask8 single;  // one digit will do
};

// `choose_rounding` for four groups, from the bits of their largest magnitudes.
AIO_INLINE Units choose_units(__m128i top, float limit) {
  Units u;
  const __m128 largest = _mm_castsi128_ps(top);
  const __mmask8 finite = _mm_cmp_ps_mask(largest, _mm_set1_ps(kLargestFinite), _CMP_LE_OQ);
  const __mmask8 some = _mm_mask_cmp_ps_mask(finite, largest, _mm_set1_ps(kNothing), _CMP_GT_OQ);
  u.single = _mm_cmp_ps_mask(largest, _mm_set1_ps(limit), _CMP_LE_OQ);
  const __m128 range = _mm_mask_mov_ps(_mm_set1_ps(kSplitTop), u.single, _mm_set1_ps(kDigitTop));
  const __m128 a_unit = _mm_mask_mov_ps(_mm_set1_ps(1.0f / kSplitTop), u.single, _mm_set1_ps(1.0f / (kDigitTop * 256.0f)));
  u.inverse = _mm_maskz_div_ps(some, range, largest);
  u.unit = _mm_mask_mov_ps(_mm_set1_ps(__builtin_nanf("")), finite, _mm_maskz_mul_ps(some, largest, a_unit));
  return u;
}

// Four groups of 32 floats -> their digits, groups `stride` bytes apart at `high` and at `low`. Only `count` of them are there.
// The sums of the numbers, or of both halves of each group, are at `sums`.
template <int halves>
AIO_INLINE Units split_groups(const float* x, int count, float limit, int8_t* high, int8_t* low, i64 stride, __m128i* sums) {
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
  const Units units = choose_units(reduce4(top, [](__m512i u, __m512i v) { return _mm512_max_epi32(u, v); }), limit);
  alignas(16) float inverse[4];
  _mm_store_ps(inverse, units.inverse);
  // The lower digit is the lower byte as it is; if negative, the higher one is one more than the byte above it.
  const __m512i carry = _mm512_set1_epi32(0x80);
  const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m512i two_digits = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const __m512 scale = _mm512_set1_ps(inverse[g]);
    const __mmask16 there = inverse[g] > 0.0f ? (__mmask16)0xffff : (__mmask16)0;  // NaN * 0 is no number
    const __m128i shift = _mm_cvtsi32_si128(units.single >> g & 1 ? 8 : 0);
    const __m512i ia = _mm512_sll_epi32(_mm512_maskz_cvtps_epi32(there, _mm512_mul_ps(a[g], scale)), shift);
    const __m512i ib = _mm512_sll_epi32(_mm512_maskz_cvtps_epi32(there, _mm512_mul_ps(b[g], scale)), shift);
    sum[0][g] = halves == 2 ? ia : _mm512_add_epi32(ia, ib), sum[halves - 1][g] = halves == 2 ? ib : sum[0][g];
    const __m512i da = _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(ia, carry), carry), by_digit);
    const __m512i db = _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(ib, carry), carry), by_digit);
    if (g >= count) continue;
    const __m512i digits = _mm512_permutex2var_epi32(da, two_digits, db);
    _mm256_storeu_si256((__m256i*)(high + g * stride), _mm512_castsi512_si256(digits));
    _mm256_storeu_si256((__m256i*)(low + g * stride), _mm512_extracti64x4_epi64(digits, 1));
  }
  for (int h = 0; h < halves; h++) sums[h] = reduce4(sum[h], [](__m512i u, __m512i v) { return _mm512_add_epi32(u, v); });
  return units;
}

// Row m of a tile of `rows`.
template <int F, bool fast>
AIO_INLINE void write_row(const float* x, i64 groups, i64 rows, i64 m, const IntegerTile& tile) {
  constexpr int halves = Traits<F>::halves;
  const float limit = fast ? standing_out(x, groups * kGroup) : -1.0f;
  for (i64 b0 = 0; b0 < groups; b0 += 4) {
    const int count = (int)imin(4, groups - b0);
    __m128i sums[halves];
    int8_t* high = tile.q + (b0 * rows + m) * kGroup;
    const Units units = split_groups<halves>(x + b0 * kGroup, count, limit, high, high + groups * rows * kGroup, rows * kGroup, sums);
    alignas(16) float unit[4], scaled_sum[4];
    alignas(16) int32_t sum[halves][4];
    _mm_store_ps(unit, units.unit), _mm_store_ps(scaled_sum, _mm_mul_ps(units.unit, _mm_cvtepi32_ps(sums[0])));
    for (int h = 0; h < halves; h++) _mm_store_si128((__m128i*)sum[h], sums[h]);
    for (i64 b = b0; b < b0 + count; b++) {
      const i64 g = b - b0;
      tile.unit[b * rows + m] = unit[g];
      if (Traits<F>::minimum) tile.scaled_sum[b * rows + m] = scaled_sum[g];
      if (Traits<F>::zero)
        for (int h = 0; h < halves; h++) tile.offset[(b * halves + h) * rows + m] = -Traits<F>::zero * sum[h][g];
      if (fast && !(units.single >> g & 1)) mark_both(tile, b);
    }
  }
}

// Columns 4j .. 4j + 3 of half h of a group for 16 rows, unsigned.
template <int F>
AIO_INLINE __m512i load_weights(const uint8_t* q, int h, int j) {
  if (!Traits<F>::nibbles) return _mm512_loadu_si512(q + (h * (8 / Traits<F>::halves) + j) * 64);
  const __m512i v = _mm512_loadu_si512(q + j % 4 * 64);
  return _mm512_and_si512(j < 4 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}

// c[MR] += four products a lane, for one vector of weights.
template <int MR>
AIO_INLINE void add_products(__m512i w, const int8_t* x, __m512i* c) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) c[m] = _mm512_dpbusd_epi32(c[m], w, _mm512_set1_epi32(*(const int32_t*)(x + m * kGroup)));
}

// y[MR][16] of one panel. A lane collects the 32 products of a group, at most 32 * 255 * 32639 < 2^28. With one digit the sum is
// that of the numbers over 256, and the scale 256 times as large: powers of two, so a row's bits are the same in either branch.
template <int F, int MR, bool fast>
static void integer_tile(const uint8_t* q, const uint8_t* scales, i64 groups, i64 ahead, const IntegerTile& x, float* y, i64 ldy) {
  constexpr int halves = Traits<F>::halves, count = 8 / halves;
  const int8_t *high = x.q, *low = x.q + groups * MR * kGroup;
  vf f[MR];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) f[m] = vzero();
  for (i64 b = 0; b < groups; b++, q += Traits<F>::quant_bytes, scales += Traits<F>::scale_bytes, high += kGroup * MR, low += kGroup * MR) {
    if (ahead) prefetch_group<F>(q, scales, ahead);
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
      const int32_t* offset = x.offset + (b * halves + h) * MR;
      const int8_t *high_half = high + h * 16, *low_half = low + h * 16;
      __m512i c[MR];
      vf scale = load_scale<F>(scales, h, 0);
      const vf minimum = Traits<F>::minimum ? load_scale<F>(scales, 1, 0) : vzero();
      if (fast && !x.both[b]) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) c[m] = Traits<F>::zero ? _mm512_set1_epi32(offset[m] >> 8) : _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < count; j++) add_products<MR>(load_weights<F>(q, h, j), high_half + j * 4, c);
        scale = vmul(scale, vset(256.0f));
      } else {
        __m512i w[count];
#pragma GCC unroll 8
        for (int j = 0; j < count; j++) w[j] = load_weights<F>(q, h, j);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) c[m] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < count; j++) add_products<MR>(w[j], high_half + j * 4, c);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          c[m] = _mm512_slli_epi32(c[m], 8);
          if (Traits<F>::zero) c[m] = _mm512_add_epi32(c[m], _mm512_set1_epi32(offset[m]));
        }
#pragma GCC unroll 8
        for (int j = 0; j < count; j++) add_products<MR>(w[j], low_half + j * 4, c);
      }
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        f[m] = vfma(_mm512_cvtepi32_ps(c[m]), vmul(scale, vset(x.unit[b * MR + m])), f[m]);
        if (Traits<F>::minimum) f[m] = vfma(minimum, vset(x.scaled_sum[b * MR + m]), f[m]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) vstore(y + m * ldy, f[m]);
}

constexpr int kIntegerRows = 12, kTilesAtATime = 1;
