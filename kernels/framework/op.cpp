#include "framework/op.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>

namespace hybridge {
namespace {

// A failure of onnxruntime itself, as an exception.
void check(const abi::Api* api, abi::Status* status, const char* doing) {
  if (status == nullptr) return;
  const std::string message = abi::get_error_message(api)(status);
  abi::release_status(api)(status);
  throw std::runtime_error(text(doing, ": ", message));
}

// True if the status is success; releases it otherwise.
bool succeeded(const abi::Api* api, abi::Status* status) {
  if (status == nullptr) return true;
  abi::release_status(api)(status);
  return false;
}

// Whether every product of dimensions fits in an int64_t with room to spare. An empty tensor may
// have any dimensions beside the zero.
bool counts_fit(const Shape& shape) {
  int64_t product = 1;
  for (size_t axis = 0; axis < shape.rank; ++axis) {
    if (shape[axis] == 0) continue;
    if (__builtin_mul_overflow(product, shape[axis], &product)) return false;
  }
  return product <= int64_t{1} << 62;
}

template <class Value>
Value required(std::optional<Value> value, const char* name) {
  if (!value) {
    throw OpError(text("attribute ", name), "is missing or of another type",
                  "set it on the node, as the operator's description says");
  }
  return *value;
}

}  // namespace

std::optional<float> Attributes::find_float(const char* name) const {
  float value = 0;
  if (!succeeded(api_, abi::get_attribute_float(api_)(info_, name, &value))) return std::nullopt;
  return value;
}

std::optional<int64_t> Attributes::find_int(const char* name) const {
  int64_t value = 0;
  if (!succeeded(api_, abi::get_attribute_int(api_)(info_, name, &value))) return std::nullopt;
  return value;
}

std::optional<std::string> Attributes::find_string(const char* name) const {
  size_t size = 0;
  // The first call reports the size, by success or by an error according to the version.
  succeeded(api_, abi::get_attribute_string(api_)(info_, name, nullptr, &size));
  if (size == 0) return std::nullopt;
  std::string value(size, '\0');
  if (!succeeded(api_, abi::get_attribute_string(api_)(info_, name, value.data(), &size))) {
    return std::nullopt;
  }
  value.resize(std::strlen(value.c_str()));
  return value;
}

float Attributes::get_float(const char* name) const { return required(find_float(name), name); }

int64_t Attributes::get_int(const char* name) const { return required(find_int(name), name); }

std::string Attributes::get_string(const char* name) const {
  return required(find_string(name), name);
}

int64_t Attributes::get_int_at_least(const char* name, int64_t minimum) const {
  const int64_t value = get_int(name);
  if (value < minimum) {
    throw OpError(text("attribute ", name), text(value, " is below ", minimum),
                  "give a larger value");
  }
  return value;
}

float Attributes::get_positive_float(const char* name) const {
  const float value = get_float(name);
  if (!(value > 0) || !std::isfinite(value)) {
    throw OpError(text("attribute ", name), text(value, " is not a finite number above zero"),
                  "give a positive value");
  }
  return value;
}

Tensor Context::input(size_t index) const {
  const InputDescription& description = op_.inputs[index];
  size_t count = 0;
  check(api_, abi::get_input_count(api_)(context_, &count), "reading the input count");
  const abi::Value* value = nullptr;
  if (index < count) {
    check(api_, abi::get_input(api_)(context_, index, &value), description.name);
  }
  if (value == nullptr) {
    if (description.optional) return Tensor();
    throw OpError(text("input ", description.name), "is missing", "connect it");
  }

  abi::TensorInfo* info = nullptr;
  check(api_, abi::get_tensor_type_and_shape(api_)(value, &info), description.name);
  Shape shape;
  abi::ElementType element = abi::kUndefined;
  abi::Status* status = abi::get_dimensions_count(api_)(info, &shape.rank);
  const size_t rank = shape.rank;
  const bool fits = rank <= Shape::kMaxRank;
  if (status == nullptr && fits) status = abi::get_dimensions(api_)(info, shape.dims.data(), rank);
  if (status == nullptr) status = abi::get_tensor_element_type(api_)(info, &element);
  abi::release_tensor_info(api_)(info);
  check(api_, status, description.name);
  if (!fits) {
    throw OpError(text("input ", description.name), text("has ", rank, " dimensions"),
                  "pass at most 8");
  }
  if (!counts_fit(shape)) {
    throw OpError(text("input ", description.name),
                  text("the sizes in shape ", shape.str(), " multiply to more than 2^62"),
                  "pass the shape of a tensor that memory can hold");
  }

  const DType dtype = static_cast<DType>(element);
  if (std::find(description.dtypes.begin(), description.dtypes.end(), dtype) ==
      description.dtypes.end()) {
    std::string allowed;
    for (DType one : description.dtypes) {
      allowed += (allowed.empty() ? "" : " or ") + std::string(dtype_name(one));
    }
    throw OpError(text("input ", description.name),
                  text("has element type ", dtype_name(dtype), " (", element, ")"),
                  text("pass ", allowed));
  }
  void* data = nullptr;
  check(api_, abi::get_tensor_mutable_data(api_)(const_cast<abi::Value*>(value), &data),
        description.name);
  return Tensor(description.name, dtype, shape, data);
}

Tensor Context::output(size_t index, const Shape& shape) const {
  const OutputDescription& description = op_.outputs[index];
  abi::Value* value = nullptr;
  check(api_, abi::get_output(api_)(context_, index, shape.dims.data(), shape.rank, &value),
        description.name);
  void* data = nullptr;
  check(api_, abi::get_tensor_mutable_data(api_)(value, &data), description.name);
  const DType dtype = description.same_as_input < 0
                          ? description.dtype
                          : input(static_cast<size_t>(description.same_as_input)).dtype();
  return Tensor(description.name, dtype, shape, data);
}

Tensor Context::in_place(const Tensor& input, size_t output_index) const {
  Tensor out = output(output_index, input.shape());
  const size_t bytes = static_cast<size_t>(input.elements()) * dtype_size(input.dtype());
  if (out.raw() != input.raw() && bytes > 0) std::memcpy(out.raw(), input.raw(), bytes);
  return out;
}

// Runs tasks on onnxruntime's pool. An exception of a task (memory ran out) may not cross the
// pool's frames: the first one is kept, and rethrown when all tasks are done.
struct PoolAccess {
  Parallel::Task task;
  void* data;
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  static void guarded(void* self, size_t index) {
    PoolAccess& access = *static_cast<PoolAccess*>(self);
    try {
      access.task(access.data, index);
    } catch (...) {
      if (!access.failed.exchange(true)) access.error = std::current_exception();
    }
  }

  static void run(void* pool, Parallel::Task task, size_t count, void* data) {
    const Context& context = *static_cast<const Context*>(pool);
    PoolAccess access{task, data};
    // As many batches as tasks: the pool then hands out tasks one by one, as threads come free.
    check(context.api_,
          abi::parallel_for(context.api_)(context.context_, guarded, count, count, &access),
          "the parallel loop");
    if (access.error) std::rethrow_exception(access.error);
  }
};

Parallel Context::parallel() const { return Parallel{const_cast<Context*>(this), PoolAccess::run}; }

}  // namespace hybridge
