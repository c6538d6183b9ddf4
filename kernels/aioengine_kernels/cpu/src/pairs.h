// Exact products of quantized weights by integer dot products (AVX2). Needs integer.h.
//
// vpmaddwd multiplies 16 pairs of 16-bit numbers, twice as many as a float32 multiply-add; the weights of a panel are widened
// to 16 bits once for all rows, in half the room of float32.

// Loads 32 floats; returns the largest of their magnitudes, infinity or NaN if one of them is. The bits of positive floats are
// ordered as integers, with infinity and NaN above all others.
AIO_INLINE float largest_magnitude(const float* x, __m256* v) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (int j = 0; j < 4; j++) {
    v[j] = _mm256_loadu_ps(x + j * 8);
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(v[j]), magnitude));
  }
  __m128i most4 = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  most4 = _mm_max_epi32(most4, _mm_shuffle_epi32(most4, 0x4e));
  most4 = _mm_max_epi32(most4, _mm_shuffle_epi32(most4, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(most4));
}

AIO_INLINE int32_t sum_of(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_hadd_epi32(s, s), s = _mm_hadd_epi32(s, s);
  return _mm_cvtsi128_si32(s);
}

constexpr i64 kPairRows = 6;       // 6 x 2 sums, 2 vectors of weights, an activation, a product: all 16 registers
constexpr i64 kGroupsAtATime = 16;  // 16 KiB of widened weights: half of L1

// A pair is two columns whose bytes are two apart, since one mask takes them out of a word together: columns 0 and 2, 1 and 3, 4 and 6..
// q of a tile: [groups][16 pairs][rows][2].

// 32 floats -> 16 pairs, `stride` apart; returns the scale (NaN if one of them is not finite) and at `sum` the sum of the numbers.
AIO_INLINE float pair_group(const float* x, int32_t* out, i64 stride, int32_t* sum) {
  __m256 v[4];
  const float top = largest_magnitude(x, v);
  const Rounding rounding = choose_rounding(top, -1.0f);
  const __m256 inverse = _mm256_set1_ps(rounding.inverse);
  __m256i w[4];
  for (int j = 0; j < 4; j++) w[j] = rounding.some ? _mm256_cvtps_epi32(_mm256_mul_ps(v[j], inverse)) : _mm256_setzero_si256();
  *sum = sum_of(_mm256_add_epi32(_mm256_add_epi32(w[0], w[1]), _mm256_add_epi32(w[2], w[3])));
  const __m256i two_apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  alignas(32) int32_t pairs[16];
  for (int j = 0; j < 2; j++) {
    const __m256i words = _mm256_shuffle_epi8(_mm256_packs_epi32(w[2 * j], w[2 * j + 1]), two_apart);
    _mm256_store_si256((__m256i*)(pairs + 8 * j), _mm256_permute4x64_epi64(words, 0xd8));
  }
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++) out[j * stride] = pairs[j];
  return rounding.unit;
}

AIO_INLINE void pair_row(const float* x, i64 groups, i64 rows, i64 m, const IntegerTile& tile) {
  for (i64 b = 0; b < groups; b++) {
    int32_t sum;
    const float unit = pair_group(x + b * kGroup, (int32_t*)tile.q + b * 16 * rows + m, rows, &sum);
    tile.unit[b * rows + m] = unit;
    tile.scaled_sum[b * rows + m] = unit * (float)sum;
  }
}

// The weights of one group as 16-bit numbers, [16 pairs][16 rows][2].
template <int F>
AIO_INLINE void widen_group(const uint8_t* q, int16_t* out) {
  const __m256i mask = _mm256_set1_epi16(Traits<F>::nibbles ? 15 : 255), zero = _mm256_set1_epi16(Traits<F>::zero);
#pragma GCC unroll 8
  for (int j = 0; j < (Traits<F>::nibbles ? 4 : 8); j++) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const __m256i bytes = _mm256_loadu_si256((const __m256i*)(q + j * 64 + v * 32));
      const auto put = [&](int pair, __m256i words) {
        _mm256_store_si256((__m256i*)(out + pair * 32 + v * 16), Traits<F>::zero ? _mm256_sub_epi16(words, zero) : words);
      };
      put(2 * j, _mm256_and_si256(bytes, mask));
      if (Traits<F>::nibbles) {
        put(2 * j + 1, _mm256_and_si256(_mm256_srli_epi16(bytes, 8), mask));
        put(2 * j + 8, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
        put(2 * j + 9, _mm256_srli_epi16(bytes, 12));
      } else {
        put(2 * j + 1, _mm256_srli_epi16(bytes, 8));
      }
    }
  }
}

