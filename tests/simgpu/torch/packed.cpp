// aten::_flash_attention_forward: attention of sequences that lie one after the other, as FlashAttention-2 computes it.
//
// What it refuses is refused here, too. Sequences are told by tensors of the device, so which rows of the keys it reads
// is known when it runs: these are looked up then, one by one, and what lies between may be a hole. Each sequence is
// computed for itself, in float32, and gets the same bits whatever is beside it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <limits>
#include <memory>

#include "operators.h"

namespace simgpu {
namespace {

constexpr int64_t TABLE = 256;   // tokens of a block of a table: a multiple of so many
constexpr int64_t WIDEST = 256;  // dimension of a head

// A queued call. The tensors are of the CPU, over the device's memory.
struct Call {
  at::Tensor query, key, value;    // [rows, heads, dim]; keys with a table [blocks, tokens, heads, dim]
  at::Tensor starts_q, starts_k;   // [sequences + 1]
  at::Tensor used, table;          // [sequences], [sequences, blocks]; undefined where not given
  int64_t most_q = 0, most_k = 0;  // rows and keys of a sequence, at most
  int64_t left = -1, right = -1;   // keys that a row sees beside its own; -1: all
  double scale = 0;
  at::Tensor out, sums;  // [rows, heads, dim], [heads, rows]
};

// Where the keys of a sequence are in the first dimensions of the tensor, key by key: (address of a row, its bytes).
uint64_t address_of(const at::Tensor& states, const Call& call, int64_t sequence, int64_t position) {
  const auto item = static_cast<int64_t>(states.element_size());
  int64_t offset = 0;
  if (call.table.defined()) {
    const int64_t tokens = states.size(1);
    const int64_t block = call.table[sequence][position / tokens].item<int>();
    offset = block * states.stride(0) + position % tokens * states.stride(1);
  } else {
    offset = (call.starts_k[sequence].item<int>() + position) * states.stride(0);
  }
  return reinterpret_cast<uint64_t>(states.data_ptr()) + static_cast<uint64_t>(offset * item);
}

// The rows of a sequence, [keys, heads, dim] in float32; undefined, and the kernel has failed, where one is not there.
at::Tensor rows_of(const at::Tensor& states, const Call& call, int64_t sequence, int64_t count) {
  const int64_t heads = states.size(-2), dim = states.size(-1);
  const int64_t step = states.stride(-2);
  const uint64_t bytes = ((heads - 1) * step + dim) * states.element_size();
  std::vector<at::Tensor> rows;
  for (int64_t position = 0; position < count; ++position) {
    const uint64_t address = address_of(states, call, sequence, position);
    void* there = simgpu_pointer(address, bytes);
    if (there == nullptr) {
      simgpu_fail(("key " + std::to_string(position) + " of sequence " + std::to_string(sequence) +
                   " lies where there is no memory that a device may use")
                      .c_str());
      return {};
    }
    rows.push_back(at::for_blob(there, {heads, dim}).strides({step, 1}).options(states.options()).make_tensor());
  }
  return rows.empty() ? at::zeros({0, heads, dim}) : at::stack(rows).to(at::kFloat);
}

bool compute_sequence(const Call& call, int64_t sequence) {
  const int64_t first = call.starts_q[sequence].item<int>(), end = call.starts_q[sequence + 1].item<int>();
  const int64_t rows = end - first;
  const int64_t count = call.used.defined()
                            ? call.used[sequence].item<int>()
                            : call.starts_k[sequence + 1].item<int>() - call.starts_k[sequence].item<int>();
  if (rows < 0 || first < 0 || end > call.query.size(0) || rows > call.most_q || count < 0 || count > call.most_k) {
    simgpu_fail(("sequence " + std::to_string(sequence) + " has " + std::to_string(rows) + " rows from " +
                 std::to_string(first) + " on and " + std::to_string(count) + " keys: more than was said")
                    .c_str());
    return false;
  }
  if (rows == 0) return true;
  const at::Tensor keys = rows_of(call.key, call, sequence, count);
  const at::Tensor values = keys.defined() ? rows_of(call.value, call, sequence, count) : at::Tensor();
  if (!values.defined()) return false;
  const int64_t shared = call.query.size(1) / call.key.size(-2);
  const at::Tensor query = call.query.slice(0, first, end).to(at::kFloat).transpose(0, 1);  // [heads, rows, dim]
  const auto spread = [&](const at::Tensor& states) { return states.transpose(0, 1).repeat_interleave(shared, 0); };
  at::Tensor scores = at::bmm(query, spread(keys).transpose(1, 2)).mul_(call.scale);
  // Row i is the key i + count - rows itself.
  const at::Tensor apart = at::arange(count).unsqueeze(0) - (at::arange(rows).unsqueeze(1) + (count - rows));
  at::Tensor hidden = at::zeros({rows, count}, at::kBool);
  if (call.right >= 0) hidden = hidden.logical_or(apart.gt(call.right));
  if (call.left >= 0) hidden = hidden.logical_or(apart.lt(-call.left));
  scores.masked_fill_(hidden, -std::numeric_limits<float>::infinity());
  const at::Tensor sums = count ? scores.logsumexp(-1) : at::full({query.size(0), rows}, -INFINITY);
  const at::Tensor weights = (scores - sums.unsqueeze(-1)).exp_().nan_to_num_(0);  // a row that sees nothing gets zeros
  call.out.slice(0, first, end).copy_(at::bmm(weights, spread(values)).transpose(0, 1));
  call.sums.slice(1, first, end).copy_(sums);
  return true;
}

void run(void* context) {
  const Call& call = *static_cast<Call*>(context);
  const at::AutoDispatchBelowADInplaceOrView guard;
  try {
    for (int64_t sequence = 0; sequence + 1 < call.starts_q.size(0); ++sequence)
      if (!compute_sequence(call, sequence)) return;
  } catch (const std::exception& error) {
    simgpu_fail(error.what());
  }
}

void drop(void* context) { delete static_cast<Call*>(context); }

// The arguments by name: torch has added some over time.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, const Stack& values) : schema_(schema), values_(values) {}
  const IValue& operator[](const char* name) const {
    static const IValue none;
    for (size_t i = 0; i < values_.size(); ++i)
      if (schema_.arguments()[i].name() == name) return values_[i];
    return none;
  }
  at::Tensor tensor(const char* name) const {
    const IValue& value = (*this)[name];
    return value.isNone() ? at::Tensor() : value.toTensor();
  }
  int64_t integer(const char* name, int64_t otherwise) const {
    const IValue& value = (*this)[name];
    return value.isNone() ? otherwise : value.toInt();
  }

