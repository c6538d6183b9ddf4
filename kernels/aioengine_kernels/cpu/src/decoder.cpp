// All layers of a decoder in one call, from the same kernels as the single operations: the same bits, and Python once a step.
#include "common.h"

namespace aio {
namespace {

i64 rows_of(const Matrix& w) { return w.n + (w.next ? rows_of(*w.next) : 0); }

void multiply(const Kernels& kernels, const Step& s, const Matrix& all, const float* x, i64 ldx, float* y) {
  const i64 ldy = rows_of(all);
  for (const Matrix* w = &all; w; y += w->n, w = w->next) {
    const LinearArgs args = {w->format, s.num_threads, s.m, w->n, w->k, w->weights, x, ldx, y, ldy, w->bias};
    if (w->fast) kernels.linear_fast(&args);
    else kernels.linear_exact(&args);
  }
}

void attend(const Kernels& kernels, const Step& s, const Layer& layer, float* qkv, float* out) {
  const i64 query = (i64)s.num_heads * s.head_dim, key = (i64)s.num_kv_heads * s.head_dim, stride = query + 2 * key;
  const CacheLayout cache = {s.kv_type, s.block_size, s.num_kv_heads, s.head_dim, layer.cache};
  const RopeCacheArgs rope = {cache,       s.num_heads, s.num_threads, s.m,     qkv,              stride,         qkv + query, stride,
                              qkv + query + key, stride, s.cos_sin,     s.positions, s.slots, layer.query_norm, layer.key_norm, s.eps};
  kernels.rope_cache(&rope);
  const AttentionArgs args = {cache,         s.num_heads,          s.num_threads, qkv,               stride,     out,      query,
                              s.block_table, s.block_table_stride, s.seq_lens,    s.query_start_loc, s.num_reqs, s.window, s.scale,
                              s.soft_cap};
  kernels.attention(&args);
}

void run(const Layer* layers, i64 num_layers, const Step& s) {
  const Kernels& kernels = kernels_of(s.isa);
  const i64 heads = (i64)s.num_heads * s.head_dim;
  // Room for the widest layer: [m, qkv] and [m, heads], or [m, gate_up] and [m, intermediate], and [m, hidden].
  i64 wide = 0, narrow = heads;
  for (i64 i = 0; i < num_layers; i++) {
    if (rows_of(layers[i].qkv) > wide) wide = rows_of(layers[i].qkv);
    if (rows_of(layers[i].gate_up) > wide) wide = rows_of(layers[i].gate_up);
    if (layers[i].down.k > narrow) narrow = layers[i].down.k;
  }
  float* first = (float*)scratch(3, s.m * (wide + narrow + s.hidden + 48) * sizeof(float));
  float *second = first + s.m * wide, *added = second + s.m * narrow;
  kernels.rms_norm(s.residual, s.hidden, nullptr, 0, layers[0].input_norm, s.eps, s.m, s.hidden, s.normed, s.hidden, s.num_threads);
  for (i64 i = 0; i < num_layers; i++) {
    const Layer& layer = layers[i];
    const float* next_norm = i + 1 < num_layers ? layers[i + 1].input_norm : s.final_norm;
    multiply(kernels, s, layer.qkv, s.normed, s.hidden, first);
    attend(kernels, s, layer, first, second);
    multiply(kernels, s, layer.output, second, heads, added);
    kernels.rms_norm(added, s.hidden, s.residual, s.hidden, layer.post_norm, s.eps, s.m, s.hidden, s.normed, s.hidden, s.num_threads);
    multiply(kernels, s, layer.gate_up, s.normed, s.hidden, first);
    kernels.silu_mul(first, rows_of(layer.gate_up), s.m, layer.down.k, second, layer.down.k, s.num_threads);
    multiply(kernels, s, layer.down, second, layer.down.k, added);
    kernels.rms_norm(added, s.hidden, s.residual, s.hidden, next_norm, s.eps, s.m, s.hidden, s.normed, s.hidden, s.num_threads);
  }
}

}  // namespace
}  // namespace aio

extern "C" {

// The sizes of the structures, so that both sides can check that they mean the same.
AIO_EXPORT aio::i64 aio_layer_bytes() { return sizeof(aio::Layer); }
AIO_EXPORT aio::i64 aio_step_bytes() { return sizeof(aio::Step); }

AIO_EXPORT void aio_decoder(const aio::Layer* layers, aio::i64 num_layers, const aio::Step* step) { aio::run(layers, num_layers, *step); }

}  // extern "C"
