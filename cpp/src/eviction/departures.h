// Keys of one group that left a while ago, in the order of (step of leaving, fixed hash).
//
// They lie in one list. Keys that leave are added at its end, sorted within their step; keys that
// are forgotten are taken from its front. A small table of 8-byte slots says where in the list a
// key lies, so that most keys that were never here cost one line of it. A key that comes back gives
// up its slot alone: its place in the list stays, unused, until it comes to the front or there are
// too many such places.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "keymap/key_map.h"
#include "recsdk/types.h"
#include "util/hash.h"
#include "util/prefetch.h"

namespace recsdk::internal {

/// Whether more than `steps` steps have passed since a key left; steps may be any numbers.
inline bool is_over(std::int64_t left, std::int64_t step, std::int64_t steps) noexcept {
  std::int64_t elapsed = 0;
  return step > left && (__builtin_sub_overflow(step, left, &elapsed) || elapsed > steps);
}

class Departures {
 public:
  explicit Departures(std::uint32_t most) : most_(most) {}

  /// Makes sure that so many keys can be added without fail. Throws std::bad_alloc.
  void reserve(std::size_t count, const SeededHash& mix);
  /// Adds keys that leave in `step`, by their hashes, ascending; none of them is here, and no step
  /// given before is later. Forgets keys that left more than `steps` steps before. If there are
  /// still too many, forgets the lowest; returns how many of these.
  std::uint64_t add(std::span<const std::uint64_t> hashes, std::int64_t step, std::int64_t steps,
                    const SeededHash& mix) noexcept;
  /// Takes out a key: the step in which it left, if it is here.
  std::optional<std::int64_t> take(std::uint64_t hash, const SeededHash& mix) noexcept;
  void prefetch(std::uint64_t hash, const SeededHash& mix) const noexcept {
    if (!slots_.empty()) prefetch_line(&slots_[home(mixed(hash, mix))]);
  }
  /// Asks for the slots that adding these keys will use, and those of the keys that they push out.
  void prefetch_all(std::span<const std::uint64_t> hashes, const SeededHash& mix) const noexcept;
  void clear() noexcept;

  std::size_t bytes() const noexcept {
    return list_.capacity() * sizeof(Leaving) + slots_.capacity() * sizeof(Slot);
  }
  /// What is broken, or empty. `rows` are the keys that have a row.
  std::string find_broken(const KeyMap& rows, const SeededHash& mix) const;

 private:
  struct Leaving {
    std::int64_t step = 0;
    std::uint64_t hash = 0;

    friend auto operator<=>(const Leaving&, const Leaving&) = default;
  };
  static constexpr std::uint32_t kNone = 0;
  struct Slot {
    std::uint32_t number = kNone;  // of a place in the list: `base_` is that of its first
    std::uint32_t mixed = 0;
  };

  static std::uint32_t mixed(std::uint64_t hash, const SeededHash& mix) noexcept {
    return static_cast<std::uint32_t>(mix(static_cast<Key>(hash)));
  }
  std::size_t home(std::uint32_t mixed) const noexcept { return mixed & (slots_.size() - 1); }
  std::size_t next(std::size_t slot) const noexcept { return (slot + 1) & (slots_.size() - 1); }
  std::uint32_t number(std::size_t place) const noexcept {
    return base_ + static_cast<std::uint32_t>(place);
  }
  void link(std::size_t place, const SeededHash& mix) noexcept;
  bool unlink(std::size_t place, const SeededHash& mix) noexcept;
  void empty_slot(std::size_t slot) noexcept;
  void drop_front() noexcept;
  void renumber(const SeededHash& mix) noexcept;
  void grow_slots(std::size_t count);
  bool forget_first(const SeededHash& mix) noexcept;
  void append(std::span<const std::uint64_t> hashes, std::int64_t step,
              const SeededHash& mix) noexcept;

  std::uint32_t most_;
  std::uint32_t used_ = 0;  // keys that are here
  std::uint32_t base_ = 1;
  std::size_t first_ = 0;      // places before are in vain
  std::vector<Leaving> list_;  // ascending
  std::vector<Slot> slots_;    // a power of two; probed one after the other
};

}  // namespace recsdk::internal
