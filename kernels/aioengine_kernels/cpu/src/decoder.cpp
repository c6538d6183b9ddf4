// All layers of a decoder in one call, from the same kernels as the single operations: the same bits, and Python once a step.
//
// How threads share a step: with few rows, the columns of every matrix (they read each weight once, and wait for each other after
// every operation); with many, the rows. Then a thread takes its rows from one layer's attention to the next layer's keys and
// values, which is where the others' results are needed, and rows stay in one core's cache: cores of a virtual machine may share
// none, and what one writes and the other reads made a step half as long again.
#include "common.h"

#include <algorithm>
#include <vector>

namespace aio {
namespace {

i64 rows_of(const Matrix& w) { return w.n + (w.next ? rows_of(*w.next) : 0); }

// A run of the step's rows, which may begin and end inside a request.
struct Rows {
  i64 first, count;
  int num_threads;
  i64 first_req;  // of the step: its first request
  std::vector<int32_t> seq_lens;         // of its requests, as far as these rows see
  std::vector<int32_t> query_start_loc;  // within these rows
};

Rows take_rows(const Step& s, i64 first, i64 last, int num_threads) {
  Rows rows = {first, last - first, num_threads, -1, {}, {0}};
  for (i64 req = 0; req < s.num_reqs; req++) {
    const i64 begin = s.query_start_loc[req], end = s.query_start_loc[req + 1];
    if (end <= first || begin >= last) continue;
    if (rows.first_req < 0) rows.first_req = req;
    const i64 until = std::min(end, last);
    rows.seq_lens.push_back((int32_t)(s.seq_lens[req] - (end - until)));
    rows.query_start_loc.push_back((int32_t)(until - first));
  }
  return rows;
}

constexpr i64 kMostRows = 32;  // in a piece: what one operation leaves for the next stays in L2

// From how many rows a thread on rows of its own are worth reading all weights once for each thread. Measured with two threads;
// more of them share the same memory.
i64 fewest_rows(int num_threads) { return num_threads <= 2 ? 4 : 2 * num_threads; }

// What the step's rows cost up to each of them, in the time of reading one position's keys and values: a row's products, which go
// about four times as fast a multiplication, and what it sees of its context, on average over the layers. costs[m] is all.
std::vector<double> sum_costs(const Step& s, const Layer* layers, i64 num_layers) {
  const Layer& layer = layers[0];
  double products = 0.0;
  for (const Matrix* w : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) products += (double)rows_of(*w) * (double)w->k;
  const double row = products / (4.0 * 2.0 * s.num_heads * s.head_dim);
  std::vector<double> costs(s.m + 1, 0.0), shares(s.num_groups, 0.0);  // of a group: its part of the layers
  for (i64 i = 0; i < num_layers; i++) shares[layers[i].group] += 1.0 / (double)num_layers;
  for (i64 req = 0; req < s.num_reqs; req++) {
    const i64 begin = s.query_start_loc[req], end = s.query_start_loc[req + 1];
    for (i64 i = begin; i < end; i++) {
      const i64 context = s.seq_lens[req] - (end - 1 - i);
      costs[i + 1] = costs[i] + row;
      for (i64 g = 0; g < s.num_groups; g++) {
        const i64 window = s.groups[g].window;
        costs[i + 1] += shares[g] * (double)(window ? std::min(context, window) : context);
      }
    }
  }
  return costs;
}

// The row, `first` or a later one, before which the costs are nearest to `target`.
i64 find_row(const std::vector<double>& costs, i64 first, double target) {
  const i64 row = std::lower_bound(costs.begin() + first, costs.end() - 1, target) - costs.begin();
  return row > first && target - costs[row - 1] < costs[row] - target ? row - 1 : row;
}

// One piece for all threads, or pieces of about the same cost, a multiple of the number of threads.
std::vector<Rows> share_rows(const Step& s, const Layer* layers, i64 num_layers) {
  const bool all_owned = s.query_start_loc[s.num_reqs] == s.m;  // else rows of no request follow, whose cost is not known
  if (s.m >= fewest_rows(s.num_threads) * s.num_threads && all_owned) {
    const i64 pieces = (s.m + kMostRows * s.num_threads - 1) / (kMostRows * s.num_threads) * s.num_threads;
    const std::vector<double> costs = sum_costs(s, layers, num_layers);
    const double share = costs[s.m] / (double)pieces;
    std::vector<Rows> all;
    double largest = 0.0;
    for (i64 i = 1, first = 0, last; i <= pieces; i++, first = last) {
      last = i == pieces ? s.m : find_row(costs, first, share * (double)i);
      if (last > first) all.push_back(take_rows(s, first, last, 1));
      largest = std::max(largest, costs[last] - costs[first]);
    }
    if (largest <= 1.25 * share) return all;  // else one row with a long context, which is better shared by its spans
  }
  return {take_rows(s, 0, s.m, s.num_threads)};
}

// What a layer needs beside the step's own arrays, [m] rows each: `wide` holds qkv or gate_up, `narrow` the heads or their product.
struct Buffers {
  float *wide, *narrow, *added;
  i64 wide_columns, narrow_columns;
};

template <class Body>
void for_each(int num_threads, i64 count, const Body& body) {
  const auto call = [](void* context, i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) (*(const Body*)context)(i);
  };
  parallel_for(num_threads, count, 1, call, (void*)&body);
}

struct Decoder {
  const Kernels& kernels;
  const Layer* layers;
  const Step& s;
  const Buffers& b;

