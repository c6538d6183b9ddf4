// What all products share: tiles of rows, the formats of packed panels, the way to a panel of the output. Needs simd.h.

// Rows of x are cut into tiles of nearly equal height, at most `height`.
struct RowTiles {
  i64 m, count;
  RowTiles(i64 rows, i64 height) : m(rows), count(ceil_div(rows, height)) {}
  i64 rows(i64 t) const { return m / count + (t < m % count); }
  i64 first(i64 t) const { return t * (m / count) + imin(t, m % count); }
};

template <int F>
struct Traits {
  static constexpr bool dense = F == kF32 || F == kF16 || F == kBF16;
  static constexpr bool nibbles = F == kQ4_0 || F == kQ4_1 || F == kQ4_K;
  static constexpr bool minimum = F == kQ4_1 || F == kQ4_K || F == kQ5_K;
  static constexpr bool wide = F == kQ4_K || F == kQ6_K || F == kQ5_K;  // float32 scales
  static constexpr int halves = F == kQ6_K ? 2 : 1;       // scales a group
  static constexpr int zero = minimum ? 0 : F == kQ4_0 ? 8 : 128;  // the quant that stands for 0
  static constexpr i64 quant_bytes = nibbles ? 256 : 512;
  static constexpr i64 scale_bytes = (wide ? 64 : 32) * (minimum || halves == 2 ? 2 : 1);
};

// Entry `v` (of kV vectors) of array `which` (0: scale, 1: minimum or second scale) of a group's scales.
template <int F>
AIO_INLINE vf load_scale(const uint8_t* scales, int which, int v) {
  if (Traits<F>::wide) return vload((const float*)scales + which * 16 + v * kW);
  return vload_f16((const uint16_t*)scales + which * 16 + v * kW);
}

// Asks for the same group `ahead` bytes further on, in a panel to come. A panel is two streams of a few KiB: the hardware's
// prefetchers, which stop at every page, would spend half the time starting over. Into L2: more can be on their way there.
template <int F>
AIO_INLINE void prefetch_group(const uint8_t* q, const uint8_t* scales, i64 ahead) {
#pragma GCC unroll 8
  for (i64 byte = 0; byte < Traits<F>::quant_bytes; byte += 64) __builtin_prefetch(q + ahead + byte, 0, 2);
#pragma GCC unroll 2
  for (i64 byte = 0; byte < Traits<F>::scale_bytes; byte += 64) __builtin_prefetch(scales + ahead + byte, 0, 2);
}

AIO_INLINE void add_bias(const LinearArgs& a, i64 n0, i64 n1) {
  if (!a.bias) return;
  for (i64 m = 0; m < a.m; m++)
    for (i64 n = n0; n < n1; n++) a.y[m * a.ldy + n] += a.bias[n];
}

// multiply(y, ldy) for all rows of one panel: y is its place in the output or, where that ends within it, a buffer.
template <class Multiply>
AIO_INLINE void write_panel(const LinearArgs& a, i64 panel, const Multiply& multiply) {
  const i64 n0 = panel * 16, columns = imin(16, a.n - n0);
  float* y = columns == 16 ? a.y + n0 : (float*)scratch(2, a.m * 16 * sizeof(float));
  multiply(y, columns == 16 ? a.ldy : 16);
  if (columns < 16)
    for (i64 m = 0; m < a.m; m++)
      for (i64 n = 0; n < columns; n++) a.y[m * a.ldy + n0 + n] = y[m * 16 + n];
  add_bias(a, n0, n0 + columns);
}
