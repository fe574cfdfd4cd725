// The ragged batch and the paged cache as plain data; framework/batch.h checks them.
#pragma once

#include <cstdint>

namespace hybridge {

// The sequences of a batch. Tokens are packed: sequence b owns tokens [query_start[b],
// query_start[b + 1]); context_len[b] tokens of it were cached before this call, so that token t
// has position context_len[b] + t - query_start[b]. Tokens from query_start[sequences] on are
// padding.
struct Batch {
  int64_t sequences = 0;
  int64_t tokens = 0;  // T, padding included
  const int32_t* query_start = nullptr;
  const int32_t* context_len = nullptr;

  int64_t first_token(int64_t b) const { return query_start[b]; }
  int64_t query_tokens(int64_t b) const { return int64_t{query_start[b + 1]} - query_start[b]; }
  // Tokens of the sequence including this call's.
  int64_t length(int64_t b) const { return int64_t{context_len[b]} + query_tokens(b); }
  int64_t used_tokens() const { return query_start[sequences]; }
};

// A paged cache [blocks, block, 1, row] read through a block table [B, table_width].
struct PagedCache {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t blocks = 0;
  int64_t block = 0;  // rows in a block
  int64_t row = 0;    // elements in a row
  const int32_t* table = nullptr;
  int64_t table_width = 0;

  // Index of the row that holds `position` of sequence b; multiply by `row` for elements.
  // In 32 bits, where it fits, because a 64-bit division takes twice as long.
  int64_t row_index(int64_t b, int32_t position) const {
    const uint32_t column = static_cast<uint32_t>(position) / static_cast<uint32_t>(block);
    const uint32_t offset = static_cast<uint32_t>(position) % static_cast<uint32_t>(block);
    return int64_t{table[b * table_width + column]} * block + offset;
  }
};

// Pointers to the rows of positions [begin, begin + count) of sequence b.
template <class Element>
static inline void row_pointers(const PagedCache& cache, int64_t b, int64_t begin, int64_t count,
                                const Element** rows) {
  const Element* data = static_cast<const Element*>(cache.data);
  int64_t column = begin / cache.block;
  int64_t offset = begin % cache.block;
  for (int64_t i = 0; i < count; ++column, offset = 0) {
    const int64_t id = cache.table[b * cache.table_width + column];
    for (; offset < cache.block && i < count; ++offset, ++i) {
      rows[i] = data + (id * cache.block + offset) * cache.row;
    }
  }
}

}  // namespace hybridge
