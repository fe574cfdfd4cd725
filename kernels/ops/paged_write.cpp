// PagedWrite(cache, rows, slot_mapping) -> cache: row t of `rows` becomes row slot_mapping[t] of
// the cache, its first two dimensions flattened; -1 writes nothing.
#include "framework/batch.h"
#include "framework/op.h"
#include "math/write_rows.h"

namespace hybridge {
namespace {

class PagedWrite : public Kernel {
 public:
  explicit PagedWrite(const Attributes&) {}

  void compute(Context& context) const override {
    const Tensor cache = context.input(0);
    const Tensor rows = context.input(1);
    const Tensor slot_mapping = context.input(2);
    if (cache.rank() < 2) cache.expect_rank(3, "[blocks, block, ...]");
    rows.expect_rank(cache.rank() - 1, "[T, ...], the dimensions of a cache row after T");
    for (size_t axis = 2; axis < cache.rank(); ++axis) {
      rows.expect_dim(axis - 1, cache.dim(axis), "dimension of a cache row");
    }
    slot_mapping.expect_rank(1, "[T]").expect_dim(0, rows.dim(0), "tokens in rows");
    check_slots(slot_mapping, cache.dim(0) * cache.dim(1), "cache rows");

    const Tensor out = context.in_place(cache, 0);
    run_({out.raw(), out.is_bf16(), rows.raw(), rows.is_bf16(), slot_mapping.i32(), rows.dim(0),
          rows.elements_from(1)},
         context.parallel());
  }

 private:
  plain::write_rows_signature* run_ = select_write_rows();
};

const OpRegistration registration({
    "PagedWrite",
    {{"cache", {DType::f32, DType::bf16}},
     {"rows", {DType::f32, DType::bf16}},
     {"slot_mapping", {DType::i32}}},
    {{"cache", DType::f32, 0}},
    alias<0, 0>,
    make_kernel<PagedWrite>,
});

}  // namespace
}  // namespace hybridge
