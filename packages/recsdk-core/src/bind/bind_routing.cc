// routing.h: a batch cut by the shards of its keys, and read where it arrives.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "arguments/array.h"
#include "arguments/gil.h"
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

std::span<std::int64_t> span_of(const Result& result, std::int64_t size) {
  return row_span(result, static_cast<std::size_t>(size));
}

nb::tuple cut(nb::handle keys_object, nb::handle lengths_object,
              const std::vector<std::int64_t>& num_bags, std::int64_t num_shards, bool by_modulo,
              bool wants_places, std::int64_t num_virtual_shards) {
  const Keys keys(keys_object);
  const Integers lengths(lengths_object, "lengths");
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
  Result filled = make_narrow(keys.framework(), num_filled);
  {
    const WithoutGil without_gil;
    cutter->write(span_of(words, num_words), span_of(places, num_places),
                  {static_cast<std::int32_t*>(filled.data), static_cast<std::size_t>(num_filled)});
  }
  return nb::make_tuple(std::move(words.object), std::move(places.object), std::move(filled.object),
                        listed(cutter->num_words()), listed(cutter->num_keys()),
                        listed(cutter->num_filled()));
}

nb::tuple read(nb::handle words_object, std::int64_t num_features, bool every_key_is_a_bag) {
  const Integers words(words_object, "words");
  ArrivedBags found;
  {
    const WithoutGil without_gil;
    found = read_bags(words.span(), num_features, every_key_is_a_bag);
  }
  nb::object offsets = nb::none();
  if (!every_key_is_a_bag && found.num_filled != found.num_keys) {
    const std::int64_t size = sum(found.num_filled) + num_features;
    Result made = make_rows(words.framework(), size);
    {
      const WithoutGil without_gil;
      write_offsets(words.span(), found, span_of(made, size));
    }
    offsets = std::move(made.object);
  }
  return nb::make_tuple(found.num_words, found.num_keys, found.num_filled, std::move(offsets));
}

nb::tuple count(nb::handle lengths_object, const std::vector<std::int64_t>& num_bags,
                std::int64_t num_keys) {
  const Integers lengths(lengths_object, "lengths");
  FeatureCounts found;
  {
    const WithoutGil without_gil;
    found = count_keys(lengths.span(), num_bags, num_keys);
  }
  nb::list has_one_key_each;
  for (const std::uint8_t flag : found.has_one_key_each) has_one_key_each.append(flag != 0);
  return nb::make_tuple(found.num_keys, std::move(has_one_key_each));
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
  module.def("count_keys", &count, nb::arg("lengths").none(), nb::arg("num_bags"),
             nb::arg("num_keys"));
  module.def("cut_bags", &cut, nb::arg("keys").none(), nb::arg("lengths").none(),
             nb::arg("num_bags"), nb::arg("num_shards"), nb::arg("by_modulo"),
             nb::arg("wants_places"), nb::arg("num_virtual_shards"));
  module.def("read_bags", &read, nb::arg("words").none(), nb::arg("num_features"),
             nb::arg("every_key_is_a_bag"));
}

}  // namespace recsdk::bind
