// One aten operator of the CUDA key, answered by the CPU's kernel on the simulated device.
//
// A call does what a real CUDA kernel's launcher does: the shapes of the outputs are known beforehand, their memory
// comes from torch's current allocator, and a closure of raw addresses is queued on the current stream. The closure
// holds no tensor of the caller, as a kernel holds none: memory that is given away too early is really lost.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../device/simgpu.h"

namespace simgpu {

using c10::IValue;
using Stack = torch::jit::Stack;

// What has to be known of a tensor that does not exist yet.
struct Layout {
  bool defined = false;
  c10::ScalarType type = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes, strides;
};

// One return of a call: an argument that was written, new tensors, or a value that depends on shapes only.
struct Return {
  int argument = -1;
  bool list = false;
  std::vector<Layout> tensors;
  IValue value;
};

// What a call will return, and which of the tensors that it writes must be resized first.
struct Shapes {
  std::vector<Return> returns;
  std::vector<std::pair<size_t, std::vector<int64_t>>> resized;  // (position among the written tensors, sizes)
};

// What the schema says, read once.
struct Operator {
  explicit Operator(c10::OperatorHandle handle);

  c10::OperatorHandle handle;
  std::string name;              // aten::add.Tensor
  std::vector<bool> written;     // by argument
  std::vector<int> same;         // by return: the argument that it is, or -1
  int generator = -1;            // the argument, or -1
  bool depends_on_data = false;  // shapes or plain values come from the contents
  bool masks = false;            // only where an index is a mask
  bool pointwise = false;        // one result, of the inputs' common shape
  size_t out = SIZE_MAX;         // the argument that is only written, where there is one
  bool mixes_devices = false;    // takes tensors of the CPU beside those of the device
};

// True for what stays as it is: views, factories and metadata, which launch no kernel.
bool is_native(const c10::OperatorHandle& handle);

// Applies `change` to each tensor of the value, in lists too.
template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& each : value.toTensorVector()) tensors.push_back(change(each));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& each : value.toOptionalTensorVector())
      tensors.push_back(each.has_value() ? std::optional(change(*each)) : std::nullopt);
    return tensors;
  }
  return value;
}

// Calls `visit` with each defined tensor of the value.
template <class Visit>
void each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const IValue& each : value.toListRef()) each_tensor(each, visit);
  }
}

// The shapes of a call; remembered by operator, shapes and values. Throws what torch says of wrong ones.
Shapes shapes_of(const Operator& op, const Stack& arguments);

// Does the call: queues it, or waits for it where shapes or values depend on the contents. Changes the stack.
void call(const Operator& op, Stack& stack);

// Adds the memory of a tensor: one range, or several where views skip more than a small page between rows.
void add_ranges(std::vector<SimRange>& ranges, const at::Tensor& tensor, bool write);

// The same memory for the CPU; a tensor of the CPU, whose owner may change it meanwhile, is copied as a kernel's
// arguments are.
at::Tensor for_cpu(const at::Tensor& tensor);

// Operators that are not the CPU's kernel on the same arguments: copies, dropout, attention.
void register_special(torch::Library& cuda, torch::Library& autograd);

// Attention of packed sequences, aten::_flash_attention_forward: see packed.cpp.
torch::CppFunction packed_attention(const c10::OperatorHandle& handle);

// The kernel of one operator for torch's dispatcher.
torch::CppFunction kernel_of(const c10::OperatorHandle& handle);

}  // namespace simgpu
