// Runs recorded calls of the kernel library again, without onnxruntime and
// Python, so that every instruction of the process is instrumented by the
// sanitizer that it is built with. sanitize.sh records the calls that the tests
// make (harness.py) and builds and starts this.
//
// usage: replay LIBRARY RECORDING
//
// Each call runs on one thread and on four, from its own copies of the inputs,
// each in a block of memory of exactly its size. Both must give the same bits,
// leave inputs that no output aliases unchanged, and fail if and only if the
// recorded call failed, with an error that names an input or attribute and the
// remedy. Whatever ends the process says which call of the recording it was in.
#include <dlfcn.h>
#include <sanitizer/common_interface_defs.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi/onnxruntime_abi.h"

namespace hybridge::abi {

// What the library only passes around in pointers; here we are who defines it.
struct Status {
  std::string message;
};
struct TensorInfo {
  ElementType element;
  std::vector<int64_t> dims;
};
struct Value {
  TensorInfo info;
  void* data = nullptr;
};
struct KernelInfo {
  std::map<std::string, float> floats;
  std::map<std::string, int64_t> ints;
  std::map<std::string, std::string> strings;
};
struct CustomOpDomain {
  std::vector<const CustomOp*> ops;
};

}  // namespace hybridge::abi

// What ends UBSan's reports must pass through ASan, which calls say_where: each has a runtime of
// its own.
//
// Where a thread's block of variables begins 16 bytes into a page, the interceptor mistakes what
// stands before it for a header of glibc 2.19, and LeakSanitizer follows that and crashes.
extern "C" const char* __asan_default_options() {
  return "handle_abort=1:detect_stack_use_after_return=1:intercept_tls_get_addr=0";
}
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
extern "C" const char* __tsan_default_options() { return "halt_on_error=1"; }

