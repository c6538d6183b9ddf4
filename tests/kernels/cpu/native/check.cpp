// The C ABI against plain loops in double, without Python: what can be run under an emulator. Prints a line a finding, and ends with
// the number of wrong ones. `weights` lines are checksums of the same unpacked weights: every machine must print the same.
#include "common.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace aio;

extern "C" {
int32_t aio_supports(int32_t isa);
i64 aio_packed_bytes(int32_t format, i64 rows, i64 k);
void aio_pack(int32_t format, const uint8_t* source, i64 row_bytes, i64 rows, i64 k, i64 first_row, uint8_t* packed, int32_t num_threads);
void aio_gather_rows(int32_t format, const uint8_t* packed, i64 k, const int64_t* ids, i64 count, float* out, i64 ldo);
void aio_linear(const LinearArgs* args);
void aio_attention(const AttentionArgs* args);
void aio_rope_cache(const RopeCacheArgs* args);
void aio_rms_norm(const RmsNormArgs* args);
void aio_silu_mul(const GatedMulArgs* args);
}

namespace {

int num_wrong = 0;

void report(bool right, const char* what, const char* name, double error) {
  if (!right) num_wrong++;
  std::printf("%s %s %s %.1e\n", right ? "right" : "WRONG", what, name, error);
}

uint64_t state = 1;

uint32_t random_bits() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 33);
}

float random_number() { return (float)((double)random_bits() / 1073741824.0 - 1.0); }  // in [-1, 1)

std::vector<float> random_numbers(size_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = random_number();
  return numbers;
}

struct Bytes {  // 64-byte aligned
  explicit Bytes(size_t size) : data((uint8_t*)std::aligned_alloc(64, (size + 63) / 64 * 64)) { std::memset(data, 0, size); }
  ~Bytes() { std::free(data); }
  Bytes(const Bytes&) = delete;
  uint8_t* data;
};

// How a file stores it: columns and bytes of a block, and where float16 scales are, which must be numbers.
struct Stored {
  const char* name;
  int32_t format;
  i64 columns, bytes;
  int scales[2];
};

constexpr Stored kStored[] = {
    {"f32", kF32, 1, 4, {-1, -1}},         {"f16", kF16, 1, 2, {0, -1}},         {"bf16", kBF16, 1, 2, {0, -1}},
    {"q4_0", kQ4_0, 32, 18, {0, -1}},      {"q4_1", kQ4_1, 32, 20, {0, 2}},      {"q5_0", kQ5_0, 32, 22, {0, -1}},
    {"q5_1", kQ5_1, 32, 24, {0, 2}},       {"q8_0", kQ8_0, 32, 34, {0, -1}},     {"iq4_nl", kIQ4_NL, 32, 18, {0, -1}},
    {"q3_k", kQ3_K, 256, 110, {108, -1}},  {"q4_k", kQ4_K, 256, 144, {0, 2}},    {"q5_k", kQ5_K, 256, 176, {0, 2}},
    {"q6_k", kQ6_K, 256, 210, {208, -1}},  {"iq4_xs", kIQ4_XS, 256, 136, {0, -1}},
};

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < want.size(); i++) difference += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
  const double error = std::sqrt(difference / size);
  return std::isnan(error) ? INFINITY : error;
}

