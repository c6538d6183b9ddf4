// Types that every translation unit shares. Nothing here may emit code that the linker could merge across units:
// units are compiled for different instruction sets, and a merged function could run where its instructions do not exist.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define AIO_EXPORT __attribute__((visibility("default")))

namespace aio {

typedef int64_t i64;

// Weights are packed in panels of 16 rows; quantized formats in groups of 32 columns.
constexpr int kPanelRows = 16;
constexpr int kGroup = 32;

// The numbers are part of the C ABI: FORMATS in packing.py, KV_TYPES in kernels.py.
enum Format : int32_t {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kQ4_0 = 3,  // u4 - 8, scale f16
  kQ4_1 = 4,  // u4, scale and minimum f16
  kQ8_0 = 5,  // i8, scale f16
  kQ4_K = 6,  // u4, scale and minimum f32 (products of two numbers in the file)
  kQ6_K = 7,  // i6 kept as i8, two scales f32 a group
  kQ5_0 = 8,  // i5 kept as i8, scale f16: packed as Q8_0
  kQ5_K = 9,  // u5 kept as u8, scale and minimum f32
  kQ5_1 = 10,    // packed as Q5_K
  kIQ4_NL = 11,  // 16 numbers of 8 bits: packed as Q8_0
  kIQ4_XS = 12,  // the same with a scale of two numbers, Q3_K with one for 16 columns, MXFP4 with a power of two: packed as Q6_K
  kQ3_K = 13,
  kMXFP4 = 14,
};

// kKvF16Fast: float16, multiplied in bfloat16 where the CPU can (bf16.h).
enum KvType : int32_t { kKvF32 = 0, kKvF16 = 1, kKvI8 = 2, kKvF16Fast = 3 };

// The structures below are passed by address. abi.py declares the same fields; layout.cpp tells it every size and offset, and a
// library whose layout differs is refused.

struct LinearArgs {
  int32_t isa;
  int32_t fast;
  int32_t format;
  int32_t num_threads;
  i64 m, n, k;
  const uint8_t* weights;  // packed panels, 64-byte aligned
  const float* x;          // [m, k], rows ldx apart
  i64 ldx;
  float* y;  // [m, n], rows ldy apart
  i64 ldy;
  const float* bias;  // [n] or null
};

struct CacheLayout {
  int32_t kv_type;
  int32_t block_size;    // multiple of 16
  int32_t num_kv_heads;
  int32_t head_dim;      // multiple of 16
  uint8_t* data;         // see attention.h
};

struct AttentionArgs {
  CacheLayout cache;
  int32_t isa;
  int32_t num_heads;
  int32_t num_threads;
  const float* query;  // [num_tokens, num_heads, head_dim], tokens query_stride apart
  i64 query_stride;
  float* out;  // [num_tokens, num_heads, head_dim], tokens out_stride apart
  i64 out_stride;
  const int32_t* block_table;  // [num_reqs, *], rows block_table_stride apart
  i64 block_table_stride;
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* query_start_loc;  // [num_reqs + 1]
  i64 num_reqs;
  i64 window;  // a query sees this many positions, its own included; 0: all
  float scale;
  float soft_cap;  // 0: none
};

struct RopeCacheArgs {
  CacheLayout cache;
  int32_t isa;
  int32_t num_heads;
  int32_t num_threads;
  i64 num_tokens;
  float* query;  // rotated in place
  i64 query_stride;
  float* key;  // rotated in place
  i64 key_stride;
  const float* value;
  i64 value_stride;
  const float* cos_sin;      // [positions, head_dim]: cosines, then sines; null: no rotation
  const int64_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]: block * block_size + offset; negative: no write
  const float* query_norm;   // [head_dim] weight of an RMS norm before the rotation, or null
  const float* key_norm;
  float norm_eps;
};

// With a residual: residual += x, y = norm(residual); else y = norm(x).
struct RmsNormArgs {
  int32_t isa;
  int32_t num_threads;
  i64 m, n;
  const float* x;  // [m, n], rows ldx apart
  i64 ldx;
  float* residual;  // [m, n], rows ldr apart, or null
  i64 ldr;
  const float* weight;  // [n]
  float* y;             // [m, n], rows ldy apart
  i64 ldy;
  float eps;
};

// y = activation(gate) * up
struct GatedMulArgs {
  int32_t isa;
  int32_t num_threads;
  i64 m, n;
  const float* gate_up;  // [m, 2n], rows ldx apart
  i64 ldx;
  float* y;  // [m, n], rows ldy apart
  i64 ldy;
};

