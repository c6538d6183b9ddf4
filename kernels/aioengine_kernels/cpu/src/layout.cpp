// Where every field of the structures of the C ABI is, for the Python side to compare with its own declarations.
#include "common.h"

namespace {

using namespace aio;

struct Field {
  const char* structure;
  const char* name;  // "" for the structure itself, whose offset is its size
  i64 offset;
};

#define SIZE(S) {#S, "", sizeof(S)}
#define AT(S, name) {#S, #name, offsetof(S, name)}

constexpr Field kFields[] = {
    SIZE(CacheLayout), AT(CacheLayout, kv_type), AT(CacheLayout, block_size), AT(CacheLayout, num_kv_heads), AT(CacheLayout, head_dim),
    AT(CacheLayout, data),
    SIZE(LinearArgs), AT(LinearArgs, isa), AT(LinearArgs, fast), AT(LinearArgs, format), AT(LinearArgs, num_threads), AT(LinearArgs, m),
    AT(LinearArgs, n), AT(LinearArgs, k), AT(LinearArgs, weights), AT(LinearArgs, x), AT(LinearArgs, ldx), AT(LinearArgs, y),
    AT(LinearArgs, ldy), AT(LinearArgs, bias),
    SIZE(AttentionArgs), AT(AttentionArgs, cache), AT(AttentionArgs, isa), AT(AttentionArgs, num_heads), AT(AttentionArgs, num_threads),
    AT(AttentionArgs, query), AT(AttentionArgs, query_stride), AT(AttentionArgs, out), AT(AttentionArgs, out_stride),
    AT(AttentionArgs, block_table), AT(AttentionArgs, block_table_stride), AT(AttentionArgs, seq_lens),
    AT(AttentionArgs, query_start_loc), AT(AttentionArgs, num_reqs), AT(AttentionArgs, window), AT(AttentionArgs, scale),
    AT(AttentionArgs, soft_cap),
    SIZE(RopeCacheArgs), AT(RopeCacheArgs, cache), AT(RopeCacheArgs, isa), AT(RopeCacheArgs, num_heads), AT(RopeCacheArgs, num_threads),
    AT(RopeCacheArgs, num_tokens), AT(RopeCacheArgs, query), AT(RopeCacheArgs, query_stride), AT(RopeCacheArgs, key),
    AT(RopeCacheArgs, key_stride), AT(RopeCacheArgs, value), AT(RopeCacheArgs, value_stride), AT(RopeCacheArgs, cos_sin),
    AT(RopeCacheArgs, positions), AT(RopeCacheArgs, slots), AT(RopeCacheArgs, query_norm), AT(RopeCacheArgs, key_norm),
    AT(RopeCacheArgs, norm_eps),
    SIZE(RmsNormArgs), AT(RmsNormArgs, isa), AT(RmsNormArgs, num_threads), AT(RmsNormArgs, m), AT(RmsNormArgs, n), AT(RmsNormArgs, x),
    AT(RmsNormArgs, ldx), AT(RmsNormArgs, residual), AT(RmsNormArgs, ldr), AT(RmsNormArgs, weight), AT(RmsNormArgs, y),
    AT(RmsNormArgs, ldy), AT(RmsNormArgs, eps),
    SIZE(GatedMulArgs), AT(GatedMulArgs, isa), AT(GatedMulArgs, num_threads), AT(GatedMulArgs, m), AT(GatedMulArgs, n),
    AT(GatedMulArgs, gate_up), AT(GatedMulArgs, ldx), AT(GatedMulArgs, y), AT(GatedMulArgs, ldy),
    SIZE(Matrix), AT(Matrix, weights), AT(Matrix, bias), AT(Matrix, n), AT(Matrix, k), AT(Matrix, format), AT(Matrix, fast),
    AT(Matrix, next),
    SIZE(LowRank), AT(LowRank, down), AT(LowRank, up),
    SIZE(Layer), AT(Layer, qkv), AT(Layer, output), AT(Layer, gate_up), AT(Layer, down), AT(Layer, input_norm), AT(Layer, post_norm),
    AT(Layer, query_norm), AT(Layer, key_norm), AT(Layer, attention_out_norm), AT(Layer, mlp_out_norm), AT(Layer, cos_sin),
    AT(Layer, cache), AT(Layer, group),
    SIZE(CacheGroup), AT(CacheGroup, slots), AT(CacheGroup, block_table), AT(CacheGroup, block_table_stride), AT(CacheGroup, window),
    SIZE(Step), AT(Step, residual), AT(Step, normed), AT(Step, final_norm), AT(Step, positions),
    AT(Step, seq_lens), AT(Step, query_start_loc), AT(Step, groups), AT(Step, num_groups), AT(Step, num_reqs), AT(Step, m),
    AT(Step, hidden), AT(Step, eps), AT(Step, scale), AT(Step, soft_cap), AT(Step, isa), AT(Step, num_threads),
    AT(Step, kv_type), AT(Step, block_size), AT(Step, num_heads), AT(Step, num_kv_heads), AT(Step, head_dim), AT(Step, activation),
    AT(Step, all_reduce), AT(Step, adapters),
    SIZE(PeakArgs), AT(PeakArgs, isa), AT(PeakArgs, kind), AT(PeakArgs, num_threads), AT(PeakArgs, repeats), AT(PeakArgs, data),
    AT(PeakArgs, bytes),
};

#undef SIZE
#undef AT

}  // namespace

extern "C" {

// Entry `index` of the list, which ends with a null name: "Structure.field" in two parts, and its offset.
AIO_EXPORT const char* aio_layout(int64_t index, const char** field, int64_t* offset) {
  if (index < 0 || index >= (int64_t)(sizeof(kFields) / sizeof(kFields[0]))) return nullptr;
  *field = kFields[index].name, *offset = kFields[index].offset;
  return kFields[index].structure;
}

}  // extern "C"
