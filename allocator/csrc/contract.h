// The part of the core's table (entry.h) that only the whole contract of a CUDA allocator of torch's needs.
#pragma once

#include "entry.h"

namespace ballonet {

// Keeps a failure for `last_error` and returns its code.
int keep_failure();  // pre: in a catch block

void fill_contract(BallonetCore& table);

}  // namespace ballonet
