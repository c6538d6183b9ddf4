// The kernels for one instruction set: the same source, other vectors. setup.py gives each unit its own flags.
#include "common.h"

#define AIO_ISA 0

namespace aio {
namespace {
#include "simd.h"

#include "tiles.h"

#include "integer.h"

#include "words.h"

#include "linear.h"

#include "greedy.h"

#include "attention.h"

#include "fused.h"

#include "peak.h"
}  // namespace
extern const Kernels kPortableKernels = {linear_exact, linear_fast, greedy, attention, rope_cache, rms_norm, silu_mul, gelu_mul, peak};
}  // namespace aio

