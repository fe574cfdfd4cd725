// How an operator describes itself, and what its kernel gets to work with.
//
// One operator is one file ops/<name>.cpp: a Kernel (attributes are read in its constructor, checks
// and work are in compute) and a description handed to OpRegistration. The CMake file collects
// ops/*.cpp, so nothing else names the operator.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi/onnxruntime_abi.h"
#include "framework/tensor.h"
#include "math/parallel.h"

namespace hybridge {

// The node's attributes, at kernel creation.
class Attributes {
 public:
  Attributes(const abi::Api* api, const abi::KernelInfo* info) : api_(api), info_(info) {}

  // A required attribute; raises OpError if it is absent or of another type.
  float get_float(const char* name) const;
  int64_t get_int(const char* name) const;
  std::string get_string(const char* name) const;
  // Absent is nullopt.
  std::optional<float> find_float(const char* name) const;
  std::optional<int64_t> find_int(const char* name) const;
  std::optional<std::string> find_string(const char* name) const;
  // A required attribute of at least `minimum`.
  int64_t get_int_at_least(const char* name, int64_t minimum) const;
  // A required attribute that is a finite number above zero.
  float get_positive_float(const char* name) const;

 private:
  const abi::Api* api_;
  const abi::KernelInfo* info_;
};

struct OpDescription;

// One call of a kernel.
class Context {
 public:
  Context(const abi::Api* api, abi::KernelContext* context, const OpDescription& op)
      : api_(api), context_(context), op_(op) {}

  // The input at `index`, its element type checked against the description. An optional input that
  // was left out is a Tensor that converts to false.
  Tensor input(size_t index) const;
  // Lets onnxruntime allocate (or bind) the output at `index`.
  Tensor output(size_t index, const Shape& shape) const;
  // The output at `output`, which the alias map ties to `input`: the same memory, or, should
  // onnxruntime have bound another, a copy of the input.
  Tensor in_place(const Tensor& input, size_t output) const;
  // onnxruntime's own thread pool.
  Parallel parallel() const;

 private:
  friend struct PoolAccess;
  const abi::Api* api_;
  abi::KernelContext* context_;
  const OpDescription& op_;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Checks everything, then computes. Raises OpError before it writes anything.
  virtual void compute(Context& context) const = 0;
};

struct InputDescription {
  const char* name;
  std::vector<DType> dtypes;
  bool optional = false;
};

struct OutputDescription {
  const char* name;
  DType dtype = DType::f32;
  // If not negative: the element type is that of this input, whichever it allows.
  int same_as_input = -1;
};

// Which output is the same memory as which input. onnxruntime asks for it through a function that
// gets no argument, hence the template: AliasMap{alias<0, 0>} or alias<9, 1, 10, 2>, in pairs of
// input, output.
using AliasMap = size_t (*)(int** inputs, int** outputs);

template <int... Pairs>
size_t alias(int** inputs, int** outputs) {
  constexpr int pairs[] = {Pairs...};
  constexpr size_t count = sizeof...(Pairs) / 2;
  static_assert(count * 2 == sizeof...(Pairs), "pairs of input, output");
  *inputs = new int[count];
  *outputs = new int[count];
  for (size_t i = 0; i < count; ++i) {
    (*inputs)[i] = pairs[2 * i];
    (*outputs)[i] = pairs[2 * i + 1];
  }
  return count;
}

struct OpDescription {
  const char* name;
  std::vector<InputDescription> inputs;
  std::vector<OutputDescription> outputs;
  AliasMap alias_map;  // nullptr: no output shares memory with an input
  std::unique_ptr<Kernel> (*create)(const Attributes& attributes);
  // Outputs that may take an input's memory where nothing needs that input any more, for kernels
  // that have read what they overwrite. Pairs as in alias_map, which means more.
  AliasMap may_reuse = nullptr;
};

// For OpDescription::create.
template <class K>
std::unique_ptr<Kernel> make_kernel(const Attributes& attributes) {
  return std::make_unique<K>(attributes);
}

// A file-level `static const OpRegistration registration({...});` adds the operator to the library.
struct OpRegistration {
  explicit OpRegistration(OpDescription description);
};

}  // namespace hybridge
