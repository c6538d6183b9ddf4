// What a core can do at most: loops of one instruction, or of loads, and nothing else. Needs simd.h, and the integer products of the
// instruction set. Every thread runs all repeats.

// Enough sums, each from another start (the compiler would make one of equal ones), to hide the latency of one multiplication in each of two pipes.
constexpr int kSums = AIO_ISA == 512 ? 16 : AIO_ISA == 2 ? 12 : 4;

// Takes what was computed for used. Its sum: of an array the compiler would keep every element in memory.
template <int count, class V>
AIO_INLINE void keep(const V (&sums)[count]) {
  V total = sums[0];
#pragma GCC unroll 16
  for (int j = 1; j < count; j++) total += sums[j];
  asm volatile("" : : "m"(total));
}

static double fma_loop(i64 repeats) {
  vf c[kSums], a = vset(1.0f), b = vset(1e-9f);
  asm("" : "+m"(a), "+m"(b));
#pragma GCC unroll 16
  for (int j = 0; j < kSums; j++) c[j] = vset((float)j);
  for (i64 i = 0; i < repeats; i++)
#pragma GCC unroll 16
    for (int j = 0; j < kSums; j++) c[j] = vfma(a, b, c[j]);
  keep(c);
  return 2.0 * kW * kSums * (double)repeats;
}

#if AIO_ISA == 512
static double int8_loop(i64 repeats) {
  __m512i c[kSums], w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(-5);
  asm("" : "+m"(w), "+m"(x));
#pragma GCC unroll 16
  for (int j = 0; j < kSums; j++) c[j] = _mm512_set1_epi32(j);
  for (i64 i = 0; i < repeats; i++)
#pragma GCC unroll 16
    for (int j = 0; j < kSums; j++) c[j] = _mm512_dpbusd_epi32(c[j], w, x);
  keep(c);
  return 2.0 * 64 * kSums * (double)repeats;
}

__attribute__((target("avx512bf16"))) static double bf16_loop(i64 repeats) {
  __m512 c[kSums];
  __m512i bits = _mm512_set1_epi16(0x3f80);
  asm("" : "+m"(bits));
  const __m512bh a = (__m512bh)bits;
#pragma GCC unroll 16
  for (int j = 0; j < kSums; j++) c[j] = _mm512_set1_ps((float)j);
  for (i64 i = 0; i < repeats; i++)
#pragma GCC unroll 16
    for (int j = 0; j < kSums; j++) c[j] = _mm512_dpbf16_ps(c[j], a, a);
  keep(c);
  return 2.0 * 32 * kSums * (double)repeats;
}
#elif AIO_ISA == 2
// As the products of 4-bit weights do it: vpmaddubsw, and an addition in 16 bits.
static double int8_loop(i64 repeats) {
  constexpr int sums = 6;
  __m256i c[sums], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-5);
  asm("" : "+m"(w), "+m"(x));
#pragma GCC unroll 16
  for (int j = 0; j < sums; j++) c[j] = _mm256_set1_epi32(j);
  for (i64 i = 0; i < repeats; i++)
#pragma GCC unroll 16
    for (int j = 0; j < sums; j++) add_bytes(c[j], w, x);
  keep(c);
  return 2.0 * 32 * sums * (double)repeats;
}
static double bf16_loop(i64) { return 0.0; }
static bool has_bf16() { return false; }
#else
static double int8_loop(i64) { return 0.0; }
static double bf16_loop(i64) { return 0.0; }
static bool has_bf16() { return false; }
#endif

// Sums the floats of [begin, end), repeats times.
static double read_loop(const float* begin, const float* end, i64 repeats) {
  vf c[8];
  for (int j = 0; j < 8; j++) c[j] = vzero();
  for (i64 i = 0; i < repeats; i++)
    for (const float* p = begin; p + 8 * kW <= end; p += 8 * kW)
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) c[j] = vadd(c[j], vload(p + j * kW));
  keep(c);
  return (double)((end - begin) / (8 * kW) * (8 * kW)) * 4.0 * (double)repeats;
}

static double peak(const PeakArgs* args) {
  const PeakArgs& a = *args;
  if (a.kind == kPeakBf16 && !has_bf16()) return 0.0;
  double work[kMostPeakThreads] = {};
  parallel((int)imin(a.num_threads, kMostPeakThreads), imin(a.num_threads, kMostPeakThreads), 1, [&](i64 begin, i64 end) {
    for (i64 t = begin; t < end; t++) {
      const float* data = (const float*)a.data;
      const i64 floats = a.bytes / 4;
      switch (a.kind) {
        case kPeakFma: work[t] = fma_loop(a.repeats); break;
        case kPeakInt8: work[t] = int8_loop(a.repeats); break;
        case kPeakBf16: work[t] = bf16_loop(a.repeats); break;
        case kPeakRead: work[t] = read_loop(data + floats * t / a.num_threads, data + floats * (t + 1) / a.num_threads, a.repeats); break;
      }
    }
  });
  double sum = 0.0;
  for (double w : work) sum += w;
  return sum;
}
