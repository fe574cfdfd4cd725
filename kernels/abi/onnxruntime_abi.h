// The part of onnxruntime's C interface that the kernels use, declared by us.
//
// The onnxruntime wheels ship no headers, but the C interface is frozen and append-only: OrtApi is
// a table of function pointers whose order never changes, and OrtCustomOp only grows at its end. So
// a declaration of the entries in use is enough, and building needs nothing but a compiler.
// tests/kernels/test_abi.py compares this file with the system's header where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybridge::abi {

// The version whose tables this file describes; any later onnxruntime serves it.
constexpr uint32_t kApiVersion = 21;

struct Status;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct SessionOptions;
struct CustomOpDomain;
struct Api;

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*get_version_string)();
};

enum ErrorCode : int { kOk = 0, kFail = 1, kInvalidArgument = 2 };

// ONNX TensorProto element types.
enum ElementType : int {
  kUndefined = 0,
  kFloat32 = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kBfloat16 = 16,
};

enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

// One registered operator; onnxruntime keeps the pointer and calls through it.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider_type)(const CustomOp*);
  ElementType (*get_input_type)(const CustomOp*, size_t index);
  size_t (*get_input_type_count)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, size_t index);
  size_t (*get_output_type_count)(const CustomOp*);
  void (*kernel_compute)(void* kernel, KernelContext*);
  void (*kernel_destroy)(void* kernel);
  Characteristic (*get_input_characteristic)(const CustomOp*, size_t index);
  Characteristic (*get_output_characteristic)(const CustomOp*, size_t index);
  int (*get_input_memory_type)(const CustomOp*, size_t index);
  int (*get_variadic_input_min_arity)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_min_arity)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*kernel_compute_v2)(void* kernel, KernelContext*);
  Status* (*infer_output_shape)(const CustomOp*, ShapeInferContext*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int** inputs, int** outputs);
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*get_alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};

// An entry of the Api table: its position and its type.
template <size_t Index, class Signature>
struct Entry {
  static constexpr size_t index = Index;
  Signature* operator()(const Api* api) const {
    return reinterpret_cast<Signature*>(reinterpret_cast<void* const*>(api)[Index]);
  }
};

inline constexpr Entry<0, Status*(ErrorCode, const char*)> create_status;
inline constexpr Entry<2, const char*(const Status*)> get_error_message;
inline constexpr Entry<26, Status*(const char*, CustomOpDomain**)> create_custom_op_domain;
inline constexpr Entry<27, Status*(CustomOpDomain*, const CustomOp*)> custom_op_domain_add;
inline constexpr Entry<28, Status*(SessionOptions*, CustomOpDomain*)> add_custom_op_domain;
inline constexpr Entry<51, Status*(Value*, void**)> get_tensor_mutable_data;
inline constexpr Entry<60, Status*(const TensorInfo*, ElementType*)> get_tensor_element_type;
inline constexpr Entry<61, Status*(const TensorInfo*, size_t*)> get_dimensions_count;
inline constexpr Entry<62, Status*(const TensorInfo*, int64_t*, size_t)> get_dimensions;
inline constexpr Entry<65, Status*(const Value*, TensorInfo**)> get_tensor_type_and_shape;
inline constexpr Entry<85, Status*(const KernelInfo*, const char*, float*)> get_attribute_float;
inline constexpr Entry<86, Status*(const KernelInfo*, const char*, int64_t*)> get_attribute_int;
inline constexpr Entry<87, Status*(const KernelInfo*, const char*, char*, size_t*)>
    get_attribute_string;
inline constexpr Entry<88, Status*(const KernelContext*, size_t*)> get_input_count;
inline constexpr Entry<90, Status*(const KernelContext*, size_t, const Value**)> get_input;
inline constexpr Entry<91, Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>
    get_output;
inline constexpr Entry<93, void(Status*)> release_status;
inline constexpr Entry<99, void(TensorInfo*)> release_tensor_info;
inline constexpr Entry<101, void(CustomOpDomain*)> release_custom_op_domain;
inline constexpr Entry<274, Status*(const KernelContext*, void (*)(void*, size_t), size_t total,
                                    size_t batches, void* data)>
    parallel_for;

}  // namespace hybridge::abi
