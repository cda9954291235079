// Entry point of libFuzzer for what exported programs say of their tables, and for the manifests
// that they read there; see table_fuzzer.cc. The place comes first, a manifest after a byte of
// zeros.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

#include "torch/frozen_place.h"

namespace recsdk::serving_torch {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

/// Nothing if it is refused, which says why.
template <class Read>
auto unless_refused(const Read& read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const std::runtime_error& error) {
    require(error.what()[0] != '\0', "refused without a word");
    return std::nullopt;
  }
}

void check(const Frozen& frozen, const Place& place) {
  std::set<std::string> seen;
  for (const auto& [name, files] : frozen.files) {
    require(!place.shards || files.size() == place.shards->size(), "other shards are open");
    const auto folder_of = [](const std::string& file) { return file.substr(0, file.rfind('/')); };
    for (const std::string& file : files) {
      require(folder_of(file) == folder_of(files[0]), "a table has files of another");
      const std::string_view start = std::string_view(file).substr(0, place.path.size());
      const std::string_view inside = std::string_view(file).substr(place.path.size());
      require(start == place.path, "a file lies elsewhere");
      require(inside.starts_with("/" + frozen.token + "/tables/") && inside.ends_with(".frozen"),
              "a file is no file of the freeze");
      require(inside.find("..") == std::string_view::npos, "a file lies outside of its folder");
      require(std::ranges::count(inside, '/') == 4, "a file is no file of a table");
      require(file.find('\0') == std::string::npos, "another file than this would be opened");
      require(seen.insert(file).second, "two tables have a file in common");
    }
  }
}

void run(std::string_view input) {
  const std::size_t end = input.find('\0');
  std::optional<Place> place = unless_refused([&] { return parse_place(input.substr(0, end)); });
  if (end == std::string_view::npos) return;
  if (!place) place = Place{"/served", "user", std::nullopt, "group"};
  const auto frozen = unless_refused([&] { return parse_frozen(input.substr(end + 1), *place); });
  if (frozen) check(*frozen, *place);
}

}  // namespace
}  // namespace recsdk::serving_torch

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::serving_torch::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
