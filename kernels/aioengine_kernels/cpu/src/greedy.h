// The column with the largest number of each row of y = x W^T, without the whole of the exact product. Needs linear.h.
//
// `fast` gives approximate numbers. By Cauchy and Schwarz, one is off by at most |w| |x - what x was rounded to|, and the float32 chains
// by their lengths. A column whose upper bound reaches the best exact number so far is computed exactly, with the bits that the exact
// product gives it: hence the first of the largest is that of the exact product too. Formats without a minimum alone: their float32 sums
// have no larger parts than |w| |x|. The portable build's exact product is the faster one for several rows: it has none of this.

#if AIO_ISA != 0

constexpr double kHalfUnit = 0.52 / kSplitTop;  // of a group's largest magnitude: what `exact` rounds away, float32 operations included
constexpr double kTooLarge = 1e30;              // nothing below it overflows, or is infinite where the exact number is not
constexpr double kSmallest = 1e-30;             // above what denormal numbers lose
constexpr i64 kFewPanels = 8;                   // or a sixteenth of them: a row with more candidates goes to the exact product

// Number i of a row that was rounded alone.
AIO_INLINE double rounded_number(const IntegerTile& tile, i64 k, i64 i) {
#if AIO_ISA == 512
  const int32_t whole = tile.q[i] + 256 * tile.q[k + i];
#else
  const int32_t whole = 256 * tile.q[i] + tile.q[k + i];
#endif
  return (double)whole * tile.unit[i / kGroup];
}

// The `fast` number of a column and its exact one differ by at most this times the norm of the column's weights, but for kSmallest.
// Negative: by how much cannot be said.
template <int F>
static double largest_difference(const LinearArgs& one, double largest_norm) {
  const IntegerRows rounded(one, RowTiles(1, 1), Traits<F>::halves);
  write_row<F, true>(one.x, rounded.groups, 1, 0, rounded.all);
  double lost = 0.0, lost_by_exact = 0.0, squares = 0.0, rounded_squares = 0.0;
  for (i64 b = 0; b < rounded.groups; b++) {
    double top = 0.0;
    for (i64 i = b * kGroup; i < (b + 1) * kGroup; i++) {
      const double x = one.x[i], near = rounded_number(rounded.all, one.k, i), magnitude = x < 0.0 ? -x : x;
      if (!(magnitude <= kLargestFinite)) return -1.0;
      lost += (x - near) * (x - near), squares += x * x, rounded_squares += near * near;
      top = magnitude > top ? magnitude : top;
    }
    const double off = top > kNothing ? top * kHalfUnit : top;
    lost_by_exact += kGroup * off * off;
  }
  const double size = __builtin_sqrt(squares) + __builtin_sqrt(rounded_squares) + __builtin_sqrt(lost_by_exact);
  if (!(size * largest_norm < kTooLarge)) return -1.0;
  const double roundings = (double)(rounded.groups * 8 + 64);  // more than in the two chains, and in comparing
  return (__builtin_sqrt(lost) + __builtin_sqrt(lost_by_exact) + roundings * 0x1p-24 * size) * (1.0 + 1e-6);
}

// The largest of score + norm * off of up to 64 columns.
AIO_INLINE float block_top(const float* score, const float* norm, i64 columns, float off) {
  if (columns < 64) {
    float top = score[0] + norm[0] * off;
    for (i64 i = 1; i < columns; i++) top = score[i] + norm[i] * off > top ? score[i] + norm[i] * off : top;
    return top;
  }
  vf top = vfma(vload(norm), vset(off), vload(score));
#pragma GCC unroll 8
  for (int i = kW; i < 64; i += kW) top = vmax(top, vfma(vload(norm + i), vset(off), vload(score + i)));
  return vhmax(top);
}

// The best column so far.
struct BestColumn {
  i64 column;
  float number;
};

// One panel of the exact product; of equal numbers the first column counts.
static void try_panel(const LinearArgs& row, i64 panel, i64 panel_bytes, BestColumn* best) {
  alignas(64) float y[16];
  LinearArgs one = row;
  one.n = imin(16, row.n - panel * 16), one.weights += panel * panel_bytes, one.y = y, one.ldy = 16;
  linear_exact(&one);
  for (i64 i = 0; i < one.n; i++) {
    const i64 column = panel * 16 + i;
    if (best->column < 0 || y[i] > best->number || (y[i] == best->number && column < best->column)) *best = {column, y[i]};
  }
}

// row: a row of x, with the `fast` product in y. -1: the whole exact product has to say.
template <int F>
static i64 greedy_row(const LinearArgs& row, const float* norms, double largest_norm) {
  const double difference = largest_difference<F>(row, largest_norm);
  if (difference < 0.0) return -1;
  i64 first = 0;  // the block with the best approximate number
  float best_score = 0.0f;
  for (i64 n = 0; n < row.n; n += 64) {
    const float top = block_top(row.y + n, norms + n, imin(64, row.n - n), 0.0f);
    if (n == 0 || top > best_score) best_score = top, first = n;
  }
  const i64 panel_bytes = panel_layout(F, row.k).bytes, panels = ceil_div(row.n, 16);
  i64 first_panel = first / 16, left = imax(kFewPanels, panels / 16);
  while (block_top(row.y + first_panel * 16, norms + first_panel * 16, imin(16, row.n - first_panel * 16), 0.0f) < best_score) first_panel++;
  BestColumn best = {-1, 0.0f};
  try_panel(row, first_panel, panel_bytes, &best);
  const float off = (float)difference, slack = (float)kSmallest;
  for (i64 n = 0; n < row.n; n += 64) {
    if (block_top(row.y + n, norms + n, imin(64, row.n - n), off) + slack < best.number) continue;
    for (i64 p = n / 16; p < imin(n / 16 + 4, panels); p++) {
      if (p == first_panel || block_top(row.y + p * 16, norms + p * 16, imin(16, row.n - p * 16), off) + slack < best.number) continue;
      if (left-- == 0) return -1;
      try_panel(row, p, panel_bytes, &best);
    }
  }
  return best.column;
}

template <int F>
static int32_t greedy_format(const LinearArgs& a, const float* norms, float largest_norm, int64_t* columns) {
  linear_fast(&a);
  parallel(a.num_threads, a.m, 1, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      LinearArgs row = a;
      row.fast = 0, row.num_threads = 1, row.m = 1, row.x += i * a.ldx, row.y += i * a.ldy;
      columns[i] = greedy_row<F>(row, norms, largest_norm);
    }
  });
  for (i64 i = 0; i < a.m; i++)
    if (columns[i] < 0) return 0;
  return 1;
}

#endif

// norms [n]: no column's weights have a larger one; largest_norm: no column has a larger one; columns [m]: out. 0: a row could not be
// decided, or the format has no faster product here.
static int32_t greedy(const LinearArgs* a, [[maybe_unused]] const float* norms, [[maybe_unused]] float largest_norm,
                      [[maybe_unused]] int64_t* columns) {
  switch (a->format) {
#if AIO_ISA != 0
    case kQ4_0: return greedy_format<kQ4_0>(*a, norms, largest_norm, columns);
#endif
#if AIO_ISA == 512
    case kQ8_0: return greedy_format<kQ8_0>(*a, norms, largest_norm, columns);
    case kQ6_K: return greedy_format<kQ6_K>(*a, norms, largest_norm, columns);
#endif
    default: return 0;
  }
}
