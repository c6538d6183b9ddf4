// Integer products in fast mode on any CPU: plain loops over 16-bit numbers. Needs integer.h.
//
// q of a tile: [groups][rows][32] of 16 bits.

template <int F, bool fast>
AIO_INLINE void write_row(const float* x, i64 groups, i64 rows, i64 m, const IntegerTile& tile) {
  constexpr int halves = Traits<F>::halves;
  const float limit = standing_out(x, groups * kGroup);
  for (i64 b = 0; b < groups; b++) {
    const float* from = x + b * kGroup;
    float top = 0.0f;
    bool finite = true;
    for (int i = 0; i < kGroup; i++) {
      const float magnitude = __builtin_fabsf(from[i]);
      top = magnitude <= top ? top : magnitude;
      finite = finite && magnitude <= kLargestFinite;
    }
    const Rounding rounding = choose_rounding(finite ? top : __builtin_nanf(""), limit);
    int16_t* out = (int16_t*)tile.q + (b * rows + m) * kGroup;
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < kGroup; i++) {
      const int32_t rounded = rounding.some ? (int32_t)round_to_whole(from[i] * rounding.inverse) : 0;
      out[i] = (int16_t)(rounding.single ? rounded * 256 : rounded);
      sums[i / (kGroup / halves)] += out[i];
    }
    tile.unit[b * rows + m] = rounding.unit;
    tile.scaled_sum[b * rows + m] = rounding.unit * (float)(sums[0] + sums[1]);
    for (int h = 0; h < halves; h++) tile.offset[(b * halves + h) * rows + m] = -Traits<F>::zero * sums[h];
  }
}

// y[MR][16] of one panel.
template <int F, int MR, int NP, bool fast>
static void integer_tile(const uint8_t* q, i64, i64 groups, const Ahead& ahead, const IntegerTile& x, float* y, i64 ldy) {
  static_assert(NP == 1, "one panel");
  const uint8_t* scales = q + groups * Traits<F>::quant_bytes;
  constexpr int halves = Traits<F>::halves, columns = kGroup / halves;
  vf f[MR][kV];
  for (int m = 0; m < MR; m++) f[m][0] = f[m][1] = vzero();
  for (i64 b = 0; b < groups; b++, q += Traits<F>::quant_bytes, scales += Traits<F>::scale_bytes) {
    if (b >= ahead.first && b < ahead.last) prefetch_group<F>(q, scales, ahead.bytes);
    const int16_t* numbers = (const int16_t*)x.q + b * MR * kGroup;
    for (int h = 0; h < halves; h++) {
      int32_t c[MR][16];
      for (int m = 0; m < MR; m++)
        for (int r = 0; r < 16; r++) c[m][r] = x.offset[(b * halves + h) * MR + m];
      for (int k = h * columns; k < (h + 1) * columns; k++) {
        for (int r = 0; r < 16; r++) {
          const uint8_t byte = q[(Traits<F>::nibbles ? k % 16 : k) / 4 * 64 + r * 4 + k % 4];
          const int32_t w = Traits<F>::nibbles ? (k < 16 ? byte & 15 : byte >> 4) : byte;
          for (int m = 0; m < MR; m++) c[m][r] += w * numbers[m * kGroup + k];
        }
      }
      for (int v = 0; v < kV; v++) {
        const vf scale = load_scale<F>(scales, h, v), minimum = Traits<F>::minimum ? load_scale<F>(scales, 1, v) : vzero();
        for (int m = 0; m < MR; m++) {
          vf total;
          for (int r = 0; r < kW; r++) total[r] = (float)c[m][v * kW + r];
          f[m][v] = vfma(total, vmul(scale, vset(x.unit[b * MR + m])), f[m][v]);
          if (Traits<F>::minimum) f[m][v] = vfma(minimum, vset(x.scaled_sum[b * MR + m]), f[m][v]);
        }
      }
    }
  }
  for (int m = 0; m < MR; m++)
    for (int v = 0; v < kV; v++) vstore(y + m * ldy + v * kW, f[m][v]);
}

template <int F>
constexpr int kPanels = 1;
constexpr int kIntegerSums = 4;
