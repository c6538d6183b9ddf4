// Integer products of 4-bit weights in fast mode on AVX2: vpmaddubsw multiplies 32 unsigned weights with signed digits and adds pairs, with
// 16-bit saturation. Needs integer.h. 8-bit weights would need as many instructions as with 16-bit activations: pairs.h.
//
// q of a tile: the higher digits [groups][rows][32], then the lower ones.

template <int F, bool fast>
AIO_INLINE void write_row(const float* x, i64 groups, i64 rows, i64 m, const IntegerTile& tile) {
  const float limit = standing_out(x, groups * kGroup);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (i64 b = 0; b < groups; b++) {
    __m256 v[4];
    const float top = largest_magnitude(x + b * kGroup, v);
    const Rounding rounding = choose_rounding(top, limit);
    const __m256 inverse = _mm256_set1_ps(rounding.inverse);
    const __m128i shift = _mm_cvtsi32_si128(rounding.single ? 8 : 0);
    __m256i w[4];
    for (int j = 0; j < 4; j++)
      w[j] = rounding.some ? _mm256_sll_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v[j], inverse)), shift) : _mm256_setzero_si256();
    const int32_t sum = sum_of(_mm256_add_epi32(_mm256_add_epi32(w[0], w[1]), _mm256_add_epi32(w[2], w[3])));
    const __m256i a = _mm256_packs_epi32(w[0], w[1]), c = _mm256_packs_epi32(w[2], w[3]), half = _mm256_set1_epi16(128);
    const auto higher = [&](__m256i words) { return _mm256_srai_epi16(_mm256_add_epi16(words, half), 8); };
    const auto lower = [&](__m256i words) { return _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8); };
    int8_t* out = tile.q + (b * rows + m) * kGroup;
    const auto put = [&](int8_t* to, __m256i first, __m256i second) {
      _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order));
    };
    put(out, higher(a), higher(c));
    put(out + groups * rows * kGroup, lower(a), lower(c));
    tile.unit[b * rows + m] = rounding.unit;
    tile.scaled_sum[b * rows + m] = rounding.unit * (float)sum;
    tile.offset[b * rows + m] = -Traits<F>::zero * sum;
    if (!rounding.single) mark_higher(tile, b, 1);
  }
}

// sum += the products of two pairs in every 16-bit lane; in one piece for the reason given at add_pairs.
AIO_INLINE void add_bytes(__m256i& sum, __m256i w, __m256i x) {
  __m256i products;
  asm("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(w));
}

// c[MR][2] = the products of one digit of a group, in pairs. A 16-bit lane collects 16 of them, 16 * 15 * 128 = 30720 < 2^15.
template <int MR>
AIO_INLINE void multiply_digit(const uint8_t* q, const int8_t* x, __m256i (*c)[2]) {
  const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) c[m][0] = c[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    __m256i w[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const __m256i both = _mm256_loadu_si256((const __m256i*)(q + j % 4 * 64 + v * 32));
      w[v] = _mm256_and_si256(j < 4 ? both : _mm256_srli_epi16(both, 4), low);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const __m256i four = _mm256_set1_epi32(*(const int32_t*)(x + m * kGroup + j * 4));
      add_bytes(c[m][0], w[0], four);
      add_bytes(c[m][1], w[1], four);
    }
  }
}

// f[MR][2] += the sums of group b, `c` pairwise and, in 32 bits, `more`. `shift` takes the offset to the unit of the sums.
template <int F, int MR, class More>
AIO_INLINE void add_group(const uint8_t* scales, i64 b, const IntegerTile& x, float factor, int shift, const __m256i (*c)[2], vf (*f)[2],
                          const More& more) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    const vf scale = vmul(load_scale<F>(scales, 0, v), vset(factor));
    const vf minimum = Traits<F>::minimum ? load_scale<F>(scales, 1, v) : vzero();
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      __m256i total = more(_mm256_madd_epi16(c[m][v], _mm256_set1_epi16(1)), m, v);
      if (Traits<F>::zero) total = _mm256_add_epi32(total, _mm256_set1_epi32(x.offset[b * MR + m] >> shift));
      f[m][v] = vfma(_mm256_cvtepi32_ps(total), vmul(scale, vset(x.unit[b * MR + m])), f[m][v]);
      if (Traits<F>::minimum) f[m][v] = vfma(minimum, vset(x.scaled_sum[b * MR + m]), f[m][v]);
    }
  }
}

// y[MR][16] of one panel. With one digit the sum is that of the numbers over 256, and the scale 256 times as large: powers of two, so
// a row's bits are the same in either branch.
template <int F, int MR, int NP, bool fast>
static void integer_tile(const uint8_t* q, i64, i64 groups, const Ahead& ahead, const IntegerTile& x, float* y, i64 ldy) {
  static_assert(NP == 1, "one panel");
  const uint8_t* scales = q + groups * Traits<F>::quant_bytes;
  const int8_t *high = x.q, *low = x.q + groups * MR * kGroup;
  vf f[MR][2];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) f[m][0] = f[m][1] = vzero();
  for (i64 b = 0; b < groups; b++, q += Traits<F>::quant_bytes, scales += Traits<F>::scale_bytes, high += kGroup * MR, low += kGroup * MR) {
    if (b >= ahead.first && b < ahead.last) prefetch_group<F>(q, scales, ahead.bytes);
    __m256i c[MR][2];
    multiply_digit<MR>(q, high, c);
    if (!x.higher[b]) {
      add_group<F, MR>(scales, b, x, 256.0f, 8, c, f, [](__m256i sum, int, int) { return sum; });
      continue;
    }
    __m256i higher[MR][2];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) higher[m][v] = _mm256_slli_epi32(_mm256_madd_epi16(c[m][v], _mm256_set1_epi16(1)), 8);
    const uint8_t* again = q;
    asm("" : "+r"(again));  // unpacked anew: left to itself the compiler keeps the weights of both passes, in memory
    multiply_digit<MR>(again, low, c);
    add_group<F, MR>(scales, b, x, 1.0f, 0, c, f, [&](__m256i sum, int m, int v) { return _mm256_add_epi32(sum, higher[m][v]); });
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) vstore(y + m * ldy + v * 8, f[m][v]);
}

template <int F>
constexpr int kPanels = 1;
constexpr int kIntegerSums = 6;
