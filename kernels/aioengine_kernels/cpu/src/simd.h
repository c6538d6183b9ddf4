// Float vectors of one instruction set. Included once a translation unit, inside namespace aio and one without a name.
// Every function is static: see common.h.

#define AIO_INLINE static inline __attribute__((always_inline))

// 1.5 * 2^23: the sum of this and a float of magnitude below 2^22 has no bits for a fraction, so the addition rounds it to the nearest
// whole number, ties to even, in every instruction set alike.
constexpr float kRoundsToWhole = 12582912.0f;
AIO_INLINE float round_to_whole(float x) { return (x + kRoundsToWhole) - kRoundsToWhole; }

#if AIO_ISA == 512

typedef __m512 vf;
constexpr int kW = 16;
AIO_INLINE vf vzero() { return _mm512_setzero_ps(); }
AIO_INLINE vf vset(float x) { return _mm512_set1_ps(x); }
AIO_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
AIO_INLINE void vstore(float* p, vf v) { _mm512_storeu_ps(p, v); }
AIO_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
AIO_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
AIO_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
AIO_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
AIO_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
AIO_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
AIO_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
AIO_INLINE vf vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
AIO_INLINE void vstore_f16(uint16_t* p, vf v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, 0)); }
AIO_INLINE vf vload_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
AIO_INLINE vf vload_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
AIO_INLINE float vsum(vf v) { return _mm512_reduce_add_ps(v); }
AIO_INLINE float vhmax(vf v) { return _mm512_reduce_max_ps(v); }
// Lanes lo <= i < hi of v, `other` elsewhere.
AIO_INLINE vf vlanes(vf v, int lo, int hi, vf other) {
  const uint32_t below_hi = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
  const uint32_t below_lo = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1u;
  return _mm512_mask_mov_ps(other, (__mmask16)(below_hi & ~below_lo), v);
}
AIO_INLINE vf vround(vf v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
AIO_INLINE vf vexp2i(vf n) {  // 2^n of a whole n in [-126, 127]
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
AIO_INLINE vf vzero_below(vf v, vf x, float limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), v); }

#elif AIO_ISA == 2