void check_products(const Stored& s, int32_t isa) {
  const i64 n = 40, k = 512, row_bytes = k / s.columns * s.bytes;
  std::vector<uint8_t> source(n * row_bytes);
  for (uint8_t& byte : source) byte = (uint8_t)random_bits();
  for (size_t block = 0; block < source.size(); block += s.bytes) {
    const float number = random_number();
    if (s.format == kF32) std::memcpy(&source[block], &number, 4);
    for (const int at : s.scales)
      if (at >= 0) source[block + at + 1] = (uint8_t)((source[block + at + 1] & 0x83) | (s.format == kBF16 ? 0x3c : 0x28));
  }
  Bytes packed(aio_packed_bytes(s.format, n, k));
  aio_pack(s.format, source.data(), row_bytes, n, k, 0, packed.data, 3);
  // What a matrix is kept as, when it is asked for products.
  int32_t kept = s.format;
  if (kept == kQ5_0 || kept == kIQ4_NL) kept = kQ8_0;
  if (kept == kQ5_1) kept = kQ5_K;
  if (kept == kIQ4_XS || kept == kQ3_K) kept = kQ6_K;
  std::vector<float> weights(n * k);
  std::vector<int64_t> ids(n);
  for (i64 i = 0; i < n; i++) ids[i] = i;
  aio_gather_rows(kept, packed.data, k, ids.data(), n, weights.data(), k);
  uint64_t sum = 14695981039346656037ull;
  for (const float weight : weights) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    sum = (sum ^ bits) * 1099511628211ull;
  }
  if (isa == 0) std::printf("weights %s %016llx\n", s.name, (unsigned long long)sum);

  for (const i64 m : {1, 3, 17}) {
    const std::vector<float> x = random_numbers(m * k), bias = random_numbers(n);
    std::vector<double> want(m * n);
    for (i64 i = 0; i < m; i++)
      for (i64 j = 0; j < n; j++) {
        want[i * n + j] = bias[j];
        for (i64 c = 0; c < k; c++) want[i * n + j] += (double)x[i * k + c] * weights[j * k + c];
      }
    for (const bool fast : {false, true}) {
      std::vector<float> y[2];
      for (const int threads : {1, 3}) {
        std::vector<float>& out = y[threads / 2];
        out.assign(m * n, NAN);
        const LinearArgs args = {isa, fast, kept, threads, m, n, k, packed.data, x.data(), k, out.data(), n, bias.data()};
        aio_linear(&args);
      }
      const double error = relative_error(y[0], want);
      report(error < (fast ? 1e-2 : 5e-5), fast ? "fast" : "exact", s.name, error);
      if (std::memcmp(y[0].data(), y[1].data(), y[0].size() * 4)) report(false, "threads", s.name, 0.0);
    }
  }
}

// One request of `context` positions whose last `rows` are asked for.
void check_attention(int32_t isa, int32_t kv_type, i64 context, i64 rows, i64 window) {
  constexpr i64 heads = 6, kv_heads = 2, dim = 64, block = 16, group = heads / kv_heads;
  const i64 blocks = (context + block - 1) / block, width = kv_type == kKvF32 ? 4 : kv_type == kKvI8 ? 1 : 2;
  Bytes cache(blocks * kv_heads * 2 * block * (dim * width + (kv_type == kKvI8 ? 4 : 0)));
  const CacheLayout layout = {kv_type, (int32_t)block, (int32_t)kv_heads, (int32_t)dim, cache.data};
  std::vector<int32_t> table(blocks);
  for (i64 i = 0; i < blocks; i++) table[i] = (int32_t)(blocks - 1 - i);
  std::vector<float> query = random_numbers(context * heads * dim), key = random_numbers(context * kv_heads * dim);
  const std::vector<float> value = random_numbers(context * kv_heads * dim);
  std::vector<int64_t> slots(context), positions(context);
  for (i64 i = 0; i < context; i++) slots[i] = table[i / block] * block + i % block, positions[i] = i;
  RopeCacheArgs write = {};
  write.cache = layout, write.isa = isa, write.num_heads = heads, write.num_threads = 2, write.num_tokens = context;
  write.query = query.data(), write.query_stride = heads * dim, write.key = key.data(), write.key_stride = kv_heads * dim;
  write.value = value.data(), write.value_stride = kv_heads * dim, write.positions = positions.data(), write.slots = slots.data();
  aio_rope_cache(&write);

  const int32_t seq_len = (int32_t)context, starts[2] = {0, (int32_t)rows};
  const float* asked = query.data() + (context - rows) * heads * dim;
  std::vector<float> out[2];
  for (const int threads : {1, 4}) {
    std::vector<float>& y = out[threads / 2 > 0];
    y.assign(rows * heads * dim, NAN);
    AttentionArgs args = {};
    args.cache = layout, args.isa = isa, args.num_heads = heads, args.num_threads = threads;
    args.query = asked, args.query_stride = heads * dim, args.out = y.data(), args.out_stride = heads * dim;
    args.block_table = table.data(), args.block_table_stride = blocks, args.seq_lens = &seq_len, args.query_start_loc = starts;
    args.num_reqs = 1, args.window = window, args.scale = 0.125f;
    aio_attention(&args);
  }
  std::vector<double> want(rows * heads * dim), weight(context);
  for (i64 r = 0; r < rows; r++)
    for (i64 h = 0; h < heads; h++) {
      const i64 last = context - rows + r, first = window ? std::max<i64>(0, last - window + 1) : 0;
      double total = 0.0;
      for (i64 p = first; p <= last; p++) {
        double score = 0.0;
        for (i64 d = 0; d < dim; d++) score += (double)asked[(r * heads + h) * dim + d] * key[(p * kv_heads + h / group) * dim + d];
        total += weight[p] = std::exp(0.125 * score);
      }
      for (i64 p = first; p <= last; p++)
        for (i64 d = 0; d < dim; d++) want[(r * heads + h) * dim + d] += weight[p] / total * value[(p * kv_heads + h / group) * dim + d];
    }
  const char* names[] = {"float32", "float16", "int8", "float16 fast"};
  const double limits[] = {1e-5, 1e-3, 2e-2, 2e-2}, error = relative_error(out[0], want);
  report(error < limits[kv_type], window ? "window" : "attention", names[kv_type], error);
  if (std::memcmp(out[0].data(), out[1].data(), out[0].size() * 4)) report(false, "threads", names[kv_type], 0.0);
}

