#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <set>

namespace simgpu {
namespace {

constexpr int64_t GAP = 4096;    // bytes between two ranges of a tensor below which they are one
constexpr uint64_t NUMBERS = 4;  // that a random operator takes from the generator's sequence, whatever it needs

// Launch no kernel, or copy to the host and wait, with torch's own code for both.
const std::set<std::string> NATIVE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::set_",
    "aten::record_stream",
    "aten::_local_scalar_dense",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::is_set_to",
    "aten::_efficientzerotensor",
    "aten::_has_same_storage_numel",
    "aten::set_.source_Storage",
    "aten::set_.source_Tensor",
    "aten::set_.source_Storage_storage_offset",
};

const std::set<std::string> MIXES_DEVICES = {
    "aten::index.Tensor", "aten::index.Tensor_out",     "aten::_index_put_impl_",
    "aten::index_put_",   "aten::_unsafe_index.Tensor", "aten::masked_fill_.Tensor",
};

// Kernels that touch only the rows of `memory` that `index` names, both by position among the arguments: what lies
// between may be a hole. Which rows these are is known when the kernel runs, and no sooner.
struct Rows {
  size_t memory, index;
};
const std::map<std::string, Rows> ROWS = {
    {"aten::index_copy_", {0, 2}},  {"aten::index_select", {0, 2}},     {"aten::index_select.out", {0, 2}},
    {"aten::index.Tensor", {0, 1}}, {"aten::_index_put_impl_", {0, 1}},
};

// What a synchronous call found, for the thread that waits.
struct Answer {
  Stack values;
  std::exception_ptr error;
};

// A queued call: addresses and values only, as a kernel's arguments are.
struct Work {
  const Operator* op;
  Stack arguments;
  std::vector<at::Tensor> outputs;  // of the CPU, over the device's memory
  std::optional<at::PhiloxCudaState> random;
  std::shared_ptr<Answer> answer;
  const Rows* rows = nullptr;
};

uint64_t mixed(uint64_t value) {  // splitmix64's finalizer
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

// The numbers of one call: those of a replayed capture follow what torch writes to the state's addresses.
at::Generator generator_of(const at::PhiloxCudaState& state) {
  const uint64_t seed = state.captured_ ? static_cast<uint64_t>(*state.seed_.ptr) : state.seed_.val;
  const uint64_t offset =
      state.captured_ ? static_cast<uint64_t>(*state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
  return at::make_generator<at::CPUGeneratorImpl>(mixed(mixed(seed) + offset));
}

void compute(const Work& work, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  stack = work.arguments;
  if (work.random) stack[work.op->generator] = generator_of(*work.random);
  work.op->handle.callBoxed(stack);
  if (work.answer) return;
  auto output = work.outputs.begin();
  for (size_t i = 0; i < stack.size(); ++i)
    if (work.op->same[i] < 0) each_tensor(stack[i], [&](const at::Tensor& tensor) { (output++)->copy_(tensor); });
}

// The index of a call that touches rows of a first dimension only; undefined where it does otherwise.
at::Tensor index_of(const Stack& arguments, const Rows& rows) {
  std::vector<at::Tensor> found;
  each_tensor(arguments[rows.index], [&](const at::Tensor& tensor) { found.push_back(tensor); });
  const bool first =
      arguments[rows.index].isTensor() ? arguments[1].toInt() == 0 : arguments[1].toListRef().size() == 1;
  const at::Tensor& memory = arguments[rows.memory].toTensor();
  if (!first || found.size() != 1 || found[0].dim() != 1 || memory.dim() == 0 || !memory[0].is_contiguous()) return {};
  return found[0].scalar_type() == at::kLong || found[0].scalar_type() == at::kInt ? found[0] : at::Tensor();
}

// Is there memory behind each row that the call touches? Says where there is none.
bool rows_are_there(const Work& work) {
  const at::Tensor memory = work.arguments[work.rows->memory].toTensor();
  const at::Tensor index = index_of(work.arguments, *work.rows).to(at::kLong).contiguous();
  const auto base = reinterpret_cast<uint64_t>(memory.data_ptr());
  const int64_t step = memory.stride(0) * static_cast<int64_t>(memory.element_size());
  const size_t row = memory.size(0) ? memory.numel() / memory.size(0) * memory.element_size() : 0;
  if (row == 0) return true;
  for (int64_t i = 0; i < index.numel(); ++i) {
    const int64_t at = index.data_ptr<int64_t>()[i];
    const int64_t from = at < 0 ? at + memory.size(0) : at;
    if (simgpu_pointer(base + static_cast<uint64_t>(from * step), row) != nullptr) continue;
    simgpu_fail(("row " + std::to_string(at) + " lies where there is no memory that a device may use").c_str());
    return false;
  }
  return true;
}

void run(void* context) {
  const Work& work = *static_cast<Work*>(context);
  Stack stack;
  try {
    if (work.rows != nullptr && !rows_are_there(work)) return;
    compute(work, stack);
    if (work.answer) work.answer->values = std::move(stack);
  } catch (const c10::Error& error) {
    if (work.answer) {
      work.answer->error = std::current_exception();
    } else {
      simgpu_fail(error.what_without_backtrace());
    }
  } catch (const std::exception& error) {
    if (work.answer) {
      work.answer->error = std::current_exception();
    } else {
      simgpu_fail(error.what());
    }
  }
}

void drop(void* context) { delete static_cast<Work*>(context); }

int64_t bytes_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

void add_ranges(std::vector<SimRange>& ranges, const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return;
  std::vector<int64_t> order(tensor.dim());
  for (int64_t i = 0; i < tensor.dim(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  int64_t extent = item;
  std::vector<int64_t> starts = {0};
  for (int64_t i : order) {
    const int64_t step = tensor.stride(i) * item, size = tensor.size(i);
    if (starts.size() == 1 && step <= extent + GAP) {
      extent += (size - 1) * step;
      continue;
    }
    const size_t before = starts.size();
    for (int64_t k = 1; k < size; ++k)
      for (size_t s = 0; s < before; ++s) starts.push_back(starts[s] + k * step);
  }
  const auto base = reinterpret_cast<uint64_t>(tensor.data_ptr());
  for (int64_t start : starts)
    ranges.push_back({base + static_cast<uint64_t>(start), static_cast<uint64_t>(extent), write});
}

at::Tensor for_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cpu()) {
    at::Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  at::Tensor made = at::for_blob(tensor.data_ptr(), tensor.sizes())
                        .strides(tensor.strides())
                        .options(tensor.options().device(c10::kCPU).requires_grad(false))
                        .make_tensor();
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

namespace {

bool has_mask(const IValue& value) {
  bool found = false;
  each_tensor(value, [&](const at::Tensor& each) {
    found = found || each.scalar_type() == at::kBool || each.scalar_type() == at::kByte;
  });
  return found;
}

bool is_synchronous(const Operator& op, const Stack& arguments) {
  return op.depends_on_data && (!op.masks || has_mask(arguments[1]));
}

// The device of the call: that of its tensors, which must agree as torch wants it.
c10::Device device_of(const Operator& op, const Stack& arguments) {
  std::optional<c10::Device> device;
  std::optional<at::Tensor> stray;
  for (const IValue& each : arguments) {
    each_tensor(each, [&](const at::Tensor& tensor) {
      if (tensor.is_cpu()) {
        if (tensor.dim() > 0 && !op.mixes_devices) stray = tensor;
        return;
      }
      TORCH_CHECK(!device || *device == tensor.device(),
                  "Expected all tensors to be on the same device, but found at "
                  "least two devices, ",
                  *device, " and ", tensor.device(), "! (simgpu, ", op.name, ")");
      device = tensor.device();
    });
    if (!device && each.isDevice() && each.toDevice().is_cuda() && each.toDevice().has_index())
      device = each.toDevice();
  }
  TORCH_CHECK(!device || !stray, "Expected all tensors to be on the same device, but found at least two devices, ",
              *device, " and cpu! (simgpu, ", op.name, ")");
  return device.value_or(c10::Device(c10::kCUDA, c10::cuda::current_device()));
}

at::Tensor allocated(const Layout& layout, c10::Device device) {
  if (!layout.defined) return {};
  return at::empty_strided(layout.sizes, layout.strides, at::device(device).dtype(layout.type));
}

void launch(std::unique_ptr<Work> work, const std::vector<SimRange>& ranges) {
  const Operator& op = *work->op;
  thread_local const cudaError_t bound = cudaSetDevice(c10::cuda::current_device());  // as a first launch does
  C10_CUDA_CHECK(bound);
  C10_CUDA_CHECK(static_cast<cudaError_t>(simgpu_launch(c10::cuda::getCurrentCUDAStream().stream(), op.name.c_str(),
                                                        run, drop, work.release(), ranges.data(), ranges.size())));
}

// The closure of a call and the memory it uses.
std::unique_ptr<Work> closure(const Operator& op, const Stack& arguments, std::vector<SimRange>& ranges) {
  auto work = std::make_unique<Work>();
  work->op = &op;
  const auto found = ROWS.find(op.name);
  if (found != ROWS.end() && index_of(arguments, found->second).defined()) work->rows = &found->second;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool by_row = work->rows != nullptr && work->rows->memory == i;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cpu() && !by_row) add_ranges(ranges, tensor, op.written[i]);
    });
    work->arguments.push_back(arguments[i].isDevice() ? IValue(c10::Device(c10::kCPU))
                                                      : changed(arguments[i], for_cpu));
  }
  if (op.generator >= 0) {
    const IValue& given = arguments[op.generator];
    auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
        given.isNone() ? std::nullopt : std::optional(given.toGenerator()),
        at::cuda::detail::getDefaultCUDAGenerator());
    std::lock_guard lock(generator->mutex_);
    work->random = generator->philox_cuda_state(NUMBERS);
    if (work->random->captured_) {
      ranges.push_back({reinterpret_cast<uint64_t>(work->random->seed_.ptr), sizeof(int64_t), 0});
      ranges.push_back({reinterpret_cast<uint64_t>(work->random->offset_.ptr), sizeof(int64_t), 0});
    }
  }
  return work;
}

Stack queue(const Operator& op, const Stack& arguments, c10::Device device) {
  const Shapes shapes = shapes_of(op, arguments);
  if (!shapes.resized.empty()) {
    std::vector<at::Tensor> outs;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (op.written[i]) each_tensor(arguments[i], [&](const at::Tensor& tensor) { outs.push_back(tensor); });
    for (const auto& [position, sizes] : shapes.resized) at::native::resize_output(outs[position], sizes);
  }
  std::vector<SimRange> ranges;
  auto work = closure(op, arguments, ranges);
  Stack results;
  const auto output = [&](const Layout& layout) {
    at::Tensor made = allocated(layout, device);
    if (made.defined()) {
      add_ranges(ranges, made, true);
      work->outputs.push_back(for_cpu(made));
    }
    return made;
  };
  for (const Return& each : shapes.returns) {
    if (each.argument >= 0) {
      results.push_back(arguments[each.argument]);
    } else if (each.list) {
      c10::List<at::Tensor> made;
      for (const Layout& layout : each.tensors) made.push_back(output(layout));
      results.emplace_back(made);
    } else if (!each.tensors.empty()) {
      results.emplace_back(output(each.tensors[0]));
    } else {
      results.push_back(each.value);
    }
  }
  launch(std::move(work), ranges);
  return results;
}

Stack wait(const Operator& op, const Stack& arguments, c10::Device device) {
  std::vector<SimRange> ranges;
  auto work = closure(op, arguments, ranges);
  auto answer = work->answer = std::make_shared<Answer>();
  launch(std::move(work), ranges);
  C10_CUDA_CHECK(
      static_cast<cudaError_t>(simgpu_synchronize_for(c10::cuda::getCurrentCUDAStream().stream(), op.name.c_str())));
  if (answer->error) std::rethrow_exception(answer->error);
  Stack results;
  for (size_t i = 0; i < answer->values.size(); ++i) {
    if (op.same[i] < 0) {
      results.push_back(changed(
          answer->values[i], [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(device) : tensor; }));
      continue;
    }
    const at::Tensor& out = arguments[op.same[i]].toTensor();  // of an out= variant, resized by the CPU's kernel
    const at::Tensor& found = answer->values[i].toTensor();
    if (out.sizes() != found.sizes()) {
      at::native::resize_output(out, found.sizes());
      out.copy_(found);
    }
    results.emplace_back(out);
  }
  return results;
}

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& handle) : op_(handle) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) { call(op_, *stack); }

 private:
  const Operator op_;
};

}  // namespace

