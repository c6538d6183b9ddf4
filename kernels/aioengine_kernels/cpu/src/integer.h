// Products of quantized weights by integer dot products: what the instruction sets share. Needs tiles.h.
//
// Activations become whole numbers of 16 bits, a unit for each group of 32, in two signed digits of 8 bits; weights have 4 or 8 bits.
// Products and sums inside a group are exact, sums over groups are one float32 chain. `exact` gives every group its two digits: what
// is lost is the rounding of the activations, about 2e-5 of a result. `fast` gives most groups only one, and two to those that stand
// out of their row: few numbers, always much the same columns, carry most of what rounding to 8 bits loses (Dettmers et al., LLM.int8(),
// 2022, keep such columns in 16 bits for the same reason). On AVX-512 a number that stands out does not change the unit of its group:
// it alone has a second digit, and the second pass meets only the four columns around it.

constexpr float kSplitTop = 32639.0f;       // 127 * 256 + 127: two signed digits
constexpr float kDigitTop = 127.0f;         // one
constexpr float kLargestFinite = 3.4e38f;   // infinity and NaN are not below it; the last half percent of the range counts as infinite
constexpr float kNothing = 1e-20f;          // a group without a larger magnitude counts as zeros
// A number stands out whose magnitude is this many times the root mean square of its row. What that costs differs: a second pass over
// four columns on AVX-512, over a group of 32 elsewhere.
#if AIO_ISA == 512
constexpr float kStandsOut = 4.0f;
#else
constexpr float kStandsOut = 8.0f;
#endif

// A tile of rows. q: as each instruction set likes it, two bytes a number; unit and scaled_sum [groups][rows];
// offset [groups][halves][rows] = -zero * the sum of the numbers, what the unsigned storage of the weights added;
// higher [groups]: a bit for each four columns in which a row of the tile has a higher digit (AVX-512), or 1 (AVX2); 0: no row has one.
struct IntegerTile {
  int8_t* q;
  float* unit;
  float* scaled_sum;
  int32_t* offset;
  uint8_t* higher;
};

// The same for all tiles: tile t starts at first(t) * (elements a row).
struct IntegerRows {
  i64 k, groups;
  int halves;
  IntegerTile all;

  IntegerRows(const LinearArgs& a, const RowTiles& tiles, int halves_) : k(a.k), groups(a.k / kGroup), halves(halves_) {
    all.q = (int8_t*)scratch(0, a.m * (k * 2 + groups * (8 + 4 * halves)) + tiles.count * groups);
    all.unit = (float*)(all.q + a.m * k * 2);
    all.scaled_sum = all.unit + a.m * groups;
    all.offset = (int32_t*)(all.scaled_sum + a.m * groups);
    all.higher = (uint8_t*)(all.offset + a.m * groups * halves);
    __builtin_memset(all.higher, 0, tiles.count * groups);
  }

  IntegerTile tile(const RowTiles& tiles, i64 t) const {
    const i64 first = tiles.first(t);
    return {all.q + first * k * 2, all.unit + first * groups, all.scaled_sum + first * groups, all.offset + first * groups * halves,
            all.higher + t * groups};
  }
};

// Numbers that one thread rounds before it asks for more: some microseconds, well above what asking costs.
constexpr i64 kRowsAtATime = 4096;

// Calls write(row of x, rows of the tile, row in it, tile) for all rows.
template <class Write>
static void fill_rows(const LinearArgs& a, const RowTiles& tiles, const IntegerRows& out, const Write& write) {
  parallel(a.m * a.k > 4 * kRowsAtATime ? a.num_threads : 1, a.m, imax(1, kRowsAtATime / a.k), [&](i64 begin, i64 end) {
    i64 t = 0;
    for (i64 i = begin; i < end; i++) {
      while (tiles.first(t) + tiles.rows(t) <= i) t++;
      write(a.x + i * a.ldx, tiles.rows(t), i - tiles.first(t), out.tile(tiles, t));
    }
  });
}

// How the numbers of one group are rounded.
struct Rounding {
  bool some;      // more than nothing, and all of it finite: else the numbers are zeros
  bool single;    // one digit will do
  float inverse;  // what an activation is multiplied with; a single digit is then shifted to be the higher one
  float unit;     // of the numbers: NaN if an activation is not finite
};

// From the largest magnitude of a group, infinity or NaN if one of them is. Two digits above `limit`.
AIO_INLINE Rounding choose_rounding(float top, float limit) {
  const bool finite = top <= kLargestFinite, some = finite && top > kNothing, single = top <= limit;
  const float unit = some ? top * (single ? 1.0f / (kDigitTop * 256.0f) : 1.0f / kSplitTop) : 0.0f;
  return {some, single, some ? (single ? kDigitTop : kSplitTop) / top : 0.0f, finite ? unit : __builtin_nanf("")};
}

// Rows of one tile are written by several threads.
AIO_INLINE void mark_higher(const IntegerTile& tile, i64 group, uint8_t quads) { __atomic_fetch_or(tile.higher + group, quads, __ATOMIC_RELAXED); }

// The magnitude above which a group of this row gets its second digit. NaN if the row has a number that is not finite.
AIO_INLINE float standing_out(const float* x, i64 k) { return kStandsOut * __builtin_sqrtf(sum_of_squares(x, k) / (float)k); }

// Groups first .. last - 1 are asked for in panels `bytes` further on.
struct Ahead {
  i64 bytes, first, last;
};