 private:
  const c10::FunctionSchema& schema_;
  const Stack& values_;
};

void check_index(const at::Tensor& tensor, const char* name, c10::IntArrayRef sizes) {
  TORCH_CHECK(tensor.defined() && tensor.is_cuda() && tensor.scalar_type() == at::kInt, name,
              " must be an int32 tensor on the device");
  TORCH_CHECK(tensor.is_contiguous() && tensor.sizes() == sizes, name, " must be contiguous, of shape ", sizes);
}

void check(const Arguments& given) {
  const at::Tensor query = given.tensor("query"), key = given.tensor("key"), value = given.tensor("value");
  const at::Tensor table = given.tensor("block_table"), starts = given.tensor("cum_seq_q");
  TORCH_CHECK_NOT_IMPLEMENTED(starts.defined() && given["alibi_slopes"].isNone() && given["num_splits"].isNone() &&
                                  given["dropout_p"].toDouble() == 0 && !given["return_debug_mask"].toBool(),
                              "simgpu: this attention is emulated for packed sequences, without alibi, splits, dropout "
                              "and debugging");
  const auto type = query.scalar_type();
  TORCH_CHECK(type == at::kHalf || type == at::kBFloat16, "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(key.scalar_type() == type && value.scalar_type() == type, "query and key must have the same dtype");
  TORCH_CHECK(query.dim() == 3 && key.dim() == (table.defined() ? 4 : 3) && value.sizes() == key.sizes(),
              "queries, keys and values of packed sequences have three dimensions, blocks of a table four");
  for (const at::Tensor& tensor : {query, key, value})
    TORCH_CHECK(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension");
  const int64_t dim = query.size(-1), sequences = starts.size(0) - 1;
  TORCH_CHECK(dim % 8 == 0 && dim <= WIDEST && key.size(-1) == dim,
              "head dimension must be a multiple of 8 and at most 256, got ", dim);
  TORCH_CHECK(query.size(1) % key.size(-2) == 0, "Number of heads in key/value must divide number of heads in query");
  TORCH_CHECK(sequences > 0, "batch size must be positive");
  check_index(starts, "cu_seqlens_q", {sequences + 1});
  check_index(given.tensor("cum_seq_k"), "cu_seqlens_k", {sequences + 1});
  if (given.tensor("seqused_k").defined()) check_index(given.tensor("seqused_k"), "seqused_k", {sequences});
  if (!table.defined()) return;
  check_index(table, "block_table", {sequences, table.size(1)});
  TORCH_CHECK(key.size(1) % TABLE == 0, "Paged KV cache block size must be divisible by 256");
}

std::vector<at::Tensor> attend(const Arguments& given) {
  check(given);
  const at::Tensor query = given.tensor("query"), key = given.tensor("key");
  const c10::cuda::CUDAGuard here(query.device());
  const at::Tensor out = at::empty(query.sizes(), query.options());
  const at::Tensor sums = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  const at::Tensor state = at::empty({2}, query.options().dtype(at::kUInt64));
  auto call = std::make_unique<Call>();
  std::vector<SimRange> ranges;
  const auto over = [&](const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return at::Tensor();
    add_ranges(ranges, tensor, write);
    return for_cpu(tensor);
  };
  call->query = over(query, false);
  call->key = for_cpu(key);
  call->value = for_cpu(given.tensor("value"));
  call->starts_q = over(given.tensor("cum_seq_q"), false);
  call->starts_k = over(given.tensor("cum_seq_k"), false);
  call->used = over(given.tensor("seqused_k"), false);
  call->table = over(given.tensor("block_table"), false);
  call->out = over(out, true);
  call->sums = over(sums, true);
  call->most_q = given.integer("max_q", 0);
  call->most_k = given.integer("max_k", 0);
  call->left = given.integer("window_size_left", -1);
  call->right = given["is_causal"].toBool() ? 0 : given.integer("window_size_right", -1);
  call->scale = given["scale"].isNone() ? 1 / std::sqrt(query.size(-1)) : given["scale"].toDouble();
  C10_CUDA_CHECK(static_cast<cudaError_t>(simgpu_launch(c10::cuda::getCurrentCUDAStream().stream(),
                                                        "aten::_flash_attention_forward", run, drop, call.release(),
                                                        ranges.data(), ranges.size())));
  return {out, sums, state, at::empty({}, state.options()), at::empty({0}, query.options())};
}

class Packed final : public c10::OperatorKernel {
 public:
  explicit Packed(const c10::OperatorHandle& handle) : handle_(handle) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const size_t count = handle_.schema().arguments().size();
    const Stack values(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    const std::vector<at::Tensor> results = attend(Arguments(handle_.schema(), values));
    torch::jit::drop(*stack, count);
    for (const at::Tensor& each : results) stack->push_back(each);
  }

 private:
  const c10::OperatorHandle handle_;
};

}  // namespace

torch::CppFunction packed_attention(const c10::OperatorHandle& handle) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Packed>(handle));
}

}  // namespace simgpu