  void multiply(const Rows& rows, const Matrix& all, const float* x, i64 ldx, float* y) const {
    const i64 ldy = rows_of(all);
    for (const Matrix* w = &all; w; y += w->n, w = w->next) {
      LinearArgs args = {};
      args.format = w->format, args.num_threads = rows.num_threads;
      args.m = rows.count, args.n = w->n, args.k = w->k;
      args.weights = w->weights, args.bias = w->bias;
      args.x = x, args.ldx = ldx, args.y = y, args.ldy = ldy;
      if (w->fast) kernels.linear_fast(&args);
      else kernels.linear_exact(&args);
    }
  }

  // y += what one adapter adds for `count` rows: x [count, k], y [count, *].
  void add_low_rank(const LowRank& of, i64 count, int num_threads, const float* x, i64 ldx, float* y, i64 ldy) const {
    i64 widest = 0;
    for (const Matrix* w = of.up; w; w = w->next) widest = std::max(widest, w->n);
    float* inner = (float*)scratch(4, count * (of.down.n + widest) * sizeof(float));
    float* added = inner + count * of.down.n;
    LinearArgs args = {};
    args.format = of.down.format, args.num_threads = num_threads;
    args.m = count, args.n = of.down.n, args.k = of.down.k;
    args.weights = of.down.weights, args.x = x, args.ldx = ldx, args.y = inner, args.ldy = of.down.n;
    kernels.linear_exact(&args);
    for (const Matrix* w = of.up; w; y += w->n, w = w->next) {
      if (!w->weights) continue;
      args.format = w->format, args.n = w->n, args.k = w->k;
      args.weights = w->weights, args.x = inner, args.ldx = of.down.n, args.y = added, args.ldy = w->n;
      kernels.linear_exact(&args);
      for (i64 i = 0; i < count; i++)
        for (i64 j = 0; j < w->n; j++) y[i * ldy + j] += added[i * w->n + j];
      inner += w->k;
    }
  }

  // The rows of one adapter that follow each other go together.
  void adapt(const Layer& layer, int product, const Rows& rows, const float* x, i64 ldx, float* y, i64 ldy) const {
    if (!s.adapters) return;
    const LowRank* const* of = s.adapters + rows.first;
    std::vector<i64> starts;
    for (i64 i = 0; i < rows.count; i++)
      if (i == 0 || of[i] != of[i - 1]) starts.push_back(i);
    const i64 num_runs = (i64)starts.size(), place = (&layer - layers) * kProducts + product;
    starts.push_back(rows.count);
    const int each = num_runs > 1 ? 1 : rows.num_threads;
    const auto body = [&](i64 run) {
      const i64 i = starts[run];
      if (of[i] && of[i][place].down.n) add_low_rank(of[i][place], starts[run + 1] - i, each, x + i * ldx, ldx, y + i * ldy, ldy);
    };
    for_each(num_runs > 1 ? rows.num_threads : 1, num_runs, body);
  }

