// Scatter of rows into a table of rows, with conversion between float32 and bfloat16.
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"

namespace hybridge {

struct WriteRowsArgs {
  void* table;  // [slots, width]
  bool table_bf16;
  const void* rows;  // [count, width]
  bool rows_bf16;
  const int32_t* slots;  // [count], checked: -1 or a row of the table, none twice
  int64_t count;
  int64_t width;
};

HYBRIDGE_DECLARE_LEVELS(write_rows, void(const WriteRowsArgs&, const Parallel&))

}  // namespace hybridge