typedef __m256 vf;
constexpr int kW = 8;
AIO_INLINE vf vzero() { return _mm256_setzero_ps(); }
AIO_INLINE vf vset(float x) { return _mm256_set1_ps(x); }
AIO_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
AIO_INLINE void vstore(float* p, vf v) { _mm256_storeu_ps(p, v); }
AIO_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
AIO_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
AIO_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
AIO_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
AIO_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
AIO_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
AIO_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
AIO_INLINE vf vload_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
AIO_INLINE void vstore_f16(uint16_t* p, vf v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, 0)); }
AIO_INLINE vf vload_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
AIO_INLINE vf vload_i8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
AIO_INLINE float vsum(vf v) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
AIO_INLINE float vhmax(vf v) {
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
AIO_INLINE vf vlanes(vf v, int lo, int hi, vf other) {
  const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i keep = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), i), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), i));
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(keep));
}
AIO_INLINE vf vround(vf v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
AIO_INLINE vf vexp2i(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
AIO_INLINE vf vzero_below(vf v, vf x, float limit) { return _mm256_and_ps(v, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GE_OQ)); }

#else  // portable: GCC and clang vector extensions, whatever the target makes of them

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
constexpr int kW = 8;
AIO_INLINE vf vset(float x) { return vf{x, x, x, x, x, x, x, x}; }
AIO_INLINE vf vzero() { return vset(0.0f); }
AIO_INLINE vf vload(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
AIO_INLINE void vstore(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
AIO_INLINE vf vadd(vf a, vf b) { return a + b; }
AIO_INLINE vf vsub(vf a, vf b) { return a - b; }
AIO_INLINE vf vmul(vf a, vf b) { return a * b; }
AIO_INLINE vf vdiv(vf a, vf b) { return a / b; }
AIO_INLINE vf vfma(vf a, vf b, vf c) { return a * b + c; }  // two roundings: -ffp-contract=off
AIO_INLINE vf vselect(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
AIO_INLINE vf vmax(vf a, vf b) { return vselect((vi)(a > b), a, b); }
AIO_INLINE vf vmin(vf a, vf b) { return vselect((vi)(a < b), a, b); }
AIO_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  uint32_t bits;
  float f;
  if (exponent == 0) {
    f = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -f : f;
  }
  bits = exponent == 31 ? (sign | 0x7f800000u | (mantissa << 13)) : (sign | ((exponent + 112u) << 23) | (mantissa << 13));
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}
AIO_INLINE uint16_t float_to_half(float f) {  // round to nearest even
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 shifts the mantissa into place and rounds it
    float a;
    __builtin_memcpy(&a, &bits, sizeof a);
    a += 0.5f;
    __builtin_memcpy(&bits, &a, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  return (uint16_t)(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
}
AIO_INLINE vf vload_f16(const uint16_t* p) {
  vf v;
  for (int i = 0; i < kW; i++) v[i] = half_to_float(p[i]);
  return v;
}
AIO_INLINE void vstore_f16(uint16_t* p, vf v) {
  for (int i = 0; i < kW; i++) p[i] = float_to_half(v[i]);
}
AIO_INLINE vf vload_bf16(const uint16_t* p) {
  vi v;
  for (int i = 0; i < kW; i++) v[i] = (int32_t)((uint32_t)p[i] << 16);
  return (vf)v;
}
AIO_INLINE vf vload_i8(const int8_t* p) {
  vf v;
  for (int i = 0; i < kW; i++) v[i] = (float)p[i];
  return v;
}
AIO_INLINE float vsum(vf v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
AIO_INLINE float vhmax(vf v) {
  float m = v[0];
  for (int i = 1; i < kW; i++) m = v[i] > m ? v[i] : m;
  return m;
}
AIO_INLINE vf vlanes(vf v, int lo, int hi, vf other) {
  const vi i = {0, 1, 2, 3, 4, 5, 6, 7};
  return vselect((vi)(i >= lo) & (vi)(i < hi), v, other);
}
AIO_INLINE vf vround(vf v) { return (v + kRoundsToWhole) - kRoundsToWhole; }
AIO_INLINE vf vexp2i(vf n) { return (vf)((__builtin_convertvector(n, vi) + 127) << 23); }
AIO_INLINE vf vzero_below(vf v, vf x, float limit) { return vselect((vi)(x >= limit), v, vzero()); }

#endif

// Vectors in a panel of 16 rows, and in 16 positions of a cache block.
constexpr int kV = 16 / kW;

// e^x to 2 ulp (Cephes, S. Moshier); exactly 1 at 0, exactly 0 below -87.3, e^88 above 88.
AIO_INLINE vf vexp(vf x0) {
  const vf x = vmin(vmax(x0, vset(-87.3f)), vset(88.0f));
  const vf n = vround(vmul(x, vset(1.44269504f)));
  vf r = vfma(n, vset(-0.693359375f), x);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vfma(p, vmul(r, r), vadd(r, vset(1.0f)));
  return vzero_below(vmul(p, vexp2i(n)), x0, -87.3f);
}
AIO_INLINE float exp1(float x) {
  alignas(64) float lanes[kW];
  vstore(lanes, vexp(vset(x)));
  return lanes[0];
}
// tanh to about 1e-7 absolute.
AIO_INLINE vf vtanh(vf x) {
  const vf limited = vmin(vmax(x, vset(-20.0f)), vset(20.0f));
  return vsub(vset(1.0f), vdiv(vset(2.0f), vadd(vexp(vadd(limited, limited)), vset(1.0f))));
}

AIO_INLINE i64 imin(i64 a, i64 b) { return a < b ? a : b; }
AIO_INLINE i64 imax(i64 a, i64 b) { return a > b ? a : b; }
AIO_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// In four vectors of running sums, whatever the number of rows.
AIO_INLINE float sum_of_squares(const float* x, i64 n) {
  vf s[4] = {vzero(), vzero(), vzero(), vzero()};
  i64 i = 0;
  for (; i + 4 * kW <= n; i += 4 * kW)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const vf v = vload(x + i + j * kW);
      s[j] = vfma(v, v, s[j]);
    }
  for (; i + kW <= n; i += kW) {
    const vf v = vload(x + i);
    s[0] = vfma(v, v, s[0]);
  }
  float total = vsum(vadd(vadd(s[0], s[1]), vadd(s[2], s[3])));
  for (; i < n; i++) total += x[i] * x[i];
  return total;
}

template <class Body>
static void parallel(int num_threads, i64 num_tasks, i64 chunk, const Body& body) {
  parallel_for(num_threads, num_tasks, chunk, [](void* context, i64 begin, i64 end) { (*(const Body*)context)(begin, end); }, (void*)&body);
}
