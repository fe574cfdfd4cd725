#include "math/write_rows.h"

#include <algorithm>
#include <cstring>

#include "math/lanes.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

// Elements that one task writes at least; less is not worth waking a thread.
constexpr int64_t kTaskElements = 1 << 16;

void convert_row(const float* from, uint16_t* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = bf16_from_float(from[i]);
}

void convert_row(const uint16_t* from, float* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = float_from_bf16(from[i]);
}

template <class T>
void convert_row(const T* from, T* to, int64_t width) {
  std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
}

template <class Row, class Cell>
void write_range(const WriteRowsArgs& args, int64_t begin, int64_t end) {
  const Row* rows = static_cast<const Row*>(args.rows);
  Cell* table = static_cast<Cell*>(args.table);
  for (int64_t i = begin; i < end; ++i) {
    if (args.slots[i] < 0) continue;
    convert_row(rows + i * args.width, table + args.slots[i] * args.width, args.width);
  }
}

void write_any(const WriteRowsArgs& args, int64_t begin, int64_t end) {
  if (args.rows_bf16) {
    if (args.table_bf16) return write_range<uint16_t, uint16_t>(args, begin, end);
    return write_range<uint16_t, float>(args, begin, end);
  }
  if (args.table_bf16) return write_range<float, uint16_t>(args, begin, end);
  return write_range<float, float>(args, begin, end);
}

}  // namespace

void write_rows(const WriteRowsArgs& args, const Parallel& parallel) {
  if (args.width == 0) return;  // an empty table may have no memory, not even to copy nothing to
  const int64_t per_task = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, args.width));
  const int64_t tasks = (args.count + per_task - 1) / per_task;
  parallel_for(parallel, static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * per_task;
    write_any(args, begin, std::min(args.count, begin + per_task));
  });
}

}  // namespace hybridge::HYBRIDGE_ISA
