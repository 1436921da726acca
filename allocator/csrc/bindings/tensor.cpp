#include "bindings/tensor.h"

#include "bindings/bindings.h"

namespace ballonet {
namespace {

constexpr int kDLCPU = 1;
constexpr int kDLUInt = 1;

struct DLTensor {
  void* data;
  struct {
    std::int32_t device_type;
    std::int32_t device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

// What a tensor keeps alive.
struct Held {
  DLManagedTensor managed;
  std::shared_ptr<Range> range;
  std::size_t offset, size;  // that are pinned, in the case of a window none
  bool window;
  std::vector<std::int64_t> shape, strides;

  ~Held() { window ? range->close_window() : range->unpin(offset, size); }
};

void drop(DLManagedTensor* managed) {
  without_gil([managed] { delete static_cast<Held*>(managed->context); });
}

// A capsule that nobody consumed still owns what it holds.
void drop_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  drop(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

// A capsule over [offset, ...) of the range, of which `size` bytes are pinned, or which is an open window.
pybind11::capsule over(const std::shared_ptr<Range>& range, std::size_t offset, std::size_t size, bool window,
                       const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides, int code,
                       int bits) {
  auto* held = new Held{{}, range, offset, size, window, shape, strides};
  const AddressSpace& space = range->mapper->space;
  DLTensor& tensor = held->managed.tensor;
  tensor.data = reinterpret_cast<void*>(range->base + offset);
  tensor.device = {space.driver.is_standin() ? kDLCPU : cuda::kDLPackDevice,
                   space.driver.is_standin() ? 0 : space.context.ordinal};
  tensor.ndim = static_cast<std::int32_t>(shape.size());
  tensor.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  tensor.shape = held->shape.data();
  tensor.strides = held->strides.data();
  tensor.byte_offset = 0;
  held->managed.context = held;
  held->managed.deleter = drop;
  return pybind11::reinterpret_steal<pybind11::capsule>(PyCapsule_New(&held->managed, "dltensor", drop_unused));
}

}  // namespace

pybind11::capsule make_tensor(const std::shared_ptr<Range>& range, std::size_t offset,
                              const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
                              int code, int bits) {
  if (shape.size() != strides.size()) throw UsageError("a tensor needs as many strides as dimensions");
  if (bits <= 0 || bits % 8 != 0) throw UsageError("elements must be whole bytes");
  std::size_t elements = 1;  // up to the last one reached
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0 || strides[i] < 0) throw UsageError("shapes and strides must not be negative");
    if (shape[i] == 0) elements = 0;
    if (elements == 0) continue;
    std::size_t reach = 0;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &reach) || __builtin_add_overflow(elements, reach, &elements))
      throw UsageError("the tensor spans more than any memory has");
  }
  std::size_t size = 0;
  if (__builtin_mul_overflow(elements, static_cast<std::size_t>(bits / 8), &size))
    throw UsageError("the tensor spans more than any memory has");
  without_gil([&] { range->pin(offset, size); });
  return over(range, offset, size, false, shape, strides, code, bits);
}

pybind11::capsule make_window(const std::shared_ptr<Range>& range, std::size_t offset, std::size_t size) {
  const std::size_t extent = range->pieces * range->mapper->space.page_size;
  if (offset > extent || size > extent - offset) {
    throw UsageError(format("%zu bytes at %zu lie outside a range of %zu bytes", size, offset, extent));
  }
  without_gil([&] { range->open_window(); });
  return over(range, offset, 0, true, {static_cast<std::int64_t>(size)}, {1}, kDLUInt, 8);
}

}  // namespace ballonet
