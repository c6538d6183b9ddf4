// The C ABI. Pointers, sizes and strides are checked by the Python side; `isa` is a number that aio_supports() accepts.
#include "common.h"

using aio::i64;

namespace aio {

enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

const Kernels& kernels_of(int32_t isa) {
#if defined(__x86_64__)
  if (isa == kAvx512) return kAvx512Kernels;
  if (isa == kAvx2) return kAvx2Kernels;
#endif
  (void)isa;
  return kPortableKernels;
}

}  // namespace aio

using aio::kAvx2, aio::kAvx512, aio::kPortable;

extern "C" {

// Changes with every change of the argument lists below.
AIO_EXPORT int32_t aio_abi_version() { return 1; }

AIO_EXPORT int32_t aio_supports(int32_t isa) {
  if (isa == kPortable) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == kAvx2) return avx2;
  if (isa == kAvx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
  return 0;
}

AIO_EXPORT void aio_linear(int32_t isa, int32_t fast, int32_t format, const uint8_t* weights, const float* bias, const float* x, i64 ldx, float* y,
                i64 ldy, i64 m, i64 n, i64 k, int32_t num_threads) {
  const aio::LinearArgs args = {format, num_threads, m, n, k, weights, x, ldx, y, ldy, bias};
  if (fast) aio::kernels_of(isa).linear_fast(&args);
  else aio::kernels_of(isa).linear_exact(&args);
}

AIO_EXPORT void aio_attention(int32_t isa, int32_t kv_type, uint8_t* cache, int32_t block_size, int32_t num_heads, int32_t num_kv_heads,
                   int32_t head_dim, const float* query, i64 query_stride, float* out, i64 out_stride, const int32_t* block_table,
                   i64 block_table_stride, const int32_t* seq_lens, const int32_t* query_start_loc, i64 num_reqs, i64 window, float scale,
                   float soft_cap, int32_t num_threads) {
  const aio::AttentionArgs args = {{kv_type, block_size, num_kv_heads, head_dim, cache},
                                   num_heads,
                                   num_threads,
                                   query,
                                   query_stride,
                                   out,
                                   out_stride,
                                   block_table,
                                   block_table_stride,
                                   seq_lens,
                                   query_start_loc,
                                   num_reqs,
                                   window,
                                   scale,
                                   soft_cap};
  aio::kernels_of(isa).attention(&args);
}

AIO_EXPORT void aio_rope_cache(int32_t isa, int32_t kv_type, uint8_t* cache, int32_t block_size, int32_t num_heads, int32_t num_kv_heads,
                    int32_t head_dim, i64 num_tokens, float* query, i64 query_stride, float* key, i64 key_stride, const float* value,
                    i64 value_stride, const float* cos_sin, const int64_t* positions, const int64_t* slots, const float* query_norm,
                    const float* key_norm, float norm_eps, int32_t num_threads) {
  const aio::RopeCacheArgs args = {{kv_type, block_size, num_kv_heads, head_dim, cache},
                                   num_heads,
                                   num_threads,
                                   num_tokens,
                                   query,
                                   query_stride,
                                   key,
                                   key_stride,
                                   value,
                                   value_stride,
                                   cos_sin,
                                   positions,
                                   slots,
                                   query_norm,
                                   key_norm,
                                   norm_eps};
  aio::kernels_of(isa).rope_cache(&args);
}

AIO_EXPORT void aio_rms_norm(int32_t isa, const float* x, i64 ldx, float* residual, i64 ldr, const float* weight, float eps, i64 m, i64 n, float* y,
                  i64 ldy, int32_t num_threads) {
  aio::kernels_of(isa).rms_norm(x, ldx, residual, ldr, weight, eps, m, n, y, ldy, num_threads);
}

AIO_EXPORT void aio_silu_mul(int32_t isa, const float* gate_up, i64 ldx, i64 m, i64 n, float* y, i64 ldy, int32_t num_threads) {
  aio::kernels_of(isa).silu_mul(gate_up, ldx, m, n, y, ldy, num_threads);
}

}  // extern "C"
