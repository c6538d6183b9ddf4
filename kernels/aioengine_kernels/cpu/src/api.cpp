// The C ABI. Pointers, sizes and strides are checked by the Python side; `isa` is a number that aio_supports() accepts.
#include "common.h"

namespace aio {

enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

bool pin_thread(const int32_t* cores, i64 count);  // parallel.cpp

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

// Changes with every change of an argument list; of the structures every field is compared (layout.cpp).
AIO_EXPORT int32_t aio_abi_version() { return 6; }

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

AIO_EXPORT void aio_linear(const aio::LinearArgs* args) {
  const aio::Kernels& kernels = aio::kernels_of(args->isa);
  if (args->fast) kernels.linear_fast(args);
  else kernels.linear_exact(args);
}

AIO_EXPORT int32_t aio_greedy(const aio::LinearArgs* args, const float* norms, float largest_norm, int64_t* columns) {
  return aio::kernels_of(args->isa).greedy(args, norms, largest_norm, columns);
}

AIO_EXPORT void aio_attention(const aio::AttentionArgs* args) { aio::kernels_of(args->isa).attention(args); }

AIO_EXPORT void aio_rope_cache(const aio::RopeCacheArgs* args) { aio::kernels_of(args->isa).rope_cache(args); }

AIO_EXPORT void aio_rms_norm(const aio::RmsNormArgs* args) { aio::kernels_of(args->isa).rms_norm(args); }

AIO_EXPORT void aio_silu_mul(const aio::GatedMulArgs* args) { aio::kernels_of(args->isa).silu_mul(args); }

AIO_EXPORT void aio_gelu_mul(const aio::GatedMulArgs* args) { aio::kernels_of(args->isa).gelu_mul(args); }

// The calling thread and those that help it from now on run on these cores alone. 0: there is no such core, or not on this system.
AIO_EXPORT int32_t aio_pin_thread(const int32_t* cores, aio::i64 count) { return aio::pin_thread(cores, count); }

AIO_EXPORT double aio_peak(const aio::PeakArgs* args) { return aio::kernels_of(args->isa).peak(args); }

}  // extern "C"
