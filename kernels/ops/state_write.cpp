// StateWrite(state, rows, state_slot) -> state: row b of `rows` becomes slot state_slot[b]; -1
// writes nothing.
#include "framework/batch.h"
#include "framework/op.h"
#include "math/write_rows.h"

namespace hybridge {
namespace {

class StateWrite : public Kernel {
 public:
  explicit StateWrite(const Attributes&) {}

  void compute(Context& context) const override {
    const Tensor state = context.input(0);
    const Tensor rows = context.input(1);
    const Tensor state_slot = context.input(2);
    if (state.rank() < 1) state.expect_rank(2, "[slots, ...]");
    rows.expect_rank(state.rank(), "[B, ...], the dimensions of a slot after B");
    for (size_t axis = 1; axis < state.rank(); ++axis) {
      rows.expect_dim(axis, state.dim(axis), "dimension of a slot");
    }
    state_slot.expect_rank(1, "[B]").expect_dim(0, rows.dim(0), "sequences in rows");
    check_slots(state_slot, state.dim(0), "state slots");

    const Tensor out = context.in_place(state, 0);
    run_({out.raw(), out.is_bf16(), rows.raw(), rows.is_bf16(), state_slot.i32(), rows.dim(0),
          rows.elements_from(1)},
         context.parallel());
  }

 private:
  plain::write_rows_signature* run_ = select_write_rows();
};

const OpRegistration registration({
    "StateWrite",
    {{"state", {DType::f32, DType::bf16}},
     {"rows", {DType::f32, DType::bf16}},
     {"state_slot", {DType::i32}}},
    {{"state", DType::f32, 0}},
    alias<0, 0>,
    make_kernel<StateWrite>,
});

}  // namespace
}  // namespace hybridge
