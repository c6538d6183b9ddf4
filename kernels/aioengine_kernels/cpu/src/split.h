// Integer products on AVX-512 VNNI: vpdpbusd multiplies four unsigned weights with four signed digits and adds the products into a
// 32-bit lane, in the time of one float32 multiply-add; a pass over the quants, as they are stored, for each digit. Needs integer.h.
//
// q of a tile: the lower digits [groups][rows][32], then the higher ones.

// The sums of four vectors, by `op`.
template <class Op>
AIO_INLINE __m128i reduce4(const __m512i* v, const Op& op) {
  const __m512i a = op(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));  // 0 1 0 1
  const __m512i b = op(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i c = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));  // 0 1 2 3
  const __m512i d = op(c, _mm512_shuffle_i64x2(c, c, 0x4e));
  return _mm512_castsi512_si128(op(d, _mm512_shuffle_i64x2(d, d, 0xb1)));
}

// What the groups of a row are multiplied with and the units that follow, for 16 groups.
struct Units {
  __m512 unit;       // of the numbers: NaN if one of the group is not finite, 0 for nothing
  __m512 inverse;    // 0 for nothing
  __mmask16 single;  // one digit will do
};

// `choose_rounding` for 16 groups, from the bits of their largest magnitudes. A single digit is the lower one.
AIO_INLINE Units choose_units(__m512i top, float limit) {
  Units u;
  const __m512 largest = _mm512_castsi512_ps(top);
  const __mmask16 finite = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kLargestFinite), _CMP_LE_OQ);
  const __mmask16 some = _mm512_mask_cmp_ps_mask(finite, largest, _mm512_set1_ps(kNothing), _CMP_GT_OQ);
  u.single = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(limit), _CMP_LE_OQ) | (__mmask16)~some;
  const __m512 range = _mm512_mask_mov_ps(_mm512_set1_ps(kSplitTop), u.single, _mm512_set1_ps(kDigitTop));
  const __m512 a_unit = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f / kSplitTop), u.single, _mm512_set1_ps(1.0f / kDigitTop));
  u.inverse = _mm512_maskz_div_ps(some, range, largest);
  u.unit = _mm512_mask_mov_ps(_mm512_set1_ps(__builtin_nanf("")), finite, _mm512_maskz_mul_ps(some, largest, a_unit));
  return u;
}

// The bits of a group's largest magnitude, for `count` (1 to 16) groups of x: those of positive floats are ordered as integers, with
// infinity and NaN above all others.
AIO_INLINE void find_largest(const float* x, int count, int32_t* largest) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int g0 = 0; g0 < count; g0 += 4) {
    __m512i top[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      const float* from = x + (g0 + g < count ? g0 + g : 0) * kGroup;
      top[g] = _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(from), magnitude), _mm512_and_si512(_mm512_loadu_si512(from + 16), magnitude));
    }
    _mm_store_si128((__m128i*)(largest + g0), reduce4(top, [](__m512i u, __m512i v) { return _mm512_max_epi32(u, v); }));
  }
}

// The largest magnitude of a group's numbers that do not exceed `limit`.
AIO_INLINE float largest_within(__m512 a, __m512 b, float limit) {
  const auto within = [limit](__m512 v) {
    const __m512 magnitude = _mm512_abs_ps(v);
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(limit), _CMP_LE_OQ), magnitude);
  };
  return vhmax(_mm512_max_ps(within(a), within(b)));
}

// One group of a row in whole numbers.
struct Numbers {
  __m512i a, b;
};

AIO_INLINE Numbers round_group(const float* x, float inverse) {
  const __mmask16 there = inverse > 0.0f ? (__mmask16)0xffff : (__mmask16)0;  // NaN * 0 is no number
  const __m512 scale = _mm512_set1_ps(inverse);
  return {_mm512_maskz_cvtps_epi32(there, _mm512_mul_ps(_mm512_loadu_ps(x), scale)),
          _mm512_maskz_cvtps_epi32(there, _mm512_mul_ps(_mm512_loadu_ps(x + 16), scale))};
}

// The lower digit is the lower byte as it is.
AIO_INLINE void store_lower(const Numbers& n, int8_t* low) {
  _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(n.a)), _mm_storeu_si128((__m128i*)(low + 16), _mm512_cvtepi32_epi8(n.b));
}

