// Memory that this machine, or the control group of the process, can still give.
//
// Committing more than that calls the kernel's out-of-memory killer instead of failing, so everything is asked here
// first. Allocates nothing and takes no lock: safe in the child of a fork.
#pragma once

#include <cstdint>

namespace ballonet::standin {

std::uint64_t ram_total();      // bytes of RAM
std::uint64_t ram_available();  // bytes that can be committed now without swapping or being killed
std::uint64_t ram_margin();     // bytes that must stay available for everyone else

}  // namespace ballonet::standin
