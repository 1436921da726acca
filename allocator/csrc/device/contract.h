// The part of the core's table (entry.h) that only the whole contract of a CUDA allocator of torch's needs.
//
// Guarantees: what can fail says so by its code and keeps why for `last_error`, as in entry.h.
//
// Lock: none is wanted; each function takes those of the core that it needs.
#pragma once

#include "torch/entry.h"

namespace ballonet {

// Keeps a failure for `last_error` and returns its code.
int keep_failure();  // pre: in a catch block

void fill_contract(BallonetCore& table);

}  // namespace ballonet
