// Operators whose answer is not simply the CPU's kernel, and the registration of all.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>

#include <set>

#include "operators.h"

namespace simgpu {
namespace {

// Native where it becomes one cudaMemcpyAsync or goes to or from the host, through contiguous copies if need be.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg() && to.strides() == from.strides() && to.is_non_overlapping_and_dense();
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  if (!self.is_cuda() || !source.is_cuda() || is_plain(self, source))
    return at::native::copy_(self, source, non_blocking);
  if (self.device() != source.device()) {  // cast and expanded where it lies, carried over, put in place
    at::Tensor packed = source.to(self.scalar_type()).expand_as(self).contiguous();
    at::Tensor arrived = at::empty(self.sizes(), self.options());
    at::native::copy_(arrived, packed, non_blocking);
    return self.copy_(arrived);
  }
  static const Operator op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  Stack stack = {self, source, non_blocking};
  call(op, stack);
  return self;
}

// The CPU's kernel takes its numbers from the process's generator: here they come from the device's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true) || p == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// The CPU counts floating-point numbers only; mixtures of experts count the integers that name them.
at::Tensor histogram(const at::Tensor& self, int64_t bins, const c10::Scalar& low, const c10::Scalar& high) {
  if (at::isIntegralType(self.scalar_type(), /*includeBool=*/true))
    return at::histc(self.to(at::kDouble), bins, low, high).to(self.scalar_type());
  static const Operator op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", ""));
  Stack stack = {self, bins, low, high};
  call(op, stack);
  return stack.back().toTensor();
}

// Attention is one operation of the device, as its fused kernels are, and the CPU chooses how. With gradients it is
// made of differentiable pieces.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool gqa) {
  const bool differentiable =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad() ||
                                     (mask.has_value() && mask->requires_grad()));
  if (differentiable || dropout > 0)
    return std::get<0>(
        at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, std::nullopt, scale, gqa));
  const at::AutoDispatchBelowAutograd guard;
  return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, gqa);
}

class Silence : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

void register_all() {
  Silence silence;  // each override would be warned of
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static torch::Library cuda(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static torch::Library autograd(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::set<std::string> special = {"aten::copy_", "aten::histc", "aten::native_dropout",
                                         "aten::_flash_attention_forward"};
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto handle = dispatcher.findSchema(name);
    if (!handle || name.getNamespace() != "aten" || is_native(*handle) || special.count(c10::toString(name))) continue;
    cuda.impl(c10::toString(name).substr(6).c_str(), kernel_of(*handle));
  }
  register_special(cuda, autograd);
  at::globalContext().setUserEnabledCuDNN(false);
}

const bool registered = (register_all(), true);

}  // namespace

void register_special(torch::Library& cuda, torch::Library& autograd) {
  auto& dispatcher = c10::Dispatcher::singleton();
  // Made of pieces that exist on CUDA only, or chosen by what the GPU can.
  for (const char* name : {"convolution", "convolution_backward", "scaled_dot_product_attention"})
    cuda.impl(name, kernel_of(dispatcher.findSchemaOrThrow((std::string("aten::") + name).c_str(), "")));
  cuda.impl("_flash_attention_forward",
            packed_attention(dispatcher.findSchemaOrThrow("aten::_flash_attention_forward", "")));
  cuda.impl("copy_", TORCH_FN(copy));
  cuda.impl("histc", TORCH_FN(histogram));
  cuda.impl("native_dropout", TORCH_FN(native_dropout));
  autograd.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

}  // namespace simgpu
