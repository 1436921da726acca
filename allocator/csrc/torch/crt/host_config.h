// Empty: the real file checks that nvcc accepts the host's compiler. See host_defines.h.
#pragma once
