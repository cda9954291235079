#include "util/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <array>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "recsdk/runtime.h"

namespace recsdk {
namespace internal {
namespace {

constexpr std::array<const char*, kNumIsas> kNames = {"baseline", "avx2", "avx512"};

// -1 until the first use.
std::atomic<int> chosen_isa{-1};

#if defined(RECSDK_HAVE_AVX2)
// Whether the processor converts float16; not every compiler's __builtin_cpu_supports knows this by
// name.
bool has_f16c() {
  unsigned int a = 0;
  unsigned int b = 0;
  unsigned int c = 0;
  unsigned int d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool is_available(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:
#if defined(RECSDK_HAVE_AVX2)
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
             has_f16c();
#else
      return false;
#endif
    case Isa::kAvx512:
#if defined(RECSDK_HAVE_AVX512)
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
             __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("fma") != 0 && has_f16c();
#else
      return false;
#endif
  }
  return false;
}

std::optional<int> find_isa(std::string_view name) {
  for (int i = 0; i < kNumIsas; ++i) {
    if (name == kNames[static_cast<std::size_t>(i)] && is_available(static_cast<Isa>(i))) return i;
  }
  return std::nullopt;
}

int fastest_isa() {
  int fastest = 0;
  for (int i = 0; i < kNumIsas; ++i) {
    if (is_available(static_cast<Isa>(i))) fastest = i;
  }
  return fastest;
}

int require_isa(std::string_view name, std::string_view origin) {
  if (const std::optional<int> found = find_isa(name)) return *found;
  std::string message(origin);
  message.append(": no instruction set '").append(name).append("' here; choose one of");
  for (const std::string& available : available_isas()) message.append(" ").append(available);
  throw std::invalid_argument(message);
}

int choose_isa() {
  const char* wish = std::getenv("RECSDK_ISA");
  const int choice =
      wish == nullptr || *wish == '\0' ? fastest_isa() : require_isa(wish, "RECSDK_ISA");
  chosen_isa.store(choice, std::memory_order_relaxed);
  return choice;
}

}  // namespace

Isa current_isa() {
  const int choice = chosen_isa.load(std::memory_order_relaxed);
  return static_cast<Isa>(choice >= 0 ? choice : choose_isa());
}

}  // namespace internal

const char* version() noexcept { return RECSDK_VERSION_STRING; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int i = 0; i < internal::kNumIsas; ++i) {
    if (internal::is_available(static_cast<internal::Isa>(i))) {
      names.emplace_back(internal::kNames[static_cast<std::size_t>(i)]);
    }
  }
  return names;
}

std::string isa() { return internal::kNames[static_cast<std::size_t>(internal::current_isa())]; }

void set_isa(const std::string& name) {
  internal::chosen_isa.store(internal::require_isa(name, "set_isa"), std::memory_order_relaxed);
}

}  // namespace recsdk