Operator::Operator(c10::OperatorHandle given) : handle(given), name(c10::toString(given.operator_name())) {
  const c10::FunctionSchema& schema = handle.schema();
  for (const c10::Argument& each : schema.arguments()) {
    written.push_back(each.alias_info() != nullptr && each.alias_info()->isWrite());
    if (written.back() && each.kwarg_only()) out = written.size() - 1;
    if (each.name() == "generator") generator = static_cast<int>(written.size()) - 1;
  }
  bool tensors = schema.returns().empty();
  for (const c10::Argument& each : schema.returns()) {
    same.push_back(-1);
    tensors = tensors || each.type()->str().find("Tensor") != std::string::npos;
    if (each.alias_info() == nullptr) continue;
    for (size_t i = 0; i < written.size(); ++i) {
      const c10::AliasInfo* info = schema.arguments()[i].alias_info();
      if (written[i] && info->beforeSets() == each.alias_info()->beforeSets()) same.back() = static_cast<int>(i);
    }
  }
  masks = name == "aten::index.Tensor" || name == "aten::index.Tensor_out" || name == "aten::_unsafe_index.Tensor";
  depends_on_data = !tensors || handle.hasTag(at::Tag::data_dependent_output) ||
                    handle.hasTag(at::Tag::dynamic_output_shape) || masks;
  pointwise = handle.hasTag(at::Tag::pointwise) && same.size() == 1 && schema.returns()[0].type()->str() == "Tensor";
  mixes_devices = MIXES_DEVICES.count(name) > 0;
}

bool is_native(const c10::OperatorHandle& handle) {
  if (NATIVE.count(c10::toString(handle.operator_name()))) return true;
  for (const c10::Argument& each : handle.schema().returns())
    if (each.alias_info() != nullptr && !each.alias_info()->isWrite()) return true;
  return false;
}

void call(const Operator& op, Stack& stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "simgpu: ", op.name,
                              " is a kernel of CUDA alone (fused attention, cuDNN, Triton and their like are not "
                              "emulated): use what also runs on a CPU, or a GPU");
  const at::AutoDispatchBelowADInplaceOrView guard;
  const size_t count = op.written.size();
  const Stack arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const c10::Device device = device_of(op, arguments);
  const c10::cuda::CUDAGuard here(device);
  Stack results = is_synchronous(op, arguments) ? wait(op, arguments, device) : queue(op, arguments, device);
  torch::jit::drop(stack, count);
  for (IValue& each : results) stack.push_back(std::move(each));
}

torch::CppFunction kernel_of(const c10::OperatorHandle& handle) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(handle));
}

}  // namespace simgpu
