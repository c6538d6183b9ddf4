// y = x W^T + b on packed panels. Needs simd.h, tiles.h, and the integer products of the instruction set.
//
// Every element of y is one chain of fused multiply-adds in the order of k (float32) or of groups of 32 columns (by integers:
// integer.h), whatever the tile, the chunk of k or the thread. Hence a row's bits do not depend on the other rows.

// ---- exact -------------------------------------------------------------------------------------------------------

// The float32 weights of one group, [32][16], bit for bit what dequantizing the file gives: every product of a scale
// and a quant is exact, so fusing it with the addition changes nothing. The portable build's: the others multiply by integers.
template <int F>
AIO_INLINE void dequantize_group(const uint8_t* q, const uint8_t* scales, float* out) {
  for (int h = 0; h < 2; h++) {
    const vf s = load_scale<F>(scales, 0, h);
    const vf second = Traits<F>::minimum || Traits<F>::halves == 2 ? load_scale<F>(scales, 1, h) : vzero();
    for (int k = 0; k < kGroup; k++) {
      for (int r = 0; r < 8; r++) {
        const uint8_t* byte = q + (Traits<F>::nibbles ? k % 16 : k) / 4 * 64 + (h * 8 + r) * 4 + k % 4;
        const int value = (Traits<F>::nibbles ? (k < 16 ? *byte & 15 : *byte >> 4) : *byte) - Traits<F>::zero;
        const float scale = Traits<F>::halves == 2 && k >= 16 ? second[r] : s[r];
        out[k * 16 + h * 8 + r] = Traits<F>::minimum ? (float)value * scale + second[r] : (float)value * scale;
      }
    }
  }
}

// Columns k0 .. k0 + kc of a panel as float32, [kc][16].
template <int F>
AIO_INLINE void dequantize_panel(const uint8_t* panel, i64 k, i64 k0, i64 kc, i64 ahead, float* out) {
  if (Traits<F>::dense) {
    const uint16_t* from = (const uint16_t*)panel + k0 * 16;
    for (i64 i = 0; i < kc * 16; i += kW) vstore(out + i, F == kF16 ? vload_f16(from + i) : vload_bf16(from + i));
    return;
  }
  const uint8_t* scales = panel + k / kGroup * Traits<F>::quant_bytes;
  for (i64 b = k0 / kGroup; b < (k0 + kc) / kGroup; b++, out += kGroup * 16) {
    prefetch_group<F>(panel + b * Traits<F>::quant_bytes, scales + b * Traits<F>::scale_bytes, ahead);
    dequantize_group<F>(panel + b * Traits<F>::quant_bytes, scales + b * Traits<F>::scale_bytes, out);
  }
}

// Rows of a tile against two panels (AVX-512) or one: its sums, the weights and an activation fill the vector registers.
#if AIO_ISA == 512
constexpr int kExactRows = 12;
#elif AIO_ISA == 2
constexpr int kExactRows = 6;
#else
constexpr int kExactRows = 4;
#endif
// Vectors of sums that a tile may have: of 32 registers on AVX-512. Where there are 16, kExactRows is the tighter limit.
constexpr int kMostSums = 24;

