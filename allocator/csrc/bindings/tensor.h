// DLPack: how bytes of a range become a tensor without linking torch. The layout is that of DLPack 0.8, which every
// torch that ballonet supports reads.
//
// Guarantees: for as long as a tensor lives, its range does, and no piece under it is retired, but for a window.
//
// Lock: making a tensor takes the mapper's, and so does the end of the last one.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "mapping/mapper.h"

namespace ballonet {

// A capsule over [offset, ...) of the range. Strides are in elements; `code` and `bits` are DLPack's. The bytes under
// it are pinned until the last tensor over them is gone. Throws UsageError where one of them is not backed.
pybind11::capsule make_tensor(const std::shared_ptr<Range>& range, std::size_t offset,
                              const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
                              int code, int bits);

// A capsule over [offset, offset + size) of the range as uint8, of which no byte need be backed: it pins nothing, and
// pieces under it come and go. A read or write without a page behind it faults. Throws UsageError where the range is
// smaller.
pybind11::capsule make_window(const std::shared_ptr<Range>& range, std::size_t offset, std::size_t size);

}  // namespace ballonet