// If that is negative, the higher one is one more than the byte above it. Returns a bit for each four columns that have one.
AIO_INLINE uint8_t store_higher(const Numbers& n, int8_t* high) {
  const __m512i carry = _mm512_set1_epi32(128);
  const __m128i a = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n.a, carry), 8));
  const __m128i b = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n.b, carry), 8));
  _mm_storeu_si128((__m128i*)high, a), _mm_storeu_si128((__m128i*)(high + 16), b);
  return (uint8_t)(_mm_test_epi32_mask(a, a) | _mm_test_epi32_mask(b, b) << 4);
}

// Row m of a tile of `rows`. In `fast`, numbers above `limit` do not count for the unit of their group, and they alone have a higher digit.
template <int F, bool fast>
AIO_INLINE void write_row(const float* x, i64 groups, i64 rows, i64 m, const IntegerTile& tile) {
  constexpr int halves = Traits<F>::halves;
  const float limit = fast ? standing_out(x, groups * kGroup) : -1.0f;
  for (i64 b0 = 0; b0 < groups; b0 += 16, x += 16 * kGroup) {
    const int count = (int)imin(16, groups - b0);
    alignas(64) int32_t largest[16] = {}, sums[halves][16];
    find_largest(x, count, largest);
    const Units units = choose_units(_mm512_load_si512(largest), limit);
    alignas(64) float unit[16], inverse[16], scaled_sum[16];
    _mm512_store_ps(unit, units.unit), _mm512_store_ps(inverse, units.inverse);
    for (int g0 = 0; g0 < count; g0 += 4) {
      __m512i sum[halves][4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const int g = g0 + i < count ? g0 + i : 0;  // the first once more: it is written as before
        const float* from = x + g * kGroup;
        int8_t *low = tile.q + ((b0 + g) * rows + m) * kGroup, *high = low + groups * rows * kGroup;
        const bool single = units.single >> g & 1;
        if (fast && __builtin_expect(!single, 0) && g0 + i < count) {
          const float rest = largest_within(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16), limit);
          const float top = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest[g])));
          // Two digits have to hold the largest.
          if (inverse[g] > 0.0f && rest * kSplitTop > top * kDigitTop) unit[g] = rest * (1.0f / kDigitTop), inverse[g] = kDigitTop / rest;
        }
        const Numbers numbers = round_group(from, inverse[g]);
        store_lower(numbers, low);
        if (!fast) {
          store_higher(numbers, high);
        } else if (__builtin_expect(single, 1)) {
          _mm256_storeu_si256((__m256i*)high, _mm256_setzero_si256());
        } else {
          const uint8_t quads = store_higher(numbers, high);
          if (quads) mark_higher(tile, b0 + g, quads);
        }
        sum[0][i] = halves == 2 ? numbers.a : _mm512_add_epi32(numbers.a, numbers.b), sum[halves - 1][i] = halves == 2 ? numbers.b : sum[0][i];
      }
      for (int h = 0; h < halves; h++)
        _mm_store_si128((__m128i*)(sums[h] + g0), reduce4(sum[h], [](__m512i u, __m512i v) { return _mm512_add_epi32(u, v); }));
    }
    if (Traits<F>::minimum) _mm512_store_ps(scaled_sum, _mm512_mul_ps(_mm512_load_ps(unit), _mm512_cvtepi32_ps(_mm512_load_si512(sums[0]))));
    for (int g = 0; g < count; g++) {
      const i64 b = b0 + g;
      tile.unit[b * rows + m] = unit[g];
      if (Traits<F>::minimum) tile.scaled_sum[b * rows + m] = scaled_sum[g];
      if (Traits<F>::zero)
        for (int h = 0; h < halves; h++) tile.offset[(b * halves + h) * rows + m] = -Traits<F>::zero * sums[h][g];
    }
  }
}

// Columns 4j .. 4j + 3 of a group for 16 rows, unsigned.
template <int F>
AIO_INLINE __m512i load_weights(const uint8_t* q, int j) {
  if (!Traits<F>::nibbles) return _mm512_loadu_si512(q + j * 64);
  const __m512i v = _mm512_loadu_si512(q + j % 4 * 64);
  return _mm512_and_si512(j < 4 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}

// The same for a j that only the run knows.
template <int F>
AIO_INLINE __m512i load_any_weights(const uint8_t* q, int j) {
  if (!Traits<F>::nibbles) return _mm512_loadu_si512(q + j * 64);
  return _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(q + j % 4 * 64), _mm_cvtsi32_si128(j & 4)), _mm512_set1_epi8(15));
}

