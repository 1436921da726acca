// Shapes of outputs before a kernel has run.
//
// torch's meta kernels know them, but they are Python, which takes longer than the work of a tiny model and seconds to
// import. So small calls are tried on the CPU, and all answers are remembered; matrix products, attention and pointwise
// operators, whose lengths change with each token, are answered here.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>

#include <mutex>
#include <set>
#include <unordered_map>

#include "operators.h"

namespace simgpu {
namespace {

constexpr size_t REMEMBERED = 50'000;  // calls; decoding brings new lengths with each token
constexpr int64_t SMALL = 1 << 18;     // elements of a call whose shapes are found by trying it on the CPU

std::mutex mutex;
std::unordered_map<std::string, Shapes> remembered;

template <class T>
void put(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_list(std::string& key, c10::IntArrayRef values) {
  put(key, values.size());
  key.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
}

void put_kind(std::string& key, const at::Tensor& tensor) {
  put(key, tensor.scalar_type());
  put(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
}

// False where the value has no bytes that identify it.
bool put_value(std::string& key, const IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    key += tensor.defined() ? 't' : 'u';
    if (tensor.defined()) {
      put_kind(key, tensor);
      put_list(key, tensor.sizes());
      put_list(key, tensor.strides());
    }
  } else if (value.isNone() || value.isGenerator()) {
    key += 'n';
  } else if (value.isBool()) {
    key += value.toBool() ? 'T' : 'F';
  } else if (value.isInt()) {
    put(key += 'i', value.toInt());
  } else if (value.isDouble()) {
    put(key += 'd', value.toDouble());
  } else if (value.isComplexDouble()) {
    put(key += 'c', value.toComplexDouble());
  } else if (value.isString()) {
    put(key += 's', value.toStringRef().size());
    key += value.toStringRef();
  } else if (value.isDevice()) {
    put(key += 'D', value.toDevice().type());
  } else if (value.isList()) {
    const auto list = value.toListRef();
    put(key += 'l', list.size());
    for (const IValue& each : list)
      if (!put_value(key, each)) return false;
  } else {
    return false;
  }
  return true;
}

// A tensor of the same kind and shape elsewhere. On the CPU it holds ones: a divisor, and an index of most tensors.
at::Tensor twin(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (device.is_cpu()) made.fill_(1);
  return made;
}

// Runs the operator on twins of its tensors; returns (their arguments, what it returned).
std::pair<Stack, Stack> tried(const Operator& op, const Stack& arguments, c10::Device device) {
  Stack twins;
  for (const IValue& each : arguments)
    twins.push_back(each.isDevice() ? IValue(device)
                                    : changed(each, [&](const at::Tensor& tensor) { return twin(tensor, device); }));
  if (op.generator >= 0 && device.is_cpu()) twins[op.generator] = at::make_generator<at::CPUGeneratorImpl>(0);
  Stack results = twins;
  op.handle.callBoxed(results);
  return {twins, results};
}

// Small calls are tried on the CPU: faster than Python, and without importing what it needs, which takes seconds.
std::pair<Stack, Stack> tried(const Operator& op, const Stack& arguments) {
  int64_t elements = 0;
  for (const IValue& each : arguments) each_tensor(each, [&](const at::Tensor& tensor) { elements += tensor.numel(); });
  if (elements <= SMALL) {
    try {
      return tried(op, arguments, c10::kCPU);
    } catch (const std::exception&) {  // ones were no good, or the call is wrong: the meta kernel will say
    }
  }
  return tried(op, arguments, c10::kMeta);
}

Layout layout(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
}

Shapes learned(const Operator& op, const Stack& arguments) {
  const auto [twins, results] = tried(op, arguments);
  Shapes shapes;
  for (size_t i = 0; i < results.size(); ++i) {
    Return made;
    made.argument = op.same[i];
    made.list = results[i].isTensorList();
    if (made.argument >= 0) {
    } else if (results[i].isTensor()) {
      made.tensors.push_back(layout(results[i].toTensor()));
    } else if (made.list) {
      for (const at::Tensor& each : results[i].toTensorVector()) made.tensors.push_back(layout(each));
    } else {
      made.value = results[i];
    }
    shapes.returns.push_back(std::move(made));
  }
  size_t position = 0;
  for (size_t i = 0; i < twins.size(); ++i) {
    if (!op.written[i]) continue;
    std::vector<at::Tensor> before;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) { before.push_back(tensor); });
    size_t index = 0;
    each_tensor(twins[i], [&](const at::Tensor& tensor) {
      if (tensor.sizes() != before[index++].sizes()) shapes.resized.emplace_back(position, tensor.sizes().vec());
      ++position;
    });
  }
  return shapes;
}

Shapes fresh(c10::ScalarType type, std::vector<int64_t> sizes) {
  Return made;
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  made.tensors.push_back({true, type, std::move(sizes), std::move(strides)});
  Shapes shapes;
  shapes.returns.push_back(std::move(made));
  return shapes;
}

// A pointwise call without its lengths, on which the type of the result does not depend; nothing where a value has no
// bytes, or where strides of the result would follow those of the inputs.
std::optional<std::string> pointwise_key(const Operator& op, const Stack& arguments) {
  std::string key = op.name + '?';
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) {
      if (!put_value(key, arguments[i])) return std::nullopt;
      continue;
    }
    const at::Tensor& tensor = arguments[i].toTensor();
    key += tensor.defined() ? 't' : 'u';
    if (!tensor.defined()) continue;
    put_kind(key, tensor);
    put(key, tensor.dim() == 0);
    if (op.same[0] < 0 && !tensor.is_contiguous()) return std::nullopt;
  }
  return key;
}

