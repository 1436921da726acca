// How the stand-in refuses a call: a driver result, and an explanation, kept per thread.
//
// Lock: none; what is kept is the thread's own.
#pragma once

#include "driver/driver_abi.h"

namespace ballonet::standin {

// Keeps the message for `ballonet_standin_violation` on this thread and returns `code`.
__attribute__((format(printf, 2, 3))) CUresult refuse(CUresult code, const char* format, ...);

// This thread's newest message, empty if it was never refused anything.
const char* refusal();

}  // namespace ballonet::standin
