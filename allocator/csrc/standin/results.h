// The names and the meanings of the driver's results.
//
// Lock: none; these are constants.
#pragma once

#include "driver/driver_abi.h"

namespace ballonet::standin {

// How the stand-in refuses a call: a driver result, and an explanation, kept per thread.
//
// Lock: none; what is kept is the thread's own.

// Keeps the message for `ballonet_standin_violation` on this thread and returns `code`.
__attribute__((format(printf, 2, 3))) CUresult refuse(CUresult code, const char* format, ...);

// This thread's newest message, empty if it was never refused anything.
const char* refusal();

// False, and null, for a result that is not known.
bool result_name(CUresult result, const char** name);
bool result_text(CUresult result, const char** text);

}  // namespace ballonet::standin