namespace {

namespace abi = hybridge::abi;

// The call that is running, for reports.
struct Running {
  int64_t number = -1;
  std::string name;
} running;

void say_where() {
  if (running.number < 0) return;
  std::fprintf(stderr, "replay: in call %lld: %s\n", static_cast<long long>(running.number),
               running.name.c_str());
}

[[noreturn]] void fail(const std::string& what) {
  say_where();
  std::fprintf(stderr, "replay: %s\n", what.c_str());
  std::_Exit(1);
}

size_t element_bytes(abi::ElementType element) {
  switch (element) {
    case abi::kUint8:
    case abi::kInt8:
      return 1;
    case abi::kBfloat16:
      return 2;
    case abi::kInt64:
      return 8;
    default:
      return 4;
  }
}

// Threads that run the indices of one loop at a time.
class Pool {
 public:
  explicit Pool(int helpers) {
    for (int i = 0; i < helpers; ++i) threads_.emplace_back([this] { serve(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(size_t count, const std::function<void(size_t)>& body) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      count_ = count;
      next_ = 0;
      busy_ = threads_.size();
      ++round_;
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void work() {
    for (size_t index = next_++; index < count_; index = next_++) (*body_)(index);
  }
  void serve() {
    size_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      lock.unlock();
      work();
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(size_t)>* body_ = nullptr;
  std::atomic<size_t> next_{0};
  size_t count_ = 0, busy_ = 0, round_ = 0;
  bool stop_ = false;
};

}  // namespace

namespace hybridge::abi {

struct KernelContext {
  std::vector<Value*> inputs;                   // nullptr: left out
  std::vector<std::unique_ptr<Value>> outputs;  // what the kernel asked for
  std::vector<int> aliases;  // the input that an output shares memory with, or -1
  std::vector<ElementType> output_types;
  Pool* pool;
};

}  // namespace hybridge::abi

namespace {

// ---- The entries of onnxruntime's table that the library uses
// ------------------------------------

struct Runtime {
  const void* table[512] = {};
  abi::CustomOpDomain* domain = nullptr;
  unsigned char outputs = 0;  // made so far
} runtime;

const abi::Api* api() { return reinterpret_cast<const abi::Api*>(runtime.table); }

template <class Entry, class Function>
void provide(const Entry& entry, Function* function) {
  static_assert(std::is_same_v<decltype(entry(nullptr)), Function*>);
  runtime.table[Entry::index] = reinterpret_cast<const void*>(function);
}

template <class Value>
abi::Status* find(const std::map<std::string, Value>& values, const char* name, Value* out) {
  const auto at = values.find(name);
  if (at == values.end()) return new abi::Status{"no such attribute"};
  *out = at->second;
  return nullptr;
}

// The runtime's own refusal, which no kernel can see coming.
constexpr size_t kMostOutputBytes = size_t{1} << 30;
constexpr const char* kTooLarge = "the output is too large";

abi::Status* make_output(abi::KernelContext* context, size_t index, const int64_t* dims,
                         size_t rank, abi::Value** out) {
  std::unique_ptr<abi::Value>& value = context->outputs.at(index);
  if (value == nullptr) {
    value = std::make_unique<abi::Value>();
    value->info = {context->output_types[index], {dims, dims + rank}};
    size_t bytes = element_bytes(value->info.element);
    bool overflow = false;
    for (int64_t dim : value->info.dims) {
      overflow |= __builtin_mul_overflow(bytes, static_cast<size_t>(dim), &bytes);
    }
    if (overflow || bytes > kMostOutputBytes) return new abi::Status{kTooLarge};
    const int input = context->aliases[index];
    if (input >= 0) {
      value->data = context->inputs[static_cast<size_t>(input)]->data;
    } else if (bytes > 0) {
      value->data = std::malloc(bytes);
      // What the kernel leaves unwritten differs from run to run.
      if (value->data != nullptr) std::memset(value->data, ++runtime.outputs, bytes);
    }
    if (bytes > 0 && value->data == nullptr) return new abi::Status{"out of memory"};
  }
  *out = value.get();
  return nullptr;
}

void fill_table() {
  using namespace abi;
  provide(create_status, +[](ErrorCode, const char* text) { return new Status{text}; });
  provide(get_error_message, +[](const Status* status) { return status->message.c_str(); });
  provide(release_status, +[](Status* status) { delete status; });
  provide(
      create_custom_op_domain, +[](const char*, CustomOpDomain** out) -> Status* {
        *out = runtime.domain = new CustomOpDomain;
        return nullptr;
      });
  provide(
      custom_op_domain_add, +[](CustomOpDomain* domain, const CustomOp* op) -> Status* {
        domain->ops.push_back(op);
        return nullptr;
      });
  provide(
      add_custom_op_domain, +[](SessionOptions*, CustomOpDomain*) -> Status* { return nullptr; });
  provide(release_custom_op_domain, +[](CustomOpDomain* domain) { delete domain; });
  provide(
      get_tensor_mutable_data, +[](Value* value, void** out) -> Status* {
        *out = value->data;
        return nullptr;
      });
  provide(
      get_tensor_type_and_shape, +[](const Value* value, TensorInfo** out) -> Status* {
        *out = new TensorInfo(value->info);
        return nullptr;
      });
  provide(release_tensor_info, +[](TensorInfo* info) { delete info; });
  provide(
      get_tensor_element_type, +[](const TensorInfo* info, ElementType* out) -> Status* {
        *out = info->element;
        return nullptr;
      });
  provide(
      get_dimensions_count, +[](const TensorInfo* info, size_t* out) -> Status* {
        *out = info->dims.size();
        return nullptr;
      });
  provide(
      get_dimensions, +[](const TensorInfo* info, int64_t* out, size_t count) -> Status* {
        std::copy_n(info->dims.begin(), count, out);
        return nullptr;
      });
  provide(
      get_attribute_float, +[](const KernelInfo* info, const char* name, float* out) {
        return find(info->floats, name, out);
      });
  provide(
      get_attribute_int, +[](const KernelInfo* info, const char* name, int64_t* out) {
        return find(info->ints, name, out);
      });
  provide(
      get_attribute_string,
      +[](const KernelInfo* info, const char* name, char* out, size_t* size) -> Status* {
        std::string value;
        if (Status* status = find(info->strings, name, &value)) return status;
        const size_t room = *size;
        *size = value.size() + 1;
        if (out != nullptr && room >= *size) std::memcpy(out, value.c_str(), *size);
        return nullptr;
      });
  provide(
      get_input_count, +[](const KernelContext* context, size_t* out) -> Status* {
        *out = context->inputs.size();
        return nullptr;
      });
  provide(
      get_input, +[](const KernelContext* context, size_t index, const Value** out) -> Status* {
        *out = context->inputs[index];
        return nullptr;
      });
  provide(get_output, make_output);
  provide(
      parallel_for,
      +[](const KernelContext* context, void (*body)(void*, size_t), size_t total, size_t,
          void* data) -> Status* {
        context->pool->run(total, [&](size_t index) { body(data, index); });
        return nullptr;
      });
}

// ---- The recording (recording.py writes it)
// ----------------------------------------------------------

enum class Outcome : int64_t { kReturns = 0, kRefused = 1, kEither = 2 };

struct Recorded {
  abi::TensorInfo info;
  bool present;
  std::vector<char> bytes;
};

struct Call {
  std::string level, op;
  abi::KernelInfo attributes;
  std::vector<Recorded> inputs;
  std::vector<int> aliases;
  std::vector<abi::ElementType> output_types;
  Outcome outcome;
};

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    if (file_ == nullptr) fail(std::string("cannot open ") + path);
  }
  ~Reader() { std::fclose(file_); }

  bool next(Call& call) {
    const int first = std::fgetc(file_);
    if (first == EOF) return false;
    std::ungetc(first, file_);
    call = Call();
    call.level = text();
    call.op = text();
    for (int64_t left = number(); left > 0; --left) attribute(call.attributes);
    for (int64_t left = number(); left > 0; --left) call.inputs.push_back(tensor());
    for (int64_t left = number(); left > 0; --left) {
      call.aliases.push_back(static_cast<int>(number()));
      call.output_types.push_back(static_cast<abi::ElementType>(number()));
    }
    call.outcome = static_cast<Outcome>(number());
    return true;
  }

 private:
  void bytes(void* to, size_t count) {
    if (std::fread(to, 1, count, file_) != count) fail("the recording is cut short");
  }
  int64_t number() {
    int64_t value;
    bytes(&value, sizeof(value));
    return value;
  }
  std::string text() {
    std::string value(static_cast<size_t>(number()), '\0');
    bytes(value.data(), value.size());
    return value;
  }
  void attribute(abi::KernelInfo& attributes) {
    const std::string name = text(), kind = text();
    if (kind == "int") {
      attributes.ints[name] = number();
    } else if (kind == "float") {
      bytes(&attributes.floats[name], sizeof(float));
    } else {
      attributes.strings[name] = text();
    }
  }
  Recorded tensor() {
    Recorded out;
    out.present = number() != 0;
    if (!out.present) return out;
    out.info.element = static_cast<abi::ElementType>(number());
    for (int64_t left = number(); left > 0; --left) out.info.dims.push_back(number());
    out.bytes.resize(static_cast<size_t>(number()));
    bytes(out.bytes.data(), out.bytes.size());
    return out;
  }

  FILE* file_;
};

// ---- One call
// ----------------------------------------------------------------------------------

struct Result {
  std::string error;                        // empty: none
  std::vector<std::vector<char>> contents;  // inputs, then outputs
};

// The operator for these types. onnxruntime itself turns away types that no operator has; here the
// kernel must.
const abi::CustomOp* find_op(const Call& call) {
  const abi::CustomOp* named = nullptr;
  for (const abi::CustomOp* op : runtime.domain->ops) {
    if (call.op != op->get_name(op)) continue;
    named = op;
    bool fits = true;
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const abi::ElementType type = op->get_input_type(op, i);
      fits = fits && (!call.inputs[i].present || type == abi::kUndefined ||
                      type == call.inputs[i].info.element);
    }
    if (fits) return op;
  }
  if (named == nullptr) fail("the library has no operator " + call.op);
  return named;
}

std::string take(abi::Status* status) {
  if (status == nullptr) return "";
  const std::string message = status->message;
  delete status;
  return message;
}

std::vector<char> contents_of(const abi::Value& value) {
  if (value.data == nullptr) return {};
  size_t bytes = element_bytes(value.info.element);
  for (int64_t dim : value.info.dims) bytes *= static_cast<size_t>(dim);
  const char* data = static_cast<const char*>(value.data);
  return {data, data + bytes};
}

Result run(const Call& call, Pool& pool) {
  const abi::CustomOp* op = find_op(call);
  Result result;
  void* kernel = nullptr;
  result.error = take(op->create_kernel_v2(op, api(), &call.attributes, &kernel));
  if (kernel == nullptr) return result;

  std::vector<std::unique_ptr<abi::Value>> values;
  abi::KernelContext context;
  context.pool = &pool;
  context.aliases = call.aliases;
  context.output_types = call.output_types;
  context.outputs.resize(call.aliases.size());
  for (const Recorded& input : call.inputs) {
    values.push_back(std::make_unique<abi::Value>());
    abi::Value& value = *values.back();
    value = {input.info, input.bytes.empty() ? nullptr : std::malloc(input.bytes.size())};
    if (value.data != nullptr) std::memcpy(value.data, input.bytes.data(), input.bytes.size());
    context.inputs.push_back(input.present ? &value : nullptr);
  }
  result.error = take(op->kernel_compute_v2(kernel, &context));
  op->kernel_destroy(kernel);

  for (const auto& value : values) result.contents.push_back(contents_of(*value));
  for (size_t i = 0; i < context.outputs.size(); ++i) {
    if (context.outputs[i] == nullptr || call.aliases[i] >= 0) continue;
    result.contents.push_back(contents_of(*context.outputs[i]));
    std::free(context.outputs[i]->data);
  }
  for (const auto& value : values) std::free(value->data);
  return result;
}

// Whether an error names the operator, an input or attribute, and a remedy, or is the runtime's.
bool is_named(const std::string& error, const std::string& op) {
  if (error.find(kTooLarge) != std::string::npos) return true;
  const std::string start = "hybridge." + op + ": ";
  if (error.compare(0, start.size(), start) != 0) return false;
  const std::string subject = error.substr(start.size());
  return (subject.rfind("input ", 0) == 0 || subject.rfind("attribute ", 0) == 0) &&
         subject.find("; remedy: ") != std::string::npos;
}

void check(const Call& call, const Result& one, const Result& four) {
  const bool failed = !one.error.empty();
  if (call.outcome != Outcome::kEither && failed != (call.outcome == Outcome::kRefused)) {
    fail(failed ? "it must return, but: " + one.error : "it must be refused, but returned");
  }
  if (failed && !is_named(one.error, call.op)) fail("the error does not say where: " + one.error);
  if (failed == four.error.empty()) fail("it fails on some numbers of threads");
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    bool aliased = false;
    for (int input : call.aliases) aliased = aliased || input == static_cast<int>(i);
    const bool written = i < one.contents.size() && one.contents[i] != call.inputs[i].bytes;
    if (written && (failed || !aliased)) fail("it wrote into an input");
  }
  if (!failed && one.contents != four.contents) fail("it depends on the number of threads");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) fail("usage: replay LIBRARY RECORDING");
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) fail(dlerror());
  using Register = abi::Status*(abi::SessionOptions*, const abi::ApiBase*);
  auto* register_ops = reinterpret_cast<Register*>(dlsym(library, "RegisterCustomOps"));
  if (register_ops == nullptr) fail("the library registers no operators");
  fill_table();
  const abi::ApiBase base{+[](uint32_t) { return api(); }, nullptr};
  if (abi::Status* status = register_ops(nullptr, &base)) fail(status->message);

  __sanitizer_set_death_callback(say_where);
  Pool one(0), four(3);
  Reader reader(arguments[2]);
  Call call;
  std::map<std::string, int> calls;
  while (reader.next(call)) {
    running.name = call.op + " at level " + call.level;
    ++running.number;
    setenv("HYBRIDGE_KERNEL_LEVEL", call.level.c_str(), 1);
    const Result serial = run(call, one);
    check(call, serial, run(call, four));
    ++calls[call.op];
  }
  running.number = -1;
  if (calls.size() == 0) fail("the recording is empty");
  for (const auto& [op, number] : calls) std::printf("%6d  %s\n", number, op.c_str());
  delete runtime.domain;
  return 0;
}
