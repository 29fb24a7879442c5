// Tensor maps, and how TMA moves the boxes of a tensor. PTX ISA, "Tensors" for boxes, traversal strides and swizzles; CUDA
// Driver API, "Tensor Map Object Management".
#include "tensor_map.h"

#include <cmath>
#include <cstring>
#include <string>

#include "../include/emulator/rounding.h"
#include "session.h"

namespace emu {

// ---- tensor maps

static unsigned item_bytes(unsigned type) {
  static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return type < std::size(bytes) ? bytes[type] : 0;
}

static CUresult refuse(CUresult error, const char* why) {
  session.hint = std::string("cuTensorMapEncodeTiled: ") + why;
  return error;
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* size,
                      const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const auto invalid = [](const char* why) { return refuse(CUDA_ERROR_INVALID_VALUE, why); };
  const unsigned item = item_bytes(unsigned(type));
  if (map == nullptr || reinterpret_cast<uintptr_t>(map) % 64 != 0) return invalid("the map must lie at a multiple of 64 bytes");
  if (item == 0) return invalid("no such data type");
  if (rank < 1 || rank > 5) return invalid("the rank must be 1 to 5");
  if (base == nullptr || reinterpret_cast<uintptr_t>(base) % 16 != 0) return invalid("the address must be a multiple of 16 bytes");
  if (size == nullptr || box == nullptr || step == nullptr || (rank > 1 && stride == nullptr)) return invalid("an array is missing");
  if (unsigned(swizzle) > CU_TENSOR_MAP_SWIZZLE_128B || unsigned(promotion) > CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
    return invalid("no such swizzle or promotion");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "the emulator knows neither interleaved layouts nor a fill of NaNs");
  for (unsigned d = 0; d < rank; ++d) {
    if (size[d] == 0 || size[d] > uint64_t(1) << 32) return invalid("a size must be 1 to 2^32");
    if (box[d] == 0 || box[d] > 256) return invalid("a box has 1 to 256 elements in each dimension");
    if (step[d] == 0 || step[d] > 8) return invalid("an element stride must be 1 to 8");
    if (d > 0 && (stride[d - 1] % 16 != 0 || stride[d - 1] >= uint64_t(1) << 40))
      return invalid("a stride must be a multiple of 16 bytes, less than 2^40");
  }
  if (box[0] * item % 16 != 0) return invalid("the box's innermost dimension must be a multiple of 16 bytes");
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && box[0] * item > 16u << unsigned(swizzle))
    return invalid("the box's innermost dimension must not be longer than the swizzle's 32, 64 or 128 bytes");
  TensorMap m = {};
  m.magic = kTensorMap;
  m.base = static_cast<char*>(base);
  m.rank = uint8_t(rank), m.item = uint8_t(item), m.type = uint8_t(type), m.swizzle = uint8_t(swizzle);
  m.box = box[0];
  for (unsigned d = 0; d < 5; ++d) {
    m.size[d] = d < rank ? size[d] : 1;
    if (d == 0) continue;
    m.stride[d - 1] = d < rank ? stride[d - 1] : 0;
    m.step[d - 1] = d < rank ? uint8_t(step[d]) : 1;
    m.rows[d - 1] = d < rank ? uint16_t((box[d] + step[d] - 1) / step[d]) : 1;
  }
  memset(map, 0, sizeof *map);
  memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

void* driver_entry_point(const char* symbol) {
  return strcmp(symbol, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(encode_tiled) : nullptr;
}

// ---- boxes

// Within 256, 512 or 1024 bytes of shared memory, 16-byte chunks trade places: the address's bits 4 to 6 or fewer of them
// are combined with bits 7 to 9.
static uint32_t swizzled(const TensorMap& m, uint32_t address) {
  const uint32_t bits = ((1u << m.swizzle) - 1) << 4;
  return address ^ (address >> 3 & bits);
}

void load_box(const Worker* w, const Box& b) {
  const uint32_t row = b.map.box * b.map.item;
  std::vector<char> data(row);
  each_row(b, [&](uint32_t place, const char* from, unsigned first, unsigned end) {
    memset(data.data(), 0, row);
    memcpy(data.data() + first * b.map.item, from + first * b.map.item, (end - first) * b.map.item);
    for (uint32_t k = 0; k < row; k += 16) memcpy(w->arena + swizzled(b.map, b.shared + place + k), data.data() + k, 16);
  });
}

std::vector<char> read_box(const Worker* w, const Box& b) {
  std::vector<char> data(b.bytes);
  for (uint32_t k = 0; k < b.bytes; k += 16) memcpy(data.data() + k, w->arena + swizzled(b.map, b.shared + k), 16);
  return data;
}

template <class T>
static void combine(BulkOp op, char* to, const char* from, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    T a, b;
    memcpy(&a, to + i * sizeof(T), sizeof(T));
    memcpy(&b, from + i * sizeof(T), sizeof(T));
    switch (op) {
      case BulkOp::Add:
        if constexpr (std::is_floating_point<T>::value) a += b;
        else a = T(uint64_t(a) + uint64_t(b));
        break;
      case BulkOp::Min: a = b < a ? b : a; break;
      case BulkOp::Max: a = a < b ? b : a; break;
      default:
        if constexpr (!std::is_floating_point<T>::value) {
          if (op == BulkOp::Inc) a = a >= b ? T(0) : T(a + 1);
          if (op == BulkOp::Dec) a = a == 0 || a > b ? b : T(a - 1);
          if (op == BulkOp::And) a &= b;
          if (op == BulkOp::Or) a |= b;
          if (op == BulkOp::Xor) a ^= b;
        }
    }
    memcpy(to + i * sizeof(T), &a, sizeof(T));
  }
}

static void combine_halves(BulkOp op, bool brain, char* to, const char* from, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    uint16_t a, b;
    memcpy(&a, to + 2 * i, 2);
    memcpy(&b, from + 2 * i, 2);
    const float x = brain ? bfloat16_value(a) : half_value(a), y = brain ? bfloat16_value(b) : half_value(b);
    const float z = op == BulkOp::Add ? x + y : op == BulkOp::Min ? std::fmin(x, y) : std::fmax(x, y);
    a = brain ? bfloat16_bits(z) : half_bits(z);
    memcpy(to + 2 * i, &a, 2);
  }
}

static void combine_elements(const TensorMap& m, BulkOp op, char* to, const char* from, unsigned count) {
  switch (m.type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT32: return combine<uint32_t>(op, to, from, count);
    case CU_TENSOR_MAP_DATA_TYPE_INT32: return combine<int32_t>(op, to, from, count);
    case CU_TENSOR_MAP_DATA_TYPE_UINT64: return combine<uint64_t>(op, to, from, count);
    case CU_TENSOR_MAP_DATA_TYPE_INT64: return combine<int64_t>(op, to, from, count);
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: return combine_halves(op, false, to, from, count);
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return combine_halves(op, true, to, from, count);
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return combine<double>(op, to, from, count);
    default: return combine<float>(op, to, from, count);
  }
}

void write_box(const Box& b, BulkOp op, const std::vector<char>& data) {
  const unsigned item = b.map.item;
  each_row(b, [&](uint32_t place, char* to, unsigned first, unsigned end) {
    const char* from = data.data() + place + first * item;
    if (op == BulkOp::Copy)
      memcpy(to + first * item, from, (end - first) * item);
    else
      combine_elements(b.map, op, to + first * item, from, end - first);
  });
}

}  // namespace emu
