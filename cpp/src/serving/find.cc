#include "serving/find.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>

#include "util/prefetch.h"

namespace recsdk::internal {
namespace {

// Lines are fetched a block of keys ahead.
constexpr std::size_t kBlock = 32;

// Bit i: tag i of the line is this one. Also of tags beyond the line's count.
std::uint32_t equal_tags(const FrozenLine& line, std::uint16_t tag) {
#if defined(__x86_64__)
  const __m128i wanted = _mm_set1_epi16(static_cast<short>(tag));
  const auto* const p = reinterpret_cast<const __m128i*>(&line);
  const auto equal = [&](int i) { return _mm_cmpeq_epi16(_mm_load_si128(p + i), wanted); };
  const auto low =
      static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(equal(0), equal(1))));
  const auto high =
      static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(equal(2), equal(3))));
  return (low | high << 16) >> (32 - FrozenLine::kTags);  // the first 8 bytes are no tags
#else
  std::uint32_t found = 0;
  for (int i = 0; i < FrozenLine::kTags; ++i)
    found |= static_cast<std::uint32_t>(line.tags[i] == tag) << i;
  return found;
#endif
}

std::uint32_t tags_below(int count) {
  return count >= 32 ? ~0U : (1U << static_cast<unsigned>(count)) - 1U;
}

// Records that the file has of those a line claims: a damaged line may claim any.
int records_of(const FrozenView& view, const FrozenLine& line) {
  const std::int64_t there = view.num_rows - line.begin();
  return static_cast<int>(std::clamp<std::int64_t>(there, 0, line.count()));
}

const std::byte* record_at(const FrozenView& view, std::int64_t number) {
  return view.records + number * view.record_bytes;
}

const std::byte* candidate(const FrozenView& view, const FrozenLine& line, std::uint16_t tag) {
  const int count = records_of(view, line);
  const std::uint32_t found = equal_tags(line, tag) & tags_below(count);
  if (found != 0) return record_at(view, line.begin() + std::countr_zero(found));
  // Those without a tag: find_record looks at them, if the first of them is not the one.
  if (count > FrozenLine::kTags) return record_at(view, line.begin() + FrozenLine::kTags);
  return nullptr;
}

// The one file of a table: a copy, which no store of a loop can change.
struct OneFile {
  FrozenView view;
  struct Place {};

  Place place(Key) const { return {}; }
  const FrozenView& at(Place) const { return view; }
};

// One file of several for each key.
struct FileOfShard {
  FrozenShards shards;
  using Place = const FrozenView*;

  Place place(Key key) const { return shards.of(key); }
  static const FrozenView& at(Place place) { return *place; }
};

template <class Files>
struct Sought {
  typename Files::Place place;
  const FrozenLine* line;
  std::uint16_t tag;
};

template <class Files>
void seek(const Files& files, const Key* keys, std::size_t count, Sought<Files>* sought) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto place = files.place(keys[i]);
    const FrozenView& view = files.at(place);
    const std::uint64_t hash = frozen_hash(keys[i], view.hash_seed);
    const FrozenLine* const line = view.lines + frozen_line(hash, view.num_lines);
    prefetch_line(line);
    sought[i] = {place, line, frozen_tag(hash)};
  }
}

bool has_key(const std::byte* record, Key key) {
  return std::memcmp(record, &key, sizeof(key)) == 0;
}

template <class Files>
void find_in_files(const Files& files, std::span<const Key> keys, const std::byte** records) {
  Sought<Files> sought[2][kBlock];
  const std::size_t n = keys.size();
  std::size_t ahead = std::min(kBlock, n);
  seek(files, keys.data(), ahead, sought[0]);
  for (std::size_t done = 0, turn = 0; done < n; turn ^= 1) {
    const std::size_t end = ahead;
    const std::size_t next = std::min(kBlock, n - ahead);
    seek(files, keys.data() + ahead, next, sought[turn ^ 1]);
    ahead += next;
    for (std::size_t i = 0; done < end; ++i, ++done) {
      const Sought<Files>& s = sought[turn][i];
      records[done] = candidate(files.at(s.place), *s.line, s.tag);
    }
  }
}

// Of the files, or of one image as a table of one file.
void find_in(const FrozenShards& shards, std::span<const Key> keys, const std::byte** records) {
  if (shards.views.size() == 1) return find_in_files(OneFile{*shards.views[0]}, keys, records);
  find_in_files(FileOfShard{shards}, keys, records);
}

const std::byte* find_one(const FrozenView& view, Key key) {
  const std::uint64_t hash = frozen_hash(key, view.hash_seed);
  const FrozenLine& line = view.lines[frozen_line(hash, view.num_lines)];
  const int count = records_of(view, line);
  std::uint32_t found = equal_tags(line, frozen_tag(hash)) & tags_below(count);
  for (; found != 0; found &= found - 1) {
    const std::byte* const record = record_at(view, line.begin() + std::countr_zero(found));
    if (has_key(record, key)) return record;
  }
  for (int i = FrozenLine::kTags; i < count; ++i) {
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
  void pass(const FrozenShards& image, const Settles& settles) {
    find_in(image, {keys_.data(), count_}, found_.data());
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

template <class Settles>
void pass(Pending& pending, const Image& image, const Settles& settles) {
  if (image.is_empty()) return;
  const FrozenView* const view = &image.view();
  pending.pass({{&view, 1}}, settles);
}

}  // namespace

void find_candidates(const Sources& sources, std::span<const Key> keys, const std::byte** records) {
  if (sources.layers.empty()) return find_in(sources.files, keys, records);
  Pending pending(keys);
  for (const auto& layer : sources.layers) {
    pass(pending, layer->rows, [&](std::uint16_t place, Key, const std::byte* record) {
      records[place] = record;
      return record != nullptr;
    });
    pass(pending, layer->erased, [&](std::uint16_t place, Key key, const std::byte* record) {
      records[place] = nullptr;
      return record != nullptr && has_key(record, key);
    });
  }
  pending.pass(sources.files, [&](std::uint16_t place, Key, const std::byte* record) {
    records[place] = record;
    return true;
  });
}

const std::byte* find_record(const void* context, Key key) {
  const Sources& sources = *static_cast<const Sources*>(context);
  for (const auto& layer : sources.layers) {
    const bool has_rows = !layer->rows.is_empty();
    const std::byte* const record = has_rows ? find_one(layer->rows.view(), key) : nullptr;
    if (record != nullptr) return record;
    const bool has_erased = !layer->erased.is_empty();
    if (has_erased && find_one(layer->erased.view(), key) != nullptr) return nullptr;
  }
  return find_one(*sources.files.of(key), key);
}

void read_shared(const Sources& sources, const SharedRecords& shared, std::span<Key> keys,
                 const std::byte** records, std::uint8_t* are_missing) {
  const std::size_t n = keys.size();
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kBlock < n && records[i + kBlock] != nullptr) prefetch_line(records[i + kBlock]);
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
