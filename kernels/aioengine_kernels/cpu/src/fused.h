// Element-wise operations of a decoder layer. Needs attention.h.

// Numbers from which on a second thread gains more than its wake-up costs; a norm reads its rows twice, and gains at half of that.
constexpr i64 kWorthSharing = 16384;

AIO_INLINE void rms_row(const float* x, const float* weight, float eps, i64 n, float* y) {
  const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / (float)n + eps);
  i64 i = 0;
  for (; i + kW <= n; i += kW) vstore(y + i, vmul(vmul(vload(x + i), vset(inverse)), vload(weight + i)));
  for (; i < n; i++) y[i] = x[i] * inverse * weight[i];
}

static void rms_norm(const RmsNormArgs* args) {
  const RmsNormArgs& a = *args;
  const i64 n = a.n;
  parallel(a.m * n > kWorthSharing / 2 ? a.num_threads : 1, a.m, 4, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
      const float* from = a.x + r * a.ldx;
      if (a.residual) {
        float* sum = a.residual + r * a.ldr;
        i64 i = 0;
        for (; i + kW <= n; i += kW) vstore(sum + i, vadd(vload(sum + i), vload(from + i)));
        for (; i < n; i++) sum[i] += from[i];
        from = sum;
      }
      rms_row(from, a.weight, a.eps, n, a.y + r * a.ldy);
    }
  });
}

AIO_INLINE vf silu_vector(vf gate) { return vdiv(gate, vadd(vset(1.0f), vexp(vsub(vzero(), gate)))); }

// GELU in its tanh approximation: 0.5 (1 + tanh u) is the logistic function of 2u.
AIO_INLINE vf gelu_vector(vf gate) {
  const vf u = vmul(vset(0.7978845608f), vfma(vmul(vset(0.044715f), vmul(gate, gate)), gate, gate));
  return vdiv(gate, vadd(vset(1.0f), vexp(vmul(vset(-2.0f), u))));
}

template <class Activate>
static void gated_mul(const GatedMulArgs& a, const Activate& activate) {
  const i64 n = a.n;
  parallel(a.m * n > kWorthSharing ? a.num_threads : 1, a.m, 4, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
      const float *gate = a.gate_up + r * a.ldx, *up = gate + n;
      float* out = a.y + r * a.ldy;
      i64 i = 0;
      for (; i + kW <= n; i += kW) vstore(out + i, vmul(activate(vload(gate + i)), vload(up + i)));
      if (i < n) {
        alignas(64) float g[kW] = {}, u[kW] = {}, o[kW];
        for (i64 j = i; j < n; j++) g[j - i] = gate[j], u[j - i] = up[j];
        vstore(o, vmul(activate(vload(g)), vload(u)));
        for (i64 j = i; j < n; j++) out[j] = o[j - i];
      }
    }
  });
}

static void silu_mul(const GatedMulArgs* args) {
  gated_mul(*args, [](vf gate) __attribute__((always_inline)) { return silu_vector(gate); });
}

static void gelu_mul(const GatedMulArgs* args) {
  gated_mul(*args, [](vf gate) __attribute__((always_inline)) { return gelu_vector(gate); });
}

// Dimension i turns with dimension i + dim / 2 ("rotate half"); the products are rounded before they are added, as in torch.
AIO_INLINE void rotate(float* x, const float* cos_sin, int dim) {
  const int half = dim / 2;
  const float *cosine = cos_sin, *sine = cos_sin + half;
  for (int i = 0; i < half; i += 8) {
    for (int j = i; j < i + 8; j++) {  // head_dim is a multiple of 16
      const float a = x[j], b = x[j + half];
      const float ac = a * cosine[j], bs = b * sine[j], bc = b * cosine[j], as = a * sine[j];
      x[j] = ac - bs;
      x[j + half] = bc + as;
    }
  }
}

template <int T>
static void rope_cache_type(const RopeCacheArgs& a) {
  const BlockSizes sizes = block_sizes(a.cache);
  const int dim = a.cache.head_dim, block_size = a.cache.block_size;
  parallel(a.num_tokens * a.num_heads * dim > kWorthSharing ? a.num_threads : 1, a.num_tokens, 2, [&](i64 begin, i64 end) {
    for (i64 t = begin; t < end; t++) {
      const float* cos_sin = a.cos_sin ? a.cos_sin + a.positions[t] * dim : nullptr;
      for (i64 h = 0; h < a.num_heads; h++) {
        float* q = a.query + t * a.query_stride + h * dim;
        if (a.query_norm) rms_row(q, a.query_norm, a.norm_eps, dim, q);
        if (cos_sin) rotate(q, cos_sin, dim);
      }
      for (i64 h = 0; h < a.cache.num_kv_heads; h++) {
        float* k = a.key + t * a.key_stride + h * dim;
        if (a.key_norm) rms_row(k, a.key_norm, a.norm_eps, dim, k);
        if (cos_sin) rotate(k, cos_sin, dim);
        if (a.slots[t] < 0) continue;
        uint8_t* block = a.cache.data + a.slots[t] / block_size * sizes.block + h * sizes.head;
        write_key<T>(block, k, dim, block_size, a.slots[t] % block_size);
        write_value<T>(block + sizes.part, a.value + t * a.value_stride + h * dim, dim, block_size, a.slots[t] % block_size);
      }
    }
  });
}

static void rope_cache(const RopeCacheArgs* a) {
  switch (a->cache.kv_type) {
    case kKvF32: return rope_cache_type<kKvF32>(*a);
    case kKvF16:
    case kKvF16Fast: return rope_cache_type<kKvF16>(*a);
    case kKvI8: return rope_cache_type<kKvI8>(*a);
  }
}