std::optional<Shapes> pointwise(const Operator& op, const Stack& arguments) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() && i != op.out)
      sizes = at::infer_size(sizes, arguments[i].toTensor().sizes());
  if (op.same[0] >= 0 && arguments[op.same[0]].toTensor().sizes() != c10::IntArrayRef(sizes)) return std::nullopt;
  const auto key = pointwise_key(op, arguments);
  if (!key) return std::nullopt;
  std::lock_guard lock(mutex);
  const auto found = remembered.find(*key);
  if (found == remembered.end()) return std::nullopt;
  if (op.same[0] >= 0) return found->second;
  return fresh(found->second.returns[0].tensors[0].type, std::move(sizes));
}

// Matrix products and concatenations: their lengths change with each token.
std::optional<Shapes> natively(const Operator& op, const Stack& arguments) {
  if (op.pointwise) return pointwise(op, arguments);
  const auto tensor = [&](size_t i) -> const at::Tensor& { return arguments[i].toTensor(); };
  if (op.name == "aten::mm" && tensor(0).dim() == 2 && tensor(1).dim() == 2 && tensor(0).size(1) == tensor(1).size(0) &&
      tensor(0).scalar_type() == tensor(1).scalar_type())
    return fresh(tensor(0).scalar_type(), {tensor(0).size(0), tensor(1).size(1)});
  if (op.name == "aten::bmm" && tensor(0).dim() == 3 && tensor(1).dim() == 3 &&
      tensor(0).size(0) == tensor(1).size(0) && tensor(0).size(2) == tensor(1).size(1) &&
      tensor(0).scalar_type() == tensor(1).scalar_type())
    return fresh(tensor(0).scalar_type(), {tensor(0).size(0), tensor(0).size(1), tensor(1).size(2)});
  if (op.name == "aten::scaled_dot_product_attention") {
    std::vector<int64_t> sizes = tensor(0).sizes().vec();
    sizes.back() = tensor(2).size(-1);
    return fresh(tensor(0).scalar_type(), std::move(sizes));
  }
  return std::nullopt;
}

}  // namespace

Shapes shapes_of(const Operator& op, const Stack& arguments) {
  if (auto known = natively(op, arguments)) return *std::move(known);
  std::string key = op.name;
  bool identified = true;
  for (const IValue& each : arguments) identified = identified && put_value(key, each);
  if (identified) {
    std::lock_guard lock(mutex);
    auto found = remembered.find(key);
    if (found != remembered.end()) return found->second;
  }
  Shapes shapes = learned(op, arguments);
  std::lock_guard lock(mutex);
  if (remembered.size() >= REMEMBERED) remembered.clear();
  if (op.pointwise && shapes.resized.empty())
    if (auto kind = pointwise_key(op, arguments)) remembered.emplace(*std::move(kind), shapes);
  if (identified) remembered.emplace(std::move(key), shapes);
  return shapes;
}

}  // namespace simgpu