// sum += the products of both pairs of every lane. In one piece: left to itself, the compiler first collects many products and then
// has no register for the sums, whose chain goes through memory.
AIO_INLINE void add_pairs(__m256i& sum, __m256i w, __m256i pair) {
  __m256i products;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(w), "x"(pair));
}

// y[MR][16] (+)= `groups` groups of one panel. A lane collects the 32 products of a group, at most 32 * 128 * 32639 < 2^27.
template <int F, int MR>
static void pair_tile(const int16_t* w, const uint8_t* scales, i64 groups, const IntegerTile& x, float* y, i64 ldy, bool first) {
  constexpr int halves = Traits<F>::halves;
  const int32_t* xq = (const int32_t*)x.q;
  vf f[MR][2];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) f[m][v] = first ? vzero() : vload(y + m * ldy + v * 8);
  for (i64 b = 0; b < groups; b++, scales += Traits<F>::scale_bytes) {
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
      __m256i c[MR][2];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) c[m][0] = c[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int p = 0; p < 16 / halves; p++, w += 32, xq += MR) {
        const __m256i w0 = _mm256_load_si256((const __m256i*)w), w1 = _mm256_load_si256((const __m256i*)(w + 16));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          const __m256i pair = _mm256_set1_epi32(xq[m]);
          add_pairs(c[m][0], w0, pair);
          add_pairs(c[m][1], w1, pair);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const vf scale = load_scale<F>(scales, h, v), minimum = Traits<F>::minimum ? load_scale<F>(scales, 1, v) : vzero();
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          f[m][v] = vfma(_mm256_cvtepi32_ps(c[m][v]), vmul(scale, vset(x.unit[b * MR + m])), f[m][v]);
          if (Traits<F>::minimum) f[m][v] = vfma(minimum, vset(x.scaled_sum[b * MR + m]), f[m][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) vstore(y + m * ldy + v * 8, f[m][v]);
}

// One panel, all rows. `y` is its first column of the output, or a buffer.
template <int F>
static void pair_panel(const LinearArgs& a, const RowTiles& tiles, const IntegerRows& x, const uint8_t* panel, i64 ahead, float* y, i64 ldy) {
  alignas(64) int16_t buffer[kGroupsAtATime * 16 * 32];
  const i64 groups = a.k / kGroup;
  const uint8_t* scales = panel + groups * Traits<F>::quant_bytes;
  for (i64 b0 = 0; b0 < groups; b0 += kGroupsAtATime) {
    const i64 count = imin(kGroupsAtATime, groups - b0);
    for (i64 b = 0; b < count; b++) {
      prefetch_group<F>(panel + (b0 + b) * Traits<F>::quant_bytes, scales + (b0 + b) * Traits<F>::scale_bytes, ahead);
      widen_group<F>(panel + (b0 + b) * Traits<F>::quant_bytes, buffer + b * 512);
    }
    for (i64 t = 0; t < tiles.count; t++) {
      const i64 rows = tiles.rows(t), first = tiles.first(t);
      IntegerTile tile = x.tile(tiles, t);
      tile.q += b0 * kGroup * 2 * rows, tile.unit += b0 * rows, tile.scaled_sum += b0 * rows;
      const uint8_t* s = scales + b0 * Traits<F>::scale_bytes;
      float* out = y + first * ldy;
      switch (rows) {
        case 1: pair_tile<F, 1>(buffer, s, count, tile, out, ldy, b0 == 0); break;
        case 2: pair_tile<F, 2>(buffer, s, count, tile, out, ldy, b0 == 0); break;
        case 3: pair_tile<F, 3>(buffer, s, count, tile, out, ldy, b0 == 0); break;
        case 4: pair_tile<F, 4>(buffer, s, count, tile, out, ldy, b0 == 0); break;
        case 5: pair_tile<F, 5>(buffer, s, count, tile, out, ldy, b0 == 0); break;
        case 6: pair_tile<F, 6>(buffer, s, count, tile, out, ldy, b0 == 0); break;
      }
    }
  }
}

template <int F>
static void pairs_format(const LinearArgs& a) {
  const RowTiles tiles(a.m, kPairRows);
  const IntegerRows x(a, tiles, Traits<F>::halves);
  fill_rows(a, tiles, x, [&](const float* row, i64 rows, i64 m, const IntegerTile& tile) { pair_row(row, x.groups, rows, m, tile); });
  const i64 panel_bytes = panel_layout(F, a.k).bytes, panels = ceil_div(a.n, 16);
  parallel(a.num_threads, panels, imax(1, panels / (8 * a.num_threads)), [&](i64 begin, i64 end) {
    for (i64 p = begin; p < end; p++)
      write_panel(a, p, [&](float* y, i64 ldy) { pair_panel<F>(a, tiles, x, a.weights + p * panel_bytes, panel_bytes, y, ldy); });
  });
}
