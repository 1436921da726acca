// The names and the meanings of the driver's results.
//
// Lock: none; these are constants.
#pragma once

#include "driver/driver_abi.h"

namespace ballonet::standin {

// False, and null, for a result that is not known.
bool result_name(CUresult result, const char** name);
bool result_text(CUresult result, const char** text);

}  // namespace ballonet::standin