// c[MR][NP] += four products a lane, for one vector of weights a panel: an activation's broadcast serves all of them.
template <int MR, int NP>
AIO_INLINE void add_products(const __m512i* w, const int8_t* x, __m512i (*c)[NP]) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    const __m512i four = _mm512_set1_epi32(*(const int32_t*)(x + m * kGroup));
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) c[m][p] = _mm512_dpbusd_epi32(c[m][p], w[p], four);
  }
}

// c[MR][NP] += the products of columns 4j on with one digit, for every j of half h.
template <int F, int MR, int NP>
AIO_INLINE void add_half(const uint8_t* q, i64 stride, const int8_t* x, int h, __m512i (*c)[NP]) {
  constexpr int count = 8 / Traits<F>::halves;
#pragma GCC unroll 8
  for (int j = h * 4; j < h * 4 + count; j++) {
    __m512i w[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) w[p] = load_weights<F>(q + p * stride, j);
    add_products<MR, NP>(w, x + j * 4, c);
  }
}

// The same for every bit j of `quads`.
template <int F, int MR, int NP>
AIO_INLINE void add_quads(const uint8_t* q, i64 stride, const int8_t* x, unsigned quads, __m512i (*c)[NP]) {
  for (; quads; quads &= quads - 1) {
    const int j = __builtin_ctz(quads);
    __m512i w[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) w[p] = load_any_weights<F>(q + p * stride, j);
    add_products<MR, NP>(w, x + j * 4, c);
  }
}

// y[MR][16 * NP] of NP panels, `stride` bytes apart. A lane collects the 32 products of a group, at most 32 * 255 * 32639 < 2^28. Which
// higher digits are zeros and left out depends on the tile's other rows: whole numbers, so a row's bits do not.
template <int F, int MR, int NP, bool fast>
static void integer_tile(const uint8_t* q, i64 stride, i64 groups, const Ahead& ahead, const IntegerTile& x, float* y, i64 ldy) {
  constexpr int halves = Traits<F>::halves;
  const uint8_t* scales = q + groups * Traits<F>::quant_bytes;
  const int8_t *low = x.q, *high = x.q + groups * MR * kGroup;
  vf f[MR][NP];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) f[m][p] = vzero();
  for (i64 b = 0; b < groups; b++, q += Traits<F>::quant_bytes, scales += Traits<F>::scale_bytes, high += kGroup * MR, low += kGroup * MR) {
    if (b >= ahead.first && b < ahead.last)
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) prefetch_group<F>(q + p * stride, scales + p * stride, ahead.bytes);
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
      __m512i c[MR][NP];
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++) c[m][p] = _mm512_setzero_si512();
      const unsigned quads = x.higher[b] >> (h * 4) & (halves == 2 ? 15u : 255u);
      if (!fast || __builtin_expect(quads != 0, 0)) {
        if (fast) add_quads<F, MR, NP>(q, stride, high, quads << (h * 4), c);
        else add_half<F, MR, NP>(q, stride, high, h, c);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
          for (int p = 0; p < NP; p++) c[m][p] = _mm512_slli_epi32(c[m][p], 8);
      }
      if (Traits<F>::zero) {
        const int32_t* offset = x.offset + (b * halves + h) * MR;
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
          for (int p = 0; p < NP; p++) c[m][p] = _mm512_add_epi32(c[m][p], _mm512_set1_epi32(offset[m]));
      }
      add_half<F, MR, NP>(q, stride, low, h, c);
      vf scale[NP], minimum[NP];
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) {
        scale[p] = load_scale<F>(scales + p * stride, h, 0);
        minimum[p] = Traits<F>::minimum ? load_scale<F>(scales + p * stride, 1, 0) : vzero();
      }
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const vf unit = vset(x.unit[b * MR + m]), sum = Traits<F>::minimum ? vset(x.scaled_sum[b * MR + m]) : vzero();
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++) {
          f[m][p] = vfma(_mm512_cvtepi32_ps(c[m][p]), vmul(scale[p], unit), f[m][p]);
          if (Traits<F>::minimum) f[m][p] = vfma(minimum[p], sum, f[m][p]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) vstore(y + m * ldy + p * 16, f[m][p]);
}

// 8-bit weights are loads already: two panels would be short of them.
template <int F>
constexpr int kPanels = Traits<F>::nibbles ? 2 : 1;
constexpr int kIntegerSums = 12;
