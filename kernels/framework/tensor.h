// Views of tensors that onnxruntime owns, and the checks every operator makes of them.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "abi/onnxruntime_abi.h"
#include "framework/error.h"

namespace hybridge {

enum class DType : int {
  f32 = abi::kFloat32,
  bf16 = abi::kBfloat16,
  u8 = abi::kUint8,
  i8 = abi::kInt8,
  i32 = abi::kInt32,
  i64 = abi::kInt64,
};

const char* dtype_name(DType dtype);
size_t dtype_size(DType dtype);

// Dimensions of a tensor, at most kMaxRank of them, without a heap allocation.
struct Shape {
  static constexpr size_t kMaxRank = 8;
  size_t rank = 0;
  std::array<int64_t, kMaxRank> dims{};

  Shape() = default;
  Shape(std::initializer_list<int64_t> values);
  int64_t operator[](size_t axis) const { return dims[axis]; }
  int64_t& operator[](size_t axis) { return dims[axis]; }
  int64_t elements() const { return elements_before(rank); }
  // Product of the dimensions before `axis`.
  int64_t elements_before(size_t axis) const;
  std::string str() const;
};

// A view of one input or output. `name` is the one in the operator's description.
class Tensor {
 public:
  Tensor() = default;
  Tensor(const char* name, DType dtype, Shape shape, void* data)
      : name_(name), dtype_(dtype), shape_(shape), data_(data) {}

  const char* name() const { return name_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  size_t rank() const { return shape_.rank; }
  int64_t dim(size_t axis) const { return shape_[axis]; }
  int64_t elements() const { return shape_.elements(); }
  // Product of the dimensions from `axis` on.
  int64_t elements_from(size_t axis) const;
  bool is_bf16() const { return dtype_ == DType::bf16; }
  explicit operator bool() const { return name_ != nullptr; }

  void* raw() const { return data_; }
  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  const float* f32() const { return static_cast<const float*>(data_); }
  // bfloat16 is carried as its 16 bits.
  const uint16_t* bf16() const { return static_cast<const uint16_t*>(data_); }
  const int32_t* i32() const { return static_cast<const int32_t*>(data_); }

  // Each raises OpError naming this input. `meaning` says what the dimension is, e.g. "heads of
  // query".
  const Tensor& expect_rank(size_t rank, const char* layout) const;
  const Tensor& expect_dim(size_t axis, int64_t size, const char* meaning) const;
  [[noreturn]] void fail(const std::string& what, const std::string& remedy) const;

 private:
  const char* name_ = nullptr;
  DType dtype_ = DType::f32;
  Shape shape_;
  void* data_ = nullptr;
};

}  // namespace hybridge
