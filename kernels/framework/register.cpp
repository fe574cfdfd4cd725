// The library's entry point: describes every operator to onnxruntime.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "abi/onnxruntime_abi.h"
#include "framework/op.h"
#include "math/levels.h"

#define HYBRIDGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace hybridge {
namespace {

constexpr const char* kDomain = "hybridge";

std::vector<OpDescription>& descriptions() {
  static std::vector<OpDescription> all;
  return all;
}

// The same each time; sessions may be made in several threads.
std::atomic<const abi::Api*> g_api{nullptr};

// What onnxruntime holds: the C structure first, so that a pointer to it is a pointer to this.
//
// An operator whose output takes the element type of an input is registered once for each type
// that the input allows. Other inputs with several types are registered as "any" and checked at
// each call, which keeps the number of variants down.
struct RegisteredOp {
  abi::CustomOp c{};
  const OpDescription* description = nullptr;
  int typed_input = -1;
  DType typed_as = DType::f32;

  static const RegisteredOp& of(const abi::CustomOp* op) {
    return *reinterpret_cast<const RegisteredOp*>(op);
  }
};

struct LiveKernel {
  const OpDescription* description;
  std::unique_ptr<Kernel> kernel;
};

// Runs body and turns whatever it throws into a status; no exception may cross into onnxruntime.
template <class Body>
abi::Status* guarded(const char* op, const Body& body) {
  std::string message;
  abi::ErrorCode code = abi::kFail;
  try {
    body();
    return nullptr;
  } catch (const OpError& error) {
    message = error.what();
    code = abi::kInvalidArgument;
  } catch (const std::bad_alloc&) {
    message = "no memory for its working buffers; remedy: fewer tokens a call, or free memory";
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "unknown failure";
  }
  return abi::create_status(g_api)(code, text("hybridge.", op, ": ", message).c_str());
}

abi::Status* create_kernel(const abi::CustomOp* op, const abi::Api* api,
                           const abi::KernelInfo* info, void** kernel) {
  const OpDescription& description = *RegisteredOp::of(op).description;
  return guarded(description.name, [&] {
    auto live = std::make_unique<LiveKernel>();
    live->description = &description;
    live->kernel = description.create(Attributes(api, info));
    *kernel = live.release();
  });
}

abi::Status* compute(void* kernel, abi::KernelContext* raw) {
  const LiveKernel& live = *static_cast<const LiveKernel*>(kernel);
  return guarded(live.description->name, [&] {
    Context context(g_api, raw, *live.description);
    live.kernel->compute(context);
  });
}

abi::ElementType input_type(const abi::CustomOp* op, size_t index) {
  const RegisteredOp& self = RegisteredOp::of(op);
  const std::vector<DType>& allowed = self.description->inputs[index].dtypes;
  if (static_cast<int>(index) == self.typed_input) {
    return static_cast<abi::ElementType>(self.typed_as);
  }
  return allowed.size() == 1 ? static_cast<abi::ElementType>(allowed[0]) : abi::kUndefined;
}

abi::ElementType output_type(const abi::CustomOp* op, size_t index) {
  const RegisteredOp& self = RegisteredOp::of(op);
  const OutputDescription& output = self.description->outputs[index];
  if (output.same_as_input >= 0) {
    return input_type(op, static_cast<size_t>(output.same_as_input));
  }
  return static_cast<abi::ElementType>(output.dtype);
}

void release_alias(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

RegisteredOp make_registered(const OpDescription& description, int typed_input, DType typed_as) {
  RegisteredOp op;
  op.description = &description;
  op.typed_input = typed_input;
  op.typed_as = typed_as;
  abi::CustomOp& c = op.c;
  c.version = abi::kApiVersion;
  c.get_name = [](const abi::CustomOp* self) { return RegisteredOp::of(self).description->name; };
  c.get_execution_provider_type = [](const abi::CustomOp*) -> const char* { return nullptr; };
  c.get_input_type = input_type;
  c.get_input_type_count = [](const abi::CustomOp* self) {
    return RegisteredOp::of(self).description->inputs.size();
  };
  c.get_output_type = output_type;
  c.get_output_type_count = [](const abi::CustomOp* self) {
    return RegisteredOp::of(self).description->outputs.size();
  };
  c.kernel_destroy = [](void* kernel) { delete static_cast<LiveKernel*>(kernel); };
  c.get_input_characteristic = [](const abi::CustomOp* self, size_t index) {
    const bool optional = RegisteredOp::of(self).description->inputs[index].optional;
    return optional ? abi::kOptional : abi::kRequired;
  };
  c.get_output_characteristic = [](const abi::CustomOp*, size_t) { return abi::kRequired; };
  c.get_input_memory_type = [](const abi::CustomOp*, size_t) { return 0; };
  const auto one = [](const abi::CustomOp*) { return 1; };
  c.get_variadic_input_min_arity = one;
  c.get_variadic_input_homogeneity = one;
  c.get_variadic_output_min_arity = one;
  c.get_variadic_output_homogeneity = one;
  c.create_kernel_v2 = create_kernel;
  c.kernel_compute_v2 = compute;
  c.get_start_version = one;
  c.get_end_version = [](const abi::CustomOp*) { return 1; };
  if (description.alias_map != nullptr) {
    c.get_alias_map = description.alias_map;
    c.release_alias_map = release_alias;
  }
  const AliasMap reuse = description.alias_map ? description.alias_map : description.may_reuse;
  if (reuse != nullptr) {
    c.get_may_inplace = reuse;
    c.release_may_inplace = release_alias;
  }
  return op;
}

int type_deciding_input(const OpDescription& description) {
  for (const OutputDescription& output : description.outputs) {
    const int input = output.same_as_input;
    if (input >= 0 && description.inputs[static_cast<size_t>(input)].dtypes.size() > 1) {
      return input;
    }
  }
  return -1;
}

// Built once; onnxruntime keeps pointers into it for the life of the process.
const std::vector<RegisteredOp>& registered_ops() {
  static const std::vector<RegisteredOp> all = [] {
    std::vector<OpDescription>& ops = descriptions();
    std::sort(ops.begin(), ops.end(), [](const OpDescription& a, const OpDescription& b) {
      return std::strcmp(a.name, b.name) < 0;
    });
    std::vector<RegisteredOp> out;
    for (const OpDescription& op : ops) {
      const int typed = type_deciding_input(op);
      if (typed < 0) {
        out.push_back(make_registered(op, -1, DType::f32));
        continue;
      }
      for (DType dtype : op.inputs[static_cast<size_t>(typed)].dtypes) {
        out.push_back(make_registered(op, typed, dtype));
      }
    }
    return out;
  }();
  return all;
}

}  // namespace

OpRegistration::OpRegistration(OpDescription description) {
  descriptions().push_back(std::move(description));
}

}  // namespace hybridge

HYBRIDGE_EXPORT hybridge::abi::Status* RegisterCustomOps(hybridge::abi::SessionOptions* options,
                                                         const hybridge::abi::ApiBase* base) {
  namespace abi = hybridge::abi;
  const abi::Api* api = base->get_api(abi::kApiVersion);
  if (api == nullptr) return nullptr;  // older than the interface: no way to report, no op to find
  hybridge::g_api = api;
  abi::CustomOpDomain* domain = nullptr;
  if (abi::Status* status = abi::create_custom_op_domain(api)(hybridge::kDomain, &domain)) {
    return status;
  }
  for (const hybridge::RegisteredOp& op : hybridge::registered_ops()) {
    if (abi::Status* status = abi::custom_op_domain_add(api)(domain, &op.c)) return status;
  }
  return abi::add_custom_op_domain(api)(options, domain);
}

// The instruction-set level that a kernel created now would use: "plain", "avx2", ...
HYBRIDGE_EXPORT const char* hybridge_kernel_level() {
  try {
    return hybridge::level_name(hybridge::active_level());
  } catch (...) {
    return "invalid HYBRIDGE_KERNEL_LEVEL";
  }
}