// y[MR][NP * 16] (+)= x[kc][MR]^T w, with panel p of the weights at w + p * panel_stride, [kc][16].
template <int MR, int NP>
AIO_INLINE void exact_tile(const float* x, const float* w, i64 panel_stride, i64 kc, float* y, i64 ldy, bool first) {
  constexpr int NV = NP * kV;
  vf c[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) c[m][v] = first ? vzero() : vload(y + m * ldy + v * kW);
  for (i64 k = 0; k < kc; k++) {
    vf wv[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) wv[v] = vload(w + v / kV * panel_stride + k * 16 + v % kV * kW);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const vf a = vset(x[k * MR + m]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) c[m][v] = vfma(a, wv[v], c[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) vstore(y + m * ldy + v * kW, c[m][v]);
}

template <int NP>
static void exact_rows(i64 rows, const float* x, const float* w, i64 panel_stride, i64 kc, float* y, i64 ldy, bool first) {
#define AIO_CASE(MR) \
  case MR:           \
    if (MR <= kExactRows && MR * NP * kV <= kMostSums) exact_tile<(MR * NP * kV <= kMostSums ? MR : 1), NP>(x, w, panel_stride, kc, y, ldy, first); \
    break;
  switch (rows) {
    AIO_CASE(1) AIO_CASE(2) AIO_CASE(3) AIO_CASE(4) AIO_CASE(5) AIO_CASE(6)
    AIO_CASE(7) AIO_CASE(8) AIO_CASE(9) AIO_CASE(10) AIO_CASE(11) AIO_CASE(12)
  }
#undef AIO_CASE
}

// Numbers to copy from which on a second thread gains more than its wake-up costs.
constexpr i64 kWorthSharingCopies = 65536;

// x [m, k] -> tiles of [k][rows of the tile], tile t at first(t) * k.
static void transpose_tiles(const LinearArgs& a, const RowTiles& tiles, float* out) {
  parallel(a.m * a.k > kWorthSharingCopies ? a.num_threads : 1, tiles.count, 1, [&](i64 begin, i64 end) {
    for (i64 t = begin; t < end; t++) {
      const i64 rows = tiles.rows(t);
      const float* from = a.x + tiles.first(t) * a.ldx;
      float* to = out + tiles.first(t) * a.k;
      for (i64 k0 = 0; k0 < a.k; k0 += 16)  // short runs keep both sides in L1
        for (i64 m = 0; m < rows; m++)
          for (i64 k = k0; k < imin(k0 + 16, a.k); k++) to[k * rows + m] = from[m * a.ldx + k];
    }
  });
}

// NP panels from `panel` on, all rows. `y` is column 16 * panel of the output, or a buffer.
template <int F, int NP>
static void exact_panels(const LinearArgs& a, const RowTiles& tiles, const float* x, i64 panel_bytes, i64 panel, float* y, i64 ldy) {
  constexpr i64 KC = 256 / NP;  // 16 KiB of float32 weights: half of L1
  alignas(64) float buffer[F == kF32 ? 16 : 256 * 16];
  for (i64 k0 = 0; k0 < a.k; k0 += KC) {
    const i64 kc = imin(KC, a.k - k0);
    const float* w = buffer;
    i64 stride = KC * 16;
    if (F == kF32) {
      w = (const float*)(a.weights + panel * panel_bytes) + k0 * 16;
      stride = panel_bytes / 4;
    } else {
      for (int p = 0; p < NP; p++) dequantize_panel<F>(a.weights + (panel + p) * panel_bytes, a.k, k0, kc, NP * panel_bytes, buffer + p * stride);
    }
    for (i64 t = 0; t < tiles.count; t++) {
      const i64 rows = tiles.rows(t), first = tiles.first(t);
      exact_rows<NP>(rows, x + first * a.k + k0 * rows, w, stride, kc, y + first * ldy, ldy, k0 == 0);
    }
  }
}

template <int F, int NP>
static void exact_task(const LinearArgs& a, const RowTiles& tiles, const float* x, i64 panel_bytes, i64 panel) {
  if ((panel + NP) * 16 <= a.n) {
    exact_panels<F, NP>(a, tiles, x, panel_bytes, panel, a.y + panel * 16, a.ldy);
    add_bias(a, panel * 16, (panel + NP) * 16);
    return;
  }
  for (; panel * 16 < a.n; panel++)
    write_panel(a, panel, [&](float* y, i64 ldy) { exact_panels<F, 1>(a, tiles, x, panel_bytes, panel, y, ldy); });
}

template <int F, int NP>
static void exact_run(const LinearArgs& a, i64 height) {
  const RowTiles tiles(a.m, height);
  const float* x = a.x;
  if (a.m > 1) {
    float* packed = (float*)scratch(0, a.m * a.k * sizeof(float));
    transpose_tiles(a, tiles, packed);
    x = packed;
  }
  const i64 panel_bytes = panel_layout(F, a.k).bytes, tasks = ceil_div(a.n, 16 * NP);
  parallel(a.num_threads, tasks, imax(1, tasks / (8 * a.num_threads)), [&](i64 begin, i64 end) {
    for (i64 t = begin; t < end; t++) exact_task<F, NP>(a, tiles, x, panel_bytes, t * NP);
  });
}

// Few rows: more panels at a time, for as many independent chains as the multipliers' latency asks for.
template <int F>
static void exact_format(const LinearArgs& a) {
#if AIO_ISA == 512
  if (a.m <= 4) return exact_run<F, 4>(a, 4);
  return exact_run<F, 2>(a, kExactRows);
#else
  if (a.m == 1) return exact_run<F, 4>(a, 1);
  if (a.m <= 3) return exact_run<F, 2>(a, 3);
  return exact_run<F, 1>(a, kExactRows);
#endif
}

// ---- by integers -------------------------------------------------------------------------------------------------

// `rows` rows of x against NP panels.
template <int F, bool fast, int NP>
static void integer_panels(const LinearArgs& a, const uint8_t* panel, i64 panel_bytes, const Ahead& ahead, i64 n0, i64 m0, i64 rows,
                           const IntegerTile& x) {
  constexpr int most = kIntegerSums / kPanels<F>;  // rows
  const i64 groups = a.k / kGroup, columns = imin(16 * NP, a.n - n0);  // several panels are whole ones
  alignas(64) float buffer[most * 16];
  float *out = a.y + m0 * a.ldy + n0, *y = columns == 16 * NP ? out : buffer;
  const i64 ldy = columns == 16 * NP ? a.ldy : 16;
#define AIO_CASE(MR) \
  case MR:           \
    if (MR <= most) integer_tile<F, (MR <= most ? MR : 1), NP, fast>(panel, panel_bytes, groups, ahead, x, y, ldy); \
    break;
  switch (rows) {
    AIO_CASE(1) AIO_CASE(2) AIO_CASE(3) AIO_CASE(4) AIO_CASE(5) AIO_CASE(6)
    AIO_CASE(7) AIO_CASE(8) AIO_CASE(9) AIO_CASE(10) AIO_CASE(11) AIO_CASE(12)
  }
#undef AIO_CASE
  for (i64 m = 0; m < rows; m++) {
    if (y == buffer)
      for (i64 n = 0; n < columns; n++) out[m * a.ldy + n] = buffer[m * 16 + n];
    if (a.bias)
      for (i64 n = 0; n < columns; n++) out[m * a.ldy + n] += a.bias[n0 + n];
  }
}

// So few rows are bound by reading the weights: a thread takes one run of panels, for what it asks for ahead of time is its own.
constexpr i64 kFewRows = 4;
constexpr i64 kPanelsAtATime = 8;

// A tile of x stays in L1 while a few panels, which stay in L2, pass by; then comes the next tile, at the end the next panels. Each tile
// asks for its share of those.
template <int F, bool fast>
static void integer_format(const LinearArgs& a) {
  constexpr int NP = kPanels<F>;
  const RowTiles tiles(a.m, kIntegerSums / NP);
  const IntegerRows x(a, tiles, Traits<F>::halves);
  fill_rows(a, tiles, x, [&](const float* row, i64 rows, i64 m, const IntegerTile& tile) { write_row<F, fast>(row, x.groups, rows, m, tile); });
  const i64 panel_bytes = panel_layout(F, a.k).bytes, panels = ceil_div(a.n, 16), whole = a.n / 16;
  const i64 chunk = a.m <= kFewRows ? ceil_div(panels, a.num_threads) : imax(1, panels / (8 * a.num_threads));
  parallel(a.num_threads, panels, ceil_div(chunk, NP) * NP, [&](i64 begin, i64 end) {
    for (i64 p0 = begin, p1; p0 < end; p0 = p1) {
      p1 = imin(p0 + kPanelsAtATime, end);
      for (i64 t = 0; t < tiles.count; t++) {
        const Ahead ahead = {kPanelsAtATime * panel_bytes, t * x.groups / tiles.count, (t + 1) * x.groups / tiles.count};
        for (i64 p = p0, next; p < p1; p = next) {
          next = p + NP <= imin(p1, whole) ? p + NP : p + 1;
          const uint8_t* panel = a.weights + p * panel_bytes;
          if (next == p + NP) integer_panels<F, fast, NP>(a, panel, panel_bytes, ahead, p * 16, tiles.first(t), tiles.rows(t), x.tile(tiles, t));
          else integer_panels<F, fast, 1>(a, panel, panel_bytes, ahead, p * 16, tiles.first(t), tiles.rows(t), x.tile(tiles, t));
        }
      }
    }
  });
}

// Quantized weights, exact: float32 multiply-adds on any CPU, integers where they are faster.
template <int F>
static void exact_quantized(const LinearArgs& a) {
#if AIO_ISA == 512
  integer_format<F, false>(a);
#elif AIO_ISA == 2
  pairs_format<F>(a);
#else
  exact_format<F>(a);
#endif
}

static void linear_exact(const LinearArgs* a) {
  switch (a->format) {
    case kF32: return exact_format<kF32>(*a);
    case kF16: return exact_format<kF16>(*a);
    case kBF16: return exact_format<kBF16>(*a);
    case kQ4_0: return exact_quantized<kQ4_0>(*a);
    case kQ4_1: return exact_quantized<kQ4_1>(*a);
    case kQ8_0: return exact_quantized<kQ8_0>(*a);
    case kQ4_K: return exact_quantized<kQ4_K>(*a);
    case kQ6_K: return exact_quantized<kQ6_K>(*a);
    case kQ5_K: return exact_quantized<kQ5_K>(*a);
  }
}

static void linear_fast(const LinearArgs* a) {
  switch (a->format) {
    case kQ4_0: return integer_format<kQ4_0, true>(*a);
    case kQ4_1: return integer_format<kQ4_1, true>(*a);
    case kQ4_K: return integer_format<kQ4_K, true>(*a);
#if AIO_ISA != 2  // 8 bits by 8 take AVX2 as many instructions as 8 by 16
    case kQ8_0: return integer_format<kQ8_0, true>(*a);
    case kQ6_K: return integer_format<kQ6_K, true>(*a);
    case kQ5_K: return integer_format<kQ5_K, true>(*a);
#endif
    default: return linear_exact(a);  // dense weights have no integer form
  }
}