  float* normed(const Rows& rows) const { return s.normed + rows.first * s.hidden; }
  float* wide(const Rows& rows) const { return b.wide + rows.first * b.wide_columns; }
  float* narrow(const Rows& rows) const { return b.narrow + rows.first * b.narrow_columns; }
  float* added(const Rows& rows) const { return b.added + rows.first * s.hidden; }

  void norm(const Rows& rows, const float* more, const float* weight) const {
    float* residual = s.residual + rows.first * s.hidden;
    RmsNormArgs args = {};
    args.num_threads = rows.num_threads;
    args.m = rows.count, args.n = s.hidden;
    args.x = more ? more : residual, args.residual = more ? residual : nullptr;
    args.weight = weight, args.y = normed(rows), args.eps = s.eps;
    args.ldx = args.ldr = args.ldy = s.hidden;
    kernels.rms_norm(&args);
  }

  // Of what a layer is about to add to the residual, in place.
  void norm_added(const Rows& rows, float* x, const float* weight) const {
    RmsNormArgs args = {};
    args.num_threads = rows.num_threads;
    args.m = rows.count, args.n = s.hidden;
    args.x = x, args.y = x, args.weight = weight, args.eps = s.eps;
    args.ldx = args.ldy = s.hidden;
    kernels.rms_norm(&args);
  }

  CacheLayout cache(const Layer& layer) const { return {s.kv_type, s.block_size, s.num_kv_heads, s.head_dim, layer.cache}; }

  // From the normed residual to queries, and to keys and values in the cache.
  void project(const Layer& layer, const Rows& rows) const {
    const i64 query = (i64)s.num_heads * s.head_dim, key = (i64)s.num_kv_heads * s.head_dim, stride = query + 2 * key;
    float* qkv = wide(rows);
    multiply(rows, layer.qkv, normed(rows), s.hidden, qkv);
    adapt(layer, 0, rows, normed(rows), s.hidden, qkv, stride);
    RopeCacheArgs args = {};
    args.cache = cache(layer), args.num_heads = s.num_heads, args.num_threads = rows.num_threads, args.num_tokens = rows.count;
    args.query = qkv, args.key = qkv + query, args.value = qkv + query + key;
    args.query_stride = args.key_stride = args.value_stride = stride;
    args.cos_sin = layer.cos_sin, args.positions = s.positions + rows.first, args.slots = s.groups[layer.group].slots + rows.first;
    args.query_norm = layer.query_norm, args.key_norm = layer.key_norm, args.norm_eps = s.eps;
    kernels.rope_cache(&args);
  }

  void attend(const Layer& layer, const Rows& rows, const float* query, i64 query_stride, float* out, i64 out_stride) const {
    const CacheGroup& group = s.groups[layer.group];
    AttentionArgs args = {};
    args.cache = cache(layer), args.num_heads = s.num_heads, args.num_threads = rows.num_threads;
    args.query = query, args.query_stride = query_stride, args.out = out, args.out_stride = out_stride;
    args.block_table = group.block_table + rows.first_req * group.block_table_stride, args.block_table_stride = group.block_table_stride;
    args.seq_lens = rows.seq_lens.data(), args.query_start_loc = rows.query_start_loc.data(), args.num_reqs = (i64)rows.seq_lens.size();
    args.window = group.window, args.scale = s.scale, args.soft_cap = s.soft_cap;
    kernels.attention(&args);
  }

  void gate(const Rows& rows, const float* gate_up, i64 ldx, float* y, i64 columns) const {
    GatedMulArgs args = {};
    args.num_threads = rows.num_threads;
    args.m = rows.count, args.n = columns;
    args.gate_up = gate_up, args.ldx = ldx, args.y = y, args.ldy = columns;
    if (s.activation == kGelu) kernels.gelu_mul(&args);
    else kernels.silu_mul(&args);
  }

