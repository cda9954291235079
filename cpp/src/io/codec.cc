#include "io/codec.h"

#include <stdexcept>
#include <string>

#include "util/must.h"

#ifdef RECSDK_HAVE_ZSTD
#include <dlfcn.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <new>
#endif

namespace recsdk {
namespace internal {
namespace {

#ifdef RECSDK_HAVE_ZSTD

// The fastest of its usual levels: weights hardly compress further.
constexpr int kLevel = 1;

// The functions of libzstd that are used; all of its stable interface.
struct Zstd {
  decltype(&ZSTD_compress) compress;
  decltype(&ZSTD_decompress) decompress;
  decltype(&ZSTD_isError) is_error;
  decltype(&ZSTD_getErrorCode) error_code;

  /// False for an error, except that running out of memory is thrown.
  bool succeeded(std::size_t result) const {
    if (is_error(result) == 0U) return true;
    if (error_code(result) == ZSTD_error_memory_allocation) throw std::bad_alloc();
    return false;
  }
};

template <typename Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

// Null where the machine has no libzstd. It stays loaded.
const Zstd* zstd() {
  static const std::optional<Zstd> loaded = []() -> std::optional<Zstd> {
    void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::nullopt;
    Zstd found{};
    load(library, "ZSTD_compress", found.compress);
    load(library, "ZSTD_decompress", found.decompress);
    load(library, "ZSTD_isError", found.is_error);
    load(library, "ZSTD_getErrorCode", found.error_code);
    const bool is_whole = found.compress != nullptr && found.decompress != nullptr &&
                          found.is_error != nullptr && found.error_code != nullptr;
    return is_whole ? std::optional(found) : std::nullopt;
  }();
  return loaded ? &*loaded : nullptr;
}

constexpr const char* kNoZstd =
    "libzstd is not installed; install it (libzstd1), or use no compression";

#else

struct Zstd {
  static std::size_t compress(void*, std::size_t, const void*, std::size_t, int) { return 0; }
  static std::size_t decompress(void*, std::size_t, const void*, std::size_t) { return 0; }
  static bool succeeded(std::size_t) { return false; }
};
constexpr int kLevel = 0;

const Zstd* zstd() { return nullptr; }

constexpr const char* kNoZstd =
    "this build has no zstd; build recsdk with the header of libzstd (libzstd-dev), or use no "
    "compression";

#endif

}  // namespace

void require_codec(Codec codec) {
  if (has_codec(codec)) return;
  if (codec == Codec::kZstd) throw std::invalid_argument(kNoZstd);
  throw std::invalid_argument(must("codec", "be kNone or kZstd", codec));
}

std::optional<std::size_t> compress(Codec codec, std::span<const std::byte> raw,
                                    std::span<std::byte> out) {
  require_codec(codec);
  if (codec == Codec::kNone) return std::nullopt;
  const std::size_t result =
      zstd()->compress(out.data(), out.size(), raw.data(), raw.size(), kLevel);
  if (!zstd()->succeeded(result)) return std::nullopt;
  return result;
}

bool decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out) {
  require_codec(codec);
  if (codec == Codec::kNone) return false;
  const std::size_t result =
      zstd()->decompress(out.data(), out.size(), stored.data(), stored.size());
  return zstd()->succeeded(result) && result == out.size();
}

}  // namespace internal

bool has_codec(Codec codec) {
  return codec == Codec::kNone || (codec == Codec::kZstd && internal::zstd() != nullptr);
}

}  // namespace recsdk
