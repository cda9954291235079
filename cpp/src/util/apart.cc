#include "util/apart.h"

#include <algorithm>

namespace recsdk::internal {

std::optional<Overlap> find_overlap(std::vector<CallArray>& written,
                                    std::span<const CallArray> read) {
  std::erase_if(written, [](const CallArray& each) { return each.is_empty(); });
  std::ranges::sort(written, std::less<const std::byte*>(), &CallArray::begin);
  const auto twice = std::ranges::adjacent_find(
      written, [](const CallArray& a, const CallArray& b) { return a.lies_over(b); });
  if (twice != written.end()) return Overlap{twice[0], twice[1]};
  for (const CallArray& each : read) {
    const auto first = std::ranges::upper_bound(written, each.begin, std::less<const std::byte*>(),
                                                &CallArray::end);
    if (first != written.end() && first->lies_over(each)) return Overlap{*first, each};
  }
  return std::nullopt;
}

}  // namespace recsdk::internal
