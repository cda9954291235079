#include "io/checksum.h"

#include <cstdio>

#include "io/xxh3.h"
#include "util/isa.h"

// The header has conversions that are meant, but cause warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wold-style-cast"
#define XXH_INLINE_ALL
#include <xxhash.h>
#pragma GCC diagnostic pop

namespace recsdk::internal {
namespace {

// Wider registers than AVX2's gain nothing: memory is no faster.
const Xxh3& xxh3() {
#if defined(RECSDK_HAVE_AVX2)
  if (current_isa() != Isa::kBaseline) return kXxh3Avx2;
#endif
  return kXxh3Baseline;
}

}  // namespace

std::uint64_t checksum64(std::span<const std::byte> bytes) {
  return xxh3().hash64(bytes.data(), bytes.size());
}

struct StreamChecksum::State {
  XXH3_state_t xxh3;
};

StreamChecksum::StreamChecksum() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh3);
}

StreamChecksum::~StreamChecksum() = default;

void StreamChecksum::add(std::span<const std::byte> bytes) {
  xxh3().update128(&state_->xxh3, bytes.data(), bytes.size());
}

struct StreamChecksum64::State {
  XXH3_state_t xxh3;
};

StreamChecksum64::StreamChecksum64() : state_(std::make_unique<State>()) { reset(); }
StreamChecksum64::~StreamChecksum64() = default;

void StreamChecksum64::reset() noexcept { XXH3_64bits_reset(&state_->xxh3); }
void StreamChecksum64::add(std::span<const std::byte> bytes) {
  xxh3().update64(&state_->xxh3, bytes.data(), bytes.size());
}
std::uint64_t StreamChecksum64::value() const noexcept { return XXH3_64bits_digest(&state_->xxh3); }

std::string StreamChecksum::text() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  char digits[33];
  std::snprintf(digits, sizeof(digits), "%016llx%016llx",
                static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits;
}

}  // namespace recsdk::internal
