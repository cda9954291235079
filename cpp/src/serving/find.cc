#include "serving/find.h"

#include <algorithm>
#include <array>

#include "serving/serving_kernels.h"
#include "util/prefetch.h"

namespace recsdk::internal {
namespace {

// Records are fetched this many keys ahead.
constexpr std::size_t kAhead = 32;

// Records that the file has of those a line claims: a damaged line may claim any.
int records_of(const FrozenView& view, const FrozenLine& line) {
  const std::int64_t there = view.num_rows - line.begin();
  return static_cast<int>(std::clamp<std::int64_t>(there, 0, line.count()));
}

const std::byte* record_at(const FrozenView& view, std::int64_t number) {
  return view.records + number * view.record_bytes;
}

bool has_key(const std::byte* record, Key key) {
  return std::memcmp(record, &key, sizeof(key)) == 0;
}

// Of files, or of the images of a layer.
void find_in(std::span<const FrozenView* const> views, int range_bits, std::span<const Key> keys,
             const std::byte** records) {
  serving_kernels().find({views.data(), static_cast<std::uint32_t>(views.size()), range_bits,
                          keys.data(), keys.size(), records});
}

const std::byte* find_one(const FrozenView& view, Key key, int range_bits = 0) {
  const std::uint64_t hash = frozen_hash(key, view.hash_seed);
  const FrozenLine& line = view.lines[frozen_line(hash << range_bits, view.num_lines)];
  const int count = records_of(view, line);
  const std::uint16_t tag = frozen_tag(hash);
  for (int i = 0; i < count; ++i) {
    if (i < FrozenLine::kTags && line.tags[i] != tag) continue;
    const std::byte* const record = record_at(view, line.begin() + i);
    if (has_key(record, key)) return record;
  }
  return nullptr;
}

// Keys of a call that no layer so far has told of.
class Pending {
 public:
  explicit Pending(std::span<const Key> keys) : count_(keys.size()) {
    for (std::size_t i = 0; i < count_; ++i) {
      keys_[i] = keys[i];
      places_[i] = static_cast<std::uint16_t>(i);
    }
  }

  /// Passes the candidates of an image, with the place of their key in the call, to settles(place,
  /// key, record), and keeps the keys that it does not settle.
  template <class Settles>
  void pass(std::span<const FrozenView* const> views, int range_bits, const Settles& settles) {
    find_in(views, range_bits, {keys_.data(), count_}, found_.data());
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      if (settles(places_[i], keys_[i], found_[i])) continue;
      keys_[kept] = keys_[i];
      places_[kept++] = places_[i];
    }
    count_ = kept;
  }

 private:
  std::size_t count_;
  std::array<Key, kKeysAtATime> keys_;
  std::array<std::uint16_t, kKeysAtATime> places_;
  std::array<const std::byte*, kKeysAtATime> found_;
};

const std::byte* find_in_layer(const Layer& layer, std::span<const FrozenView* const> images,
                               Key key) {
  const std::uint64_t hash = frozen_hash(key, layer.shape().hash_seed);
  return find_one(*images[range_of(hash, layer.range_bits())], key, layer.range_bits());
}

}  // namespace

void find_candidates(const Sources& sources, std::span<const Key> keys, const std::byte** records) {
  if (sources.layers.empty()) return find_in(sources.files.views, 0, keys, records);
  Pending pending(keys);
  for (const auto& layer : sources.layers) {
    if (layer->has_rows()) {
      pending.pass(layer->rows(), layer->range_bits(),
                   [&](std::uint16_t place, Key, const std::byte* record) {
                     records[place] = record;
                     return record != nullptr;
                   });
    }
    if (layer->has_erased()) {
      pending.pass(layer->erased(), layer->range_bits(),
                   [&](std::uint16_t place, Key key, const std::byte* record) {
                     records[place] = nullptr;
                     if (record == nullptr) return false;
                     // Its tag may be that of another key that left.
                     return has_key(record, key) ||
                            find_in_layer(*layer, layer->erased(), key) != nullptr;
                   });
    }
  }
  pending.pass(sources.files.views, 0, [&](std::uint16_t place, Key, const std::byte* record) {
    records[place] = record;
    return true;
  });
}

const std::byte* find_record(const void* context, Key key) {
  const Sources& sources = *static_cast<const Sources*>(context);
  for (const auto& layer : sources.layers) {
    const std::byte* const record = find_in_layer(*layer, layer->rows(), key);
    if (record != nullptr) return record;
    if (layer->has_erased() && find_in_layer(*layer, layer->erased(), key) != nullptr)
      return nullptr;
  }
  return find_one(*sources.files.of(key), key);
}

void read_shared(const Sources& sources, const SharedRecords& shared, std::span<Key> keys,
                 const std::byte** records, std::uint8_t* are_missing) {
  const std::size_t n = keys.size();
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && records[i + kAhead] != nullptr) prefetch_line(records[i + kAhead]);
    if (records[i] != nullptr && !has_key(records[i], keys[i]))
      records[i] = find_record(&sources, keys[i]);
    are_missing[i] = records[i] == nullptr ? 1 : 0;
    if (records[i] != nullptr) continue;
    const auto num_shared = std::ssize(shared.records);
    records[i] = shared.records[static_cast<std::size_t>(frozen_shared_row(keys[i], num_shared))];
    keys[i] = key_of_record(records[i]);
  }
}

std::vector<std::uint8_t> have_rows(const Sources& sources, std::span<const Key> keys) {
  std::vector<std::uint8_t> answers;
  answers.reserve(keys.size());
  std::array<const std::byte*, kKeysAtATime> records;
  for (std::size_t begin = 0; begin < keys.size(); begin += kKeysAtATime) {
    const std::span<const Key> some =
        keys.subspan(begin, std::min(kKeysAtATime, keys.size() - begin));
    find_candidates(sources, some, records.data());
    for (std::size_t i = 0; i < some.size(); ++i) {
      const bool is_it = records[i] != nullptr && has_key(records[i], some[i]);
      const bool is_there =
          is_it || (records[i] != nullptr && find_record(&sources, some[i]) != nullptr);
      answers.push_back(is_there ? 1 : 0);
    }
  }
  return answers;
}

}  // namespace recsdk::internal
