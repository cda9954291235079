// routing.h: a batch cut by the shards of its keys, and read where it arrives.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arguments/array.h"
#include "arguments/calls.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/refusals.h"
#include "arguments/results.h"
#include "bindings.h"
#include "recsdk/routing.h"

namespace recsdk::bind {
namespace {

std::int64_t sum(std::span<const std::int64_t> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

std::vector<std::int64_t> listed(std::span<const std::int64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

/// A fresh array of numpy.
nb::object array_of(std::span<const std::int64_t> numbers) {
  Result made = make_rows(Framework::kNumpy, static_cast<std::int64_t>(numbers.size()));
  std::ranges::copy(numbers, static_cast<std::int64_t*>(made.data));
  return made.object;
}

std::span<std::int64_t> span_of(const Result& result, std::int64_t size) {
  return row_span(result, static_cast<std::size_t>(size));
}

/// Room for `size` numbers, at the beginning of what is given or in an array of its own.
Result room_for(nb::handle given, std::int64_t size, Framework framework) {
  if (given.is_none()) return make_narrow(framework, size);
  const Array array = numbers_to_fill(given, "filled");
  if (array.scalar != Scalar::kInt32 || array.shape[0] < size)
    refuse_value("filled", "be int32, with room for " + std::to_string(size),
                 std::string(array.scalar == Scalar::kInt32 ? "int32" : "int64") +
                     " with room for " + std::to_string(array.shape[0]));
  return {nb::borrow(given), array.data};
}

nb::tuple cut(nb::handle keys_object, nb::handle lengths_object, nb::handle num_bags_object,
              nb::handle num_shards_object, bool by_modulo, nb::handle wants_places_object,
              nb::handle num_virtual_shards_object, nb::handle filled_object,
              nb::handle counts_in_batch) {
  const Keys keys(keys_object);
  const Integers lengths = Integers::if_given(lengths_object, "lengths");
  const std::vector<std::int64_t> num_bags = integer_list(num_bags_object, "num_bags");
  const std::int64_t num_shards = integer(num_shards_object, "num_shards");
  const std::int64_t num_virtual_shards = integer(num_virtual_shards_object, "num_virtual_shards");
  const bool wants_places = flag(wants_places_object, "wants_places");
  const bool in_batch = flag(counts_in_batch, "counts_in_batch");
  const FeatureBatch batch{keys.span(), lengths.span(), num_bags, lengths_object.is_none()};
  const OwnerRule rule = by_modulo ? OwnerRule::kModulo : OwnerRule::kVirtualShard;
  std::optional<BagCutter> cutter;
  {
    const WithoutGil without_gil;
    cutter.emplace(batch, num_shards, rule, num_virtual_shards);
  }
  const std::int64_t num_words = sum(cutter->num_words());
  const std::int64_t num_filled = sum(cutter->num_filled());
  const auto num_places = wants_places ? sum(cutter->num_keys()) : 0;
  Result words = make_rows(keys.framework(), num_words);
  Result places = make_rows(keys.framework(), num_places);
  Result filled = room_for(filled_object, num_filled, keys.framework());
  {
    const WithoutGil without_gil;
    cutter->write(span_of(words, num_words), span_of(places, num_places),
                  {static_cast<std::int32_t*>(filled.data), static_cast<std::size_t>(num_filled)},
                  in_batch);
  }
  return nb::make_tuple(std::move(words.object), std::move(places.object), std::move(filled.object),
                        listed(cutter->num_words()), listed(cutter->num_keys()),
                        array_of(cutter->num_filled()));
}

/// What several processes sent, on several routes.
class ArrivedBatches {
 public:
  ArrivedBatches(const Integers& words, const std::vector<std::int64_t>& num_words,
                 const std::vector<std::int64_t>& num_features,
                 const std::vector<bool>& every_key_is_a_bag)
      : words_(words) {
    require_size("every_key_is_a_bag", "of num_words", num_words.size(), every_key_is_a_bag.size());
    const WithoutGil without_gil;
    std::span<const std::int64_t> left = words.span();
    for (std::size_t i = 0; i < num_words.size(); ++i) {
      if (num_words[i] < 0 || num_words[i] > static_cast<std::int64_t>(left.size())) break;
      const auto size = static_cast<std::size_t>(num_words[i]);
      read(left.first(size), num_features, every_key_is_a_bag[i]);
      left = left.subspan(size);
      ++num_read_;
    }
    if (num_read_ != num_words.size() || !left.empty())
      refuse_sum("num_words", "words", words.span().size(), num_words);
  }

  nb::tuple get() const {
    nb::list offsets;
    for (const Batch& batch : batches_) offsets.append(offsets_of(batch));
    return nb::make_tuple(array_of(first_keys_), array_of(num_keys_), array_of(num_filled_),
                          std::move(offsets));
  }

 private:
  struct Batch {
    std::span<const std::int64_t> words;
    ArrivedBags bags;
  };

  /// One process' words of all routes.
  void read(std::span<const std::int64_t> words, const std::vector<std::int64_t>& num_features,
            bool every_key_is_a_bag) {
    for (const std::int64_t features : num_features) {
      const Batch& batch =
          batches_.emplace_back(Batch{words, read_bags(words, features, every_key_is_a_bag)});
      words = words.subspan(static_cast<std::size_t>(batch.bags.num_words));
      std::int64_t key = (words.data() - words_.span().data()) - sum(batch.bags.num_keys);
      for (const std::int64_t count : batch.bags.num_keys) {
        first_keys_.push_back(key);
        key += count;
      }
      num_keys_.insert(num_keys_.end(), batch.bags.num_keys.begin(), batch.bags.num_keys.end());
      num_filled_.insert(num_filled_.end(), batch.bags.num_filled.begin(),
                         batch.bags.num_filled.end());
    }
    if (!words.empty()) throw std::invalid_argument("num_words must be those of all routes");
  }

  /// None: each bag that has keys has one.
  nb::object offsets_of(const Batch& batch) const {
    const ArrivedBags& bags = batch.bags;
    if (bags.length_bytes == 0 || bags.num_filled == bags.num_keys) return nb::none();
    const auto size = sum(bags.num_filled) + static_cast<std::int64_t>(bags.num_filled.size());
    Result made = make_rows(words_.framework(), size);
    {
      const WithoutGil without_gil;
      write_offsets(batch.words, bags, span_of(made, size));
    }
    return std::move(made.object);
  }

  const Integers& words_;
  std::size_t num_read_ = 0;
  std::vector<Batch> batches_;
  std::vector<std::int64_t> first_keys_, num_keys_, num_filled_;
};

nb::tuple read(nb::handle words_object, nb::handle num_words, nb::handle num_features,
               nb::handle every_key_is_a_bag) {
  const Integers words(words_object, "words");
  return ArrivedBatches(words, integer_list(num_words, "num_words"),
                        integer_list(num_features, "num_features"),
                        flag_list(every_key_is_a_bag, "every_key_is_a_bag"))
      .get();
}

nb::tuple count(nb::handle lengths_object, nb::handle num_bags_object, nb::handle num_keys_object) {
  const Array lengths = integers(lengths_object, "lengths");
  const std::vector<std::int64_t> num_bags = integer_list(num_bags_object, "num_bags");
  const std::int64_t num_keys = integer(num_keys_object, "num_keys");
  FeatureCounts found;
  {
    const WithoutGil without_gil;
    found = lengths.scalar == Scalar::kInt32
                ? count_keys(numbers_of<const std::int32_t>(lengths), num_bags, num_keys)
                : count_keys(numbers_of<const std::int64_t>(lengths), num_bags, num_keys);
  }
  nb::list has_one_key_each;
  for (const std::uint8_t flag : found.has_one_key_each) has_one_key_each.append(flag != 0);
  return nb::make_tuple(found.num_keys, std::move(has_one_key_each));
}

nb::object lay_out(nb::handle lengths_object, nb::handle num_bags_object) {
  const Array lengths = integers(lengths_object, "lengths");
  const std::vector<std::int64_t> num_bags = integer_list(num_bags_object, "num_bags");
  const auto size = lengths.shape[0] + static_cast<std::int64_t>(num_bags.size());
  Result made = make_rows(lengths.framework, size);
  {
    const WithoutGil without_gil;
    if (lengths.scalar == Scalar::kInt32)
      lay_out_offsets(numbers_of<const std::int32_t>(lengths), num_bags, span_of(made, size));
    else
      lay_out_offsets(numbers_of<const std::int64_t>(lengths), num_bags, span_of(made, size));
  }
  return std::move(made.object);
}

void join(nb::handle offsets_object, nb::handle num_keys_object, nb::handle out_object) {
  const Array out = numbers_to_fill(out_object, "out");
  const nb::tuple given = sequence(offsets_object, "offsets");
  const Integers num_keys(num_keys_object, "num_keys");
  require_size("num_keys", "item of offsets", given.size(), num_keys.span().size());
  std::deque<Integers> kept;
  std::vector<BagPiece> pieces;
  for (std::size_t i = 0; i < given.size(); ++i) {
    BagPiece& piece = pieces.emplace_back(BagPiece{{}, num_keys.span()[i]});
    if (nb::handle(given[i]).is_none()) continue;
    piece.offsets = kept.emplace_back(given[i], "offsets").span();
    require_some_offsets(piece.offsets);
  }
  const WithoutGil without_gil;
  if (out.scalar == Scalar::kInt32)
    join_offsets(pieces, numbers_of<std::int32_t>(out));
  else
    join_offsets(pieces, numbers_of<std::int64_t>(out));
}

/// Whether bags that end there run from the first of `num_keys` keys to the last.
bool bags_fit(nb::handle offsets_object, std::int64_t num_keys) {
  const Integers offsets(offsets_object, "offsets");
  const std::span<const std::int64_t> ends = offsets.span();
  return !ends.empty() && ends.front() == 0 && ends.back() == num_keys &&
         std::is_sorted(ends.begin(), ends.end());
}

}  // namespace

void bind_routing(nb::module_& module) {
  module.def("bags_fit", &bags_fit, nb::arg("offsets").none(), nb::arg("num_keys"));
  module.def("count_keys", &count, nb::arg("lengths").none(), nb::arg("num_bags").none(),
             nb::arg("num_keys").none());
  module.def("lay_out_offsets", &lay_out, nb::arg("lengths").none(), nb::arg("num_bags").none());
  module.def("join_offsets", &join, nb::arg("offsets").none(), nb::arg("num_keys").none(),
             nb::arg("out").none());
  module.def("cut_bags", &cut, nb::arg("keys").none(), nb::arg("lengths").none(),
             nb::arg("num_bags").none(), nb::arg("num_shards").none(), nb::arg("by_modulo"),
             nb::arg("wants_places").none(), nb::arg("num_virtual_shards").none(),
             nb::arg("filled").none(), nb::arg("in_batch").none());
  module.def("read_bags", &read, nb::arg("words").none(), nb::arg("num_words").none(),
             nb::arg("num_features").none(), nb::arg("every_key_is_a_bag").none());
}

}  // namespace recsdk::bind