// The sum is made in place: a row that is taken twice or not at all shows.
void check_every_row_is_taken_once(int32_t isa, int threads) {
  const i64 m = 257, n = 48;
  std::vector<float> x(m * n, 1.0f), residual(m * n, 0.0f), y(m * n), weight(n, 1.0f);
  RmsNormArgs args = {isa, threads, m, n, x.data(), n, residual.data(), n, weight.data(), y.data(), n, 1e-6f};
  for (int i = 0; i < 50; i++) aio_rms_norm(&args);
  bool right = true;
  for (i64 i = 0; i < m * n; i++) right = right && residual[i] == 50.0f && std::fabs(y[i] - 1.0f) < 1e-5f;
  const std::vector<float> gate_up = random_numbers(m * 2 * n);
  GatedMulArgs gated = {isa, threads, m, n, gate_up.data(), 2 * n, y.data(), n};
  aio_silu_mul(&gated);
  std::vector<double> want(m * n);
  for (i64 i = 0; i < m * n; i++) {
    const double gate = gate_up[i / n * 2 * n + i % n];
    want[i] = gate / (1.0 + std::exp(-gate)) * gate_up[i / n * 2 * n + n + i % n];
  }
  char name[16];
  std::snprintf(name, sizeof name, "%d", threads);
  report(right && relative_error(y, want) < 1e-6, "pool", name, relative_error(y, want));
}

}  // namespace

int main() {
  for (int32_t isa = 0; isa < 3; isa++) {
    if (!aio_supports(isa)) continue;
    std::printf("isa %d\n", isa);
    state = 1;
    for (const Stored& stored : kStored) check_products(stored, isa);
    for (const int32_t kv_type : {kKvF32, kKvF16, kKvI8, kKvF16Fast}) {
      check_attention(isa, kv_type, 1, 1, 0);
      check_attention(isa, kv_type, 70, 5, 0);
      check_attention(isa, kv_type, 333, 40, 0);
      check_attention(isa, kv_type, 333, 3, 100);
    }
    for (const int threads : {1, 2, 3, 4, 8, 16}) check_every_row_is_taken_once(isa, threads);
  }
  return std::min(num_wrong, 100);
}
