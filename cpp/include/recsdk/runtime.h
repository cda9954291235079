// Settings of the process: the thread pool and the instruction set.
#pragma once

#include <string>
#include <vector>

#include "recsdk/export.h"

namespace recsdk {

/// "0.1.0"
RECSDK_API const char* version() noexcept;

/// Instruction sets that this build has kernels for and this machine runs, slowest first:
/// "baseline", "avx2", "avx512" on x86-64; "baseline", which is NEON, on aarch64.
RECSDK_API std::vector<std::string> available_isas();

/// The instruction set in use: the fastest available, or the one that the environment variable
/// RECSDK_ISA names. Results are bit-equal on all of them. Throws std::invalid_argument if
/// RECSDK_ISA names one that is not available.
RECSDK_API std::string isa();

/// Switches the process to another instruction set; meant for tests. Do not call it while other
/// calls run. Throws std::invalid_argument, which names the available ones, for any other.
RECSDK_API void set_isa(const std::string& name);

/// Threads of the process-wide pool, the caller's included: RECSDK_NUM_THREADS, else the number of
/// processors that the process may run on. Results do not depend on it. Throws
/// std::invalid_argument if RECSDK_NUM_THREADS is no number of threads.
RECSDK_API int num_threads();

/// Changes the size of the pool, 1 to 1024; throws std::invalid_argument for others. Running calls
/// go on with the threads they have. After fork the child makes a pool of the same size when it
/// first needs one.
RECSDK_API void set_num_threads(int count);

}  // namespace recsdk
