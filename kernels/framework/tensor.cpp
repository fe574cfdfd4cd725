#include "framework/tensor.h"

namespace hybridge {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::u8:
      return "uint8";
    case DType::i8:
      return "int8";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
  }
  return "an unsupported type";
}

size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::u8:
    case DType::i8:
      return 1;
    case DType::bf16:
      return 2;
    case DType::i64:
      return 8;
    default:
      return 4;
  }
}

Shape::Shape(std::initializer_list<int64_t> values) {
  for (int64_t value : values) dims[rank++] = value;
}

int64_t Shape::elements_before(size_t end) const {
  int64_t count = 1;
  for (size_t axis = 0; axis < end; ++axis) count *= dims[axis];
  return count;
}

std::string Shape::str() const {
  std::string out = "[";
  for (size_t axis = 0; axis < rank; ++axis) {
    if (axis > 0) out += ", ";
    out += std::to_string(dims[axis]);
  }
  return out + "]";
}

int64_t Tensor::elements_from(size_t axis) const {
  int64_t count = 1;
  for (; axis < rank(); ++axis) count *= dim(axis);
  return count;
}

const Tensor& Tensor::expect_rank(size_t rank, const char* layout) const {
  if (shape_.rank != rank) {
    fail(text("shape ", shape_.str(), " has ", shape_.rank, " dimensions, not ", rank),
         text("pass it as ", layout));
  }
  return *this;
}

const Tensor& Tensor::expect_dim(size_t axis, int64_t size, const char* meaning) const {
  if (dim(axis) != size) {
    fail(text("shape ", shape_.str(), " has ", dim(axis), " on axis ", axis, ", not ", size, " (",
              meaning, ")"),
         "make the two inputs agree");
  }
  return *this;
}

void Tensor::fail(const std::string& what, const std::string& remedy) const {
  throw OpError(text("input ", name_), what, remedy);
}

}  // namespace hybridge