  // From the queries, with all keys and values of this layer written, to what attention adds to the residual.
  void attended(const Layer& layer, const Rows& rows) const {
    const i64 query = (i64)s.num_heads * s.head_dim, stride = query + 2 * (i64)s.num_kv_heads * s.head_dim;
    attend(layer, rows, wide(rows), stride, narrow(rows), query);
    multiply(rows, layer.output, narrow(rows), query, added(rows));
    adapt(layer, 1, rows, narrow(rows), query, added(rows), s.hidden);
  }

  // From there to what the MLP adds.
  void gated(const Layer& layer, const Rows& rows) const {
    float *first = wide(rows), *second = narrow(rows), *sum = added(rows);
    if (layer.attention_out_norm) norm_added(rows, sum, layer.attention_out_norm);
    norm(rows, sum, layer.post_norm);
    multiply(rows, layer.gate_up, normed(rows), s.hidden, first);
    adapt(layer, 2, rows, normed(rows), s.hidden, first, rows_of(layer.gate_up));
    gate(rows, first, rows_of(layer.gate_up), second, layer.down.k);
    multiply(rows, layer.down, second, layer.down.k, sum);
    adapt(layer, 3, rows, second, layer.down.k, sum, s.hidden);
  }

  // From there to the residual and its norm, and to the next layer's queries, keys and values.
  void proceed(const Layer& layer, const Layer* next, const Rows& rows) const {
    if (layer.mlp_out_norm) norm_added(rows, added(rows), layer.mlp_out_norm);
    norm(rows, added(rows), next ? next->input_norm : s.final_norm);
    if (next) project(*next, rows);
  }
};

template <class Body>
void for_all(const std::vector<Rows>& pieces, int num_threads, const Body& body) {
  for_each(pieces.size() == 1 ? 1 : num_threads, (i64)pieces.size(), body);
}

// What `all_reduce` of the step answers, 0 without one.
int32_t run(const Layer* layers, i64 num_layers, const Step& s) {
  // Room for the widest layer.
  Buffers b = {nullptr, nullptr, nullptr, 0, (i64)s.num_heads * s.head_dim};
  for (i64 i = 0; i < num_layers; i++) {
    b.wide_columns = std::max({b.wide_columns, rows_of(layers[i].qkv), rows_of(layers[i].gate_up)});
    b.narrow_columns = std::max(b.narrow_columns, layers[i].down.k);
  }
  b.wide = (float*)scratch(3, s.m * (b.wide_columns + b.narrow_columns + s.hidden + 48) * sizeof(float));
  b.narrow = b.wide + s.m * b.wide_columns, b.added = b.narrow + s.m * b.narrow_columns;

  const Decoder decoder = {kernels_of(s.isa), layers, s, b};
  const std::vector<Rows> pieces = share_rows(s, layers, num_layers);
  for_all(pieces, s.num_threads, [&](i64 piece) {
    decoder.norm(pieces[piece], nullptr, layers[0].input_norm);
    decoder.project(layers[0], pieces[piece]);
  });
  for (i64 i = 0; i < num_layers; i++) {
    const Layer *layer = layers + i, *next = i + 1 == num_layers ? nullptr : layer + 1;
    if (!s.all_reduce) {
      for_all(pieces, s.num_threads, [&](i64 piece) {
        decoder.attended(*layer, pieces[piece]);
        decoder.gated(*layer, pieces[piece]);
        decoder.proceed(*layer, next, pieces[piece]);
      });
      continue;
    }
    for_all(pieces, s.num_threads, [&](i64 piece) { decoder.attended(*layer, pieces[piece]); });
    if (const int32_t error = s.all_reduce(b.added, s.m * s.hidden)) return error;
    for_all(pieces, s.num_threads, [&](i64 piece) { decoder.gated(*layer, pieces[piece]); });
    if (const int32_t error = s.all_reduce(b.added, s.m * s.hidden)) return error;
    for_all(pieces, s.num_threads, [&](i64 piece) { decoder.proceed(*layer, next, pieces[piece]); });
  }
  return 0;
}

}  // namespace
}  // namespace aio

extern "C" {

AIO_EXPORT int32_t aio_decoder(const aio::Layer* layers, aio::i64 num_layers, const aio::Step* step) {
  return aio::run(layers, num_layers, *step);
}

}  // extern "C"