// One matrix of a layer: y [*, n] = x [*, k] W^T + bias. One whose rows are stored in several formats is a list of matrices,
// each with its own rows.
struct Matrix {
  const uint8_t* weights;
  const float* bias;
  i64 n, k;
  int32_t format;
  int32_t fast;
  const Matrix* next;  // or null
};

// What an adapter adds to one product of a layer: (x A^T) B^T, of numbers as they are stored. The matrices of `up` stand for all rows
// of the product, one after the other; each takes its own columns, as many as it has, of what `down` gives. One without weights is
// of rows that get nothing, and takes none.
struct LowRank {
  Matrix down;  // [sum of the ranks, k]; n = 0: nothing is added to this product
  const Matrix* up;
};
constexpr int kProducts = 4;  // of a layer: qkv, output, gate_up, down

enum Activation : int32_t { kSilu = 0, kGelu = 1 };  // of the gate; GELU in its tanh approximation

// One pre-norm decoder layer with a gated MLP.
struct Layer {
  Matrix qkv, output, gate_up, down;
  const float* input_norm;
  const float* post_norm;
  const float* query_norm;  // or null
  const float* key_norm;
  const float* attention_out_norm;  // of what attention and the MLP add to the residual, or null
  const float* mlp_out_norm;
  const float* cos_sin;  // [positions, head_dim]: cosines, then sines
  uint8_t* cache;
  i64 group;  // which of the step's groups it belongs to
};

// What the layers of a KV-cache group share in one step. Entries of blocks that lie wholly behind the window are never read.
struct CacheGroup {
  const int64_t* slots;
  const int32_t* block_table;
  i64 block_table_stride;
  i64 window;  // a query sees this many positions, its own included; 0: all
};

// What all layers share in one step.
struct Step {
  float* residual;  // [m, hidden]: embeddings in, the last layer's output out
  float* normed;    // [m, hidden]: out, after the final norm
  const float* final_norm;
  const int64_t* positions;
  const int32_t* seq_lens;
  const int32_t* query_start_loc;
  const CacheGroup* groups;
  i64 num_groups, num_reqs, m, hidden;
  float eps, scale, soft_cap;
  int32_t isa, num_threads, kv_type, block_size, num_heads, num_kv_heads, head_dim, activation;
  // Null: the weights are whole. Else they are one rank's part, and the products with `output` and `down` are sums over the ranks:
  // called with [m, hidden] numbers to be summed in place, by the thread that called aio_decoder. Not 0: give up.
  int32_t (*all_reduce)(float* data, i64 count);
  // Null: no row has an adapter. Else [m]: of each row, null or its adapter's [layers][kProducts].
  const LowRank* const* adapters;
};

enum PeakKind : int32_t { kPeakFma = 0, kPeakInt8 = 1, kPeakBf16 = 2, kPeakRead = 3 };
constexpr int kMostPeakThreads = 256;

// Loops that do nothing but multiply, or read the data, each thread its share (peak.h).
struct PeakArgs {
  int32_t isa;
  int32_t kind;
  int32_t num_threads;
  i64 repeats;
  const uint8_t* data;
  i64 bytes;
};

struct Kernels {
  void (*linear_exact)(const LinearArgs*);
  void (*linear_fast)(const LinearArgs*);
  int32_t (*greedy)(const LinearArgs*, const float* norms, float largest_norm, int64_t* columns);  // greedy.h
  void (*attention)(const AttentionArgs*);
  void (*rope_cache)(const RopeCacheArgs*);
  void (*rms_norm)(const RmsNormArgs*);
  void (*silu_mul)(const GatedMulArgs*);
  void (*gelu_mul)(const GatedMulArgs*);
  double (*peak)(const PeakArgs*);  // operations or bytes; 0: the instruction set, or this CPU, has no such instruction
};

const Kernels& kernels_of(int32_t isa);
extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// Calls body(context, begin, end) for pieces of [0, num_tasks) of at most `chunk` tasks, handed out as threads become
// free, the caller included (parallel.cpp).
void parallel_for(int num_threads, i64 num_tasks, i64 chunk, void (*body)(void*, i64, i64), void* context);

// Memory of the calling thread, 64-byte aligned, kept between calls. `slot` names independent pieces: 0..2 for kernels, 3 and 4 for the decoder.
void* scratch(int slot, size_t num_bytes);

// Bytes of one panel of 16 rows.
struct PanelLayout {
  i64 quants_per_group;  // bytes; dense formats: 0
  i64 scales_per_group;
  i64 bytes;
};
PanelLayout panel_layout(int32_t format, i64 k);

}  // namespace aio
