// From rows of GGUF blocks or plain numbers to panels, and back to single rows (the embedding look-up).
//
// A panel holds 16 rows. Dense: [k][16]. Quantized: first the quants of all groups, then the scales of all groups.
//   4 bits: a group is 4 vectors of 64 bytes; byte 4r+t of vector j holds row r, columns 4j+t (low half) and 16+4j+t (high).
//   8 bits: a group is 8 vectors of 64 bytes; byte 4r+t of vector j holds row r, column 4j+t, plus 128 (Q5_K: as it is).
//   scales: [16] of the scale, then [16] of the minimum (Q4_1, Q4_K, Q5_K) or of the second half's scale (Q6_K).
#include <cstring>

#include "common.h"

namespace aio {
namespace {

typedef uint16_t f16;

float half_to_float(f16 h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 0) {
    const float f = (float)mantissa * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  const uint32_t bits = exponent == 31 ? (sign | 0x7f800000u | (mantissa << 13)) : (sign | ((exponent + 112u) << 23) | (mantissa << 13));
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

f16 read_f16(const uint8_t* p) {
  f16 h;
  std::memcpy(&h, p, sizeof h);
  return h;
}

// One group of 32 numbers of one row, unpacked.
struct Group {
  uint8_t quants[kGroup];  // 4-bit formats and Q5_K: the value; 8-bit formats: the value plus 128
  float scale[2];          // Q6_K: two halves
  float minimum;
  f16 scale_f16, minimum_f16;
};

i64 block_bytes(int32_t format) {
  switch (format) {
    case kQ4_0: return 18;
    case kQ4_1: return 20;
    case kQ8_0: return 34;
    case kQ5_0: return 22;
    case kQ4_K: return 144;
    case kQ6_K: return 210;
    case kQ5_K: return 176;
    case kQ5_1: return 24;
    case kIQ4_NL: return 18;
    case kIQ4_XS: return 136;
    case kQ3_K: return 110;
    case kMXFP4: return 17;
    default: return 0;
  }
}

i64 block_columns(int32_t format) {
  return format == kQ4_K || format == kQ6_K || format == kQ5_K || format == kIQ4_XS || format == kQ3_K ? 256 : 32;
}

// The panel format that a stored format is kept in.
int32_t kept_as(int32_t format) {
  switch (format) {
    case kQ5_0:
    case kIQ4_NL: return kQ8_0;
    case kQ5_1: return kQ5_K;
    case kIQ4_XS:
    case kQ3_K:
    case kMXFP4: return kQ6_K;
    default: return format;
  }
}

// The numbers that 4 bits stand for in IQ4_NL and IQ4_XS, and, twice as large, in MXFP4.
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMicroscaling[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 16 bytes -> 32 numbers of a table.
void read_table(const int8_t* table, const uint8_t* q, Group* g) {
  for (int i = 0; i < 16; i++) g->quants[i] = (uint8_t)(table[q[i] & 15] + 128), g->quants[16 + i] = (uint8_t)(table[q[i] >> 4] + 128);
}

void read_iq4_xs(const uint8_t* block, int sub, Group* g) {
  uint16_t high;
  std::memcpy(&high, block + 2, 2);
  const int scale = ((block[4 + sub / 2] >> (4 * (sub & 1))) & 15) | (((high >> (2 * sub)) & 3) << 4);
  g->scale[0] = g->scale[1] = half_to_float(read_f16(block)) * (float)(scale - 32);
  read_table(kNonLinear, block + 8 + sub * 16, g);
}

void read_q3_k(const uint8_t* block, int sub, Group* g) {
  const uint8_t *high = block, *low = block + 32 + sub / 4 * 32, *scales = block + 96;
  const float d = half_to_float(read_f16(block + 108));
  for (int i = 0; i < 32; i++) {
    const int value = ((low[i] >> (2 * (sub % 4))) & 3) - ((high[i] >> sub) & 1 ? 0 : 4);
    g->quants[i] = (uint8_t)(value + 128);
  }
  for (int h = 0; h < 2; h++) {
    const int j = 2 * sub + h;
    const int scale = (j < 8 ? scales[j] & 15 : scales[j - 8] >> 4) | (((scales[8 + j % 4] >> (2 * (j / 4))) & 3) << 4);
    g->scale[h] = d * (float)(scale - 32);
  }
}

void read_mxfp4(const uint8_t* block, Group* g) {
  const uint32_t e = block[0], bits = e < 2 ? 0x200000u << e : (e - 1) << 23;  // half of 2^(e - 127)
  std::memcpy(&g->scale[0], &bits, 4);
  g->scale[1] = g->scale[0];
  read_table(kMicroscaling, block + 1, g);
}

// Q4_K and Q5_K: `quants` are the low 4 bits of all columns.
void read_q4_k(const uint8_t* block, const uint8_t* quants, int sub, Group* g) {
  const uint8_t* s = block + 4;
  int scale, minimum;
  if (sub < 4) {
    scale = s[sub] & 63, minimum = s[sub + 4] & 63;
  } else {
    scale = (s[sub + 4] & 15) | ((s[sub - 4] >> 6) << 4), minimum = (s[sub + 4] >> 4) | ((s[sub] >> 6) << 4);
  }
  g->scale[0] = half_to_float(read_f16(block)) * (float)scale;
  g->minimum = -(half_to_float(read_f16(block + 2)) * (float)minimum);
  const uint8_t* q = quants + sub / 2 * 32;
  for (int i = 0; i < 32; i++) g->quants[i] = sub & 1 ? q[i] >> 4 : q[i] & 15;
}

void read_q5_k(const uint8_t* block, int sub, Group* g) {
  read_q4_k(block, block + 48, sub, g);
  for (int i = 0; i < 32; i++) g->quants[i] |= (uint8_t)(((block[16 + i] >> sub) & 1) << 4);
}

void read_q6_k(const uint8_t* block, int sub, Group* g) {
  const int half = sub / 4, quarter = sub % 4;  // 128 numbers in four runs of 32
  const uint8_t* low = block + half * 64 + (quarter & 1) * 32;
  const uint8_t* high = block + 128 + half * 32;
  const int8_t* scales = (const int8_t*)block + 192 + sub * 2;
  const float d = half_to_float(read_f16(block + 208));
  for (int i = 0; i < 32; i++) {
    const int lo = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    g->quants[i] = (uint8_t)((lo | (((high[i] >> (2 * quarter)) & 3) << 4)) - 32 + 128);
  }
  for (int h = 0; h < 2; h++) g->scale[h] = d * (float)scales[h];
}

void read_group(int32_t format, const uint8_t* row, i64 group, Group* g) {
  const i64 per_block = block_columns(format) / kGroup;
  const uint8_t* block = row + group / per_block * block_bytes(format);
  g->scale_f16 = read_f16(block);
  const uint8_t* q = block + 2;
  switch (format) {
    case kQ4_1: g->minimum_f16 = read_f16(block + 2), q += 2; [[fallthrough]];
    case kQ4_0:
      for (int i = 0; i < 16; i++) g->quants[i] = q[i] & 15, g->quants[16 + i] = q[i] >> 4;
      break;
    case kQ8_0:
      for (int i = 0; i < 32; i++) g->quants[i] = q[i] ^ 0x80;
      break;
    case kQ5_0: {
      uint32_t high;
      std::memcpy(&high, q, 4), q += 4;
      for (int i = 0; i < 16; i++) {
        g->quants[i] = (uint8_t)(((q[i] & 15) | (((high >> i) & 1) << 4)) - 16 + 128);
        g->quants[16 + i] = (uint8_t)(((q[i] >> 4) | (((high >> (16 + i)) & 1) << 4)) - 16 + 128);
      }
      break;
    }
    case kQ5_1: {
      uint32_t high;
      std::memcpy(&high, block + 4, 4), q = block + 8;
      g->scale[0] = half_to_float(g->scale_f16), g->minimum = half_to_float(read_f16(block + 2));
      for (int i = 0; i < 16; i++) {
        g->quants[i] = (uint8_t)((q[i] & 15) | (((high >> i) & 1) << 4));
        g->quants[16 + i] = (uint8_t)((q[i] >> 4) | (((high >> (16 + i)) & 1) << 4));
      }
      break;
    }
    case kIQ4_NL: read_table(kNonLinear, q, g); break;
    case kMXFP4: read_mxfp4(block, g); break;
    case kQ4_K: read_q4_k(block, block + 16, (int)(group % per_block), g); break;
    case kQ5_K: read_q5_k(block, (int)(group % per_block), g); break;
    case kQ6_K: read_q6_k(block, (int)(group % per_block), g); break;
    case kIQ4_XS: read_iq4_xs(block, (int)(group % per_block), g); break;
    case kQ3_K: read_q3_k(block, (int)(group % per_block), g); break;
    default: break;
  }
}

void write_group(int32_t format, uint8_t* quants, uint8_t* scales, int r, const Group& g) {
  if (format == kQ4_0 || format == kQ4_1 || format == kQ4_K) {
    for (int j = 0; j < 4; j++)
      for (int t = 0; t < 4; t++) quants[j * 64 + r * 4 + t] = (uint8_t)(g.quants[4 * j + t] | (g.quants[16 + 4 * j + t] << 4));
  } else {
    for (int j = 0; j < 8; j++) std::memcpy(quants + j * 64 + r * 4, g.quants + 4 * j, 4);
  }
  if (format == kQ4_K || format == kQ5_K || format == kQ6_K) {
    const float second = format == kQ6_K ? g.scale[1] : g.minimum;
    std::memcpy(scales + r * 4, &g.scale[0], 4);
    std::memcpy(scales + 64 + r * 4, &second, 4);
  } else {
    std::memcpy(scales + r * 2, &g.scale_f16, 2);
    if (format == kQ4_1) std::memcpy(scales + 32 + r * 2, &g.minimum_f16, 2);
  }
}

void pack_dense(const uint8_t* source, i64 row_bytes, i64 rows, i64 k, int width, i64 first_row, uint8_t* packed, i64 panel_bytes) {
  for (i64 i = 0; i < rows; i++) {
    const i64 row = first_row + i;
    uint8_t* panel = packed + row / kPanelRows * panel_bytes + row % kPanelRows * width;
    const uint8_t* from = source + i * row_bytes;
    if (width == 4) {
      for (i64 c = 0; c < k; c++) std::memcpy(panel + c * 64, from + c * 4, 4);
    } else {
      for (i64 c = 0; c < k; c++) std::memcpy(panel + c * 32, from + c * 2, 2);
    }
  }
}

}  // namespace

struct PackArgs {
  int32_t format;  // as stored
  const uint8_t* source;
  i64 row_bytes, k, first_row;
  uint8_t* packed;
};

static void pack_rows(const PackArgs& a, i64 begin, i64 end) {
  const int32_t format = kept_as(a.format);
  const PanelLayout layout = panel_layout(format, a.k);
  const i64 groups = a.k / kGroup;
  if (!layout.quants_per_group) {
    pack_dense(a.source + begin * a.row_bytes, a.row_bytes, end - begin, a.k, a.format == kF32 ? 4 : 2, a.first_row + begin, a.packed,
               layout.bytes);
    return;
  }
  for (i64 i = begin; i < end; i++) {
    const i64 row = a.first_row + i;
    uint8_t* panel = a.packed + row / kPanelRows * layout.bytes;
    uint8_t* scales = panel + groups * layout.quants_per_group;
    for (i64 b = 0; b < groups; b++) {
      Group g;
      read_group(a.format, a.source + i * a.row_bytes, b, &g);
      write_group(format, panel + b * layout.quants_per_group, scales + b * layout.scales_per_group, (int)(row % kPanelRows), g);
    }
  }
}

static void unpack_row(int32_t format, const uint8_t* packed, i64 k, i64 row, float* out) {
  const PanelLayout layout = panel_layout(format, k);
  const int r = (int)(row % kPanelRows);
  const uint8_t* panel = packed + row / kPanelRows * layout.bytes;
  if (!layout.quants_per_group) {
    for (i64 c = 0; c < k; c++) {
      if (format == kF32) {
        std::memcpy(out + c, panel + (c * kPanelRows + r) * 4, 4);
      } else {
        const f16 h = read_f16(panel + (c * kPanelRows + r) * 2);
        const uint32_t bits = (uint32_t)h << 16;
        if (format == kF16) out[c] = half_to_float(h);
        else std::memcpy(out + c, &bits, 4);
      }
    }
    return;
  }
  const i64 groups = k / kGroup;
  const bool nibbles = layout.quants_per_group == 256, wide = format == kQ4_K || format == kQ5_K || format == kQ6_K;
  for (i64 b = 0; b < groups; b++) {
    const uint8_t* q = panel + b * layout.quants_per_group;
    const uint8_t* s = panel + groups * layout.quants_per_group + b * layout.scales_per_group;
    float first, second = 0.0f;
    if (wide) {
      std::memcpy(&first, s + r * 4, 4), std::memcpy(&second, s + 64 + r * 4, 4);
    } else {
      first = half_to_float(read_f16(s + r * 2));
      if (format == kQ4_1) second = half_to_float(read_f16(s + 32 + r * 2));
    }
    for (int c = 0; c < kGroup; c++) {
      if (nibbles) {
        const uint8_t byte = q[(c % 16) / 4 * 64 + r * 4 + c % 4];
        const int value = c < 16 ? byte & 15 : byte >> 4;
        out[b * kGroup + c] = format == kQ4_0 ? (float)(value - 8) * first : (float)value * first + second;
      } else {
        const int value = q[c / 4 * 64 + r * 4 + c % 4];
        if (format == kQ5_K) out[b * kGroup + c] = (float)value * first + second;
        else out[b * kGroup + c] = (float)(value - 128) * (format == kQ6_K && c >= 16 ? second : first);
      }
    }
  }
}

}  // namespace aio

using aio::i64;

extern "C" {

// Bytes of the packed form of `rows` rows; 0 for a format or a k that cannot be packed.
AIO_EXPORT i64 aio_packed_bytes(int32_t format, i64 rows, i64 k) {
  if (format < 0 || format > aio::kMXFP4 || (format > aio::kBF16 && k % aio::block_columns(format))) return 0;
  return (rows + aio::kPanelRows - 1) / aio::kPanelRows * aio::panel_layout(aio::kept_as(format), k).bytes;
}

// Puts `rows` rows of the stored format at row `first_row` of the packed matrix, which must have been zeroed before.
AIO_EXPORT void aio_pack(int32_t format, const uint8_t* source, i64 row_bytes, i64 rows, i64 k, i64 first_row, uint8_t* packed, int32_t num_threads) {
  aio::PackArgs args = {format, source, row_bytes, k, first_row, packed};
  aio::parallel_for(
      num_threads, rows, 64, [](void* context, i64 begin, i64 end) { aio::pack_rows(*(const aio::PackArgs*)context, begin, end); }, &args);
}

// Rows `ids` of a packed matrix as float32: out[i] = row ids[i].
AIO_EXPORT void aio_gather_rows(int32_t format, const uint8_t* packed, i64 k, const int64_t* ids, i64 count, float* out, i64 ldo) {
  for (i64 i = 0; i < count; i++) aio::unpack_row(format, packed, k, ids[i], out + i * ldo);
}

}  // extern "C"
