#include "arguments/joined.h"

#include <algorithm>
#include <string>

#include "arguments/calls.h"
#include "arguments/refusals.h"

namespace recsdk::bind {
PyJoinedBags::PyJoinedBags(nb::handle rows, nb::handle outcomes_object, nb::handle num_pieces,
                           nb::handle num_keys, nb::handle starts, nb::handle offsets,
                           nb::handle is_mean)
    : rows_(rows, "rows"), framework_(rows_.framework()) {
  for (const nb::handle object : {rows, outcomes_object, offsets})
    kept_.push_back(nb::borrow(object));
  outcomes_ = outcomes(outcomes_object, "outcomes", this->num_keys());
  const Integers counts(num_keys, "num_keys");
  const Integers places(starts, "starts");
  add_pieces(counts.span(), places.span());
  const Integers of_tables(num_pieces, "num_pieces");
  for (const std::int64_t count : of_tables.span()) {
    const std::size_t left = pieces_.size() - first_pieces_.back();
    if (count < 0 || static_cast<std::size_t>(count) > left)
      refuse_sum("num_pieces", "pieces", pieces_.size(), of_tables.span());
    first_pieces_.push_back(first_pieces_.back() + static_cast<std::size_t>(count));
  }
  if (first_pieces_.back() != pieces_.size())
    refuse_sum("num_pieces", "pieces", pieces_.size(), of_tables.span());
  if (!offsets.is_none()) add_offsets(offsets);
  if (!is_mean.is_none()) add_pooling(is_mean);
}

void PyJoinedBags::add_pieces(std::span<const std::int64_t> num_keys,
                              std::span<const std::int64_t> starts) {
  require_size("starts", "piece", num_keys.size(), starts.size());
  const std::span<const Outcome> found{static_cast<const Outcome*>(outcomes_.data),
                                       rows_.span().size()};
  std::size_t begin = 0;
  pieces_.reserve(num_keys.size());
  for (std::size_t i = 0; i < num_keys.size(); ++i) {
    const std::int64_t count = num_keys[i];
    if (count < 0 || static_cast<std::size_t>(count) > found.size() - begin)
      refuse_sum("num_keys", "rows", found.size(), num_keys);
    const auto n = static_cast<std::size_t>(count);
    pieces_.push_back(
        {{rows_.span().subspan(begin, n), found.subspan(begin, n), {}, {}}, starts[i]});
    begin += n;
  }
  if (begin != found.size()) refuse_sum("num_keys", "rows", found.size(), num_keys);
}

void PyJoinedBags::add_offsets(nb::handle offsets) {
  const nb::tuple given = sequence(offsets, "offsets");
  require_size("offsets", "piece", pieces_.size(), given.size());
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (nb::handle(given[i]).is_none()) continue;
    const Integers& own = offsets_.emplace_back(given[i], "offsets");
    require_some_offsets(own.span());
    pieces_[i].bags.offsets = own.span();
  }
  kept_.push_back(given);
}

void PyJoinedBags::add_pooling(nb::handle is_mean) {
  const Array flags = bytes(is_mean, "is_mean");
  require_size("is_mean", "piece", pieces_.size(), static_cast<std::size_t>(flags.shape[0]));
  const auto* const flag = static_cast<const std::uint8_t*>(flags.data);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (flag[i] != 0) pieces_[i].bags.pooling = Pooling::kMean;
  }
}

std::int64_t PyJoinedBags::num_bags() const {
  std::int64_t total = 0;
  for (const Piece& piece : pieces_) total += piece.bags.num_bags();
  return total;
}

std::span<const PyJoinedBags::Piece> PyJoinedBags::pieces_of(std::int64_t table) const {
  const auto at = static_cast<std::size_t>(table);
  const std::size_t first = first_pieces_[at];
  return std::span(pieces_).subspan(first, first_pieces_[at + 1] - first);
}

void PyJoinedBags::require_unmoved() const {
  rows_.require_unmoved();
  bind::require_unmoved(outcomes_);
  for (const Integers& own : offsets_) own.require_unmoved();
}

}  // namespace recsdk::bind
