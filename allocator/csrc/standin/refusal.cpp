#include "refusal.h"

#include <cstdarg>
#include <cstdio>

namespace ballonet::standin {
namespace {
thread_local char message[768];
}

CUresult refuse(CUresult code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return code;
}

const char* refusal() { return message; }

}  // namespace ballonet::standin
