// The error texts for memory that has run out, with what to do about it.
//
// Guarantees: the text begins with the words of torch's own error, and ends with what to do.
//
// Lock: the first wants the heap's held by the caller, for the statistics; the second none.
#pragma once

#include <string>

#include "heap/usage.h"
#include "mapping/mapper.h"

namespace ballonet {

// The text for a failed allocation of `asked` bytes, which `missing` more pages would have served (0: not known).
std::string exhausted(Mapper& mapper, const HeapUsage& usage, std::size_t asked, const std::string& reason,
                      std::size_t missing);
// The text for host pages that could not be had.
std::string host_exhausted(Mapper& mapper, std::size_t pages, const std::string& reason);

}  // namespace ballonet
